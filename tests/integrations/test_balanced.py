"""Layout "balanced" through `shard_tokens`: layers with and without windows, as on one process that has everything."""

from __future__ import annotations

import copy
import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import cp_fast
from cp_fast.integrations.shared.balanced_table import table_of_batch
from cp_fast.integrations.token_batches import shard_tokens
from cp_ref import SimGroup, dense_attention
from cp_ref.schedules.problem import slice_rows
from tests.dist.workers import Processes

WINDOWS = [(-1, -1), (3, 0)]  # of the model's two layers


class Model(torch.nn.Module):
    """Two layers of attention, the second with a window, and positions; attention is handed in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(30, 16), torch.nn.Linear(16, 30)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in WINDOWS)
        self.double()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        x = self.embed(ids) + positions[..., None].double().mul(torch.arange(16) / 7).sin()
        for layer, window in zip(self.qkv, WINDOWS, strict=True):
            q, k, v = layer(x).unflatten(-1, (3, 4, 4)).unbind(-3)
            x = x + attend(q, k, v, window).flatten(-2)
        return self.head(x)


def losses_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum", ignore_index=-100)


def batch_of(lengths: tuple[int, ...], packed: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if packed:
        ids = torch.randint(30, (1, sum(lengths)), generator=generator)
        return {"input_ids": ids, "labels": ids, "position_ids": torch.cat([*map(torch.arange, lengths)])[None]}
    ids = torch.randint(30, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def alone(model: Model, lengths: tuple[int, ...], batch: dict[str, torch.Tensor]) -> None:
    """Gradients of one process, document by document."""
    rows = batch["input_ids"]
    parts = (
        list(rows[0].split(list(lengths))) if len(rows) == 1 else [x[:n] for x, n in zip(rows, lengths, strict=True)]
    )

    def attend(q: Any, k: Any, v: Any, window: Any) -> torch.Tensor:
        return dense_attention(q, k, v, attn_mask_type="causal", window_size=window)[0]

    losses = [losses_of(model(ids[None], torch.arange(len(ids))[None], attend)[:, :-1], ids[None, 1:]) for ids in parts]
    (torch.stack(losses).sum() / (sum(lengths) - len(lengths))).backward()


def over_ranks(model: Model, cp: Any, batch: dict[str, torch.Tensor]) -> None:
    """A rank's share of the gradients."""
    local = shard_tokens(batch, cp=cp)
    sequences = local["cp_batch"]
    packed = sequences.qkv_format == "thd"

    def attend(q: Any, k: Any, v: Any, window: Any) -> torch.Tensor:
        lengths = {"cu_seqlens_q": sequences.cu_seqlens, "cu_seqlens_q_padded": sequences.cu_seqlens_padded}
        how: dict[str, Any] = {"qkv_format": sequences.qkv_format, "attn_mask_type": "padding_causal"} | lengths
        parts = (x[0] if packed else x for x in (q, k, v))
        out = cp_fast.attention(*parts, cp=sequences.cp, window_size=window, **how)
        return out[None] if packed else out

    logits = model(local["input_ids"], local["position_ids"], attend)
    (losses_of(logits, local["labels"]) / local["num_items_in_batch"]).backward()


def grads(model: Model) -> list[torch.Tensor]:
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def over_gloo(comm: str, lengths: tuple[int, ...], packed: bool) -> list[int]:
    batch, expected, model = batch_of(lengths, packed), Model(), Model()
    alone(expected, lengths, batch)
    over_ranks(model, cp_fast.ContextParallel(dist.group.WORLD, comm, layout="balanced"), batch)  # type: ignore[arg-type]
    wrong = []
    for n, (mine, want) in enumerate(zip(grads(model), grads(expected), strict=True)):
        dist.all_reduce(mine)
        if not torch.allclose(mine, want, rtol=1e-9, atol=1e-11):
            wrong.append(n)
    return wrong


@pytest.mark.parametrize("packed", [True, False], ids=["documents", "rows with padding"])
@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("lengths", [(31, 2, 7, 5), (3, 3)], ids=str)
@pytest.mark.one_in(5)
def test_gradients_are_those_of_one_process(four: Processes, comm: str, lengths: tuple[int, ...], packed: bool) -> None:
    assert four.run(over_gloo, comm, lengths, packed) == [[]] * 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 4), st.booleans())
def test_every_token_is_learnt_once(lengths: list[int], cp_size: int, packed: bool) -> None:
    """Slices of equal rows, of which none lies behind the batch; and no label that is not the batch's."""
    batch = batch_of(tuple(lengths), packed)
    numbers = torch.arange(batch["input_ids"].numel()).view(batch["input_ids"].shape)
    batch["labels"] = numbers.masked_fill(batch.get("attention_mask", torch.ones(())) == 0, -100)

    def one(member: Any) -> Any:
        local = shard_tokens(batch, cp=cp_fast.ContextParallel(member, layout="balanced"), shift_labels=False)
        return local["labels"].flatten(), local["position_ids"].flatten(), int(local["num_items_in_batch"])

    found = SimGroup(cp_size).run(one)
    labels, positions = (torch.cat([part[n] for part in found]) for n in (0, 1))
    real = labels != -100
    assert real.sum() == sum(lengths) == found[0][2]
    assert labels[real].unique().numel() == sum(lengths)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + (length if packed else max(lengths)))
    for n, (start, stop) in enumerate(pairwise(starts)):
        own = (labels >= start) & (labels < stop)
        assert torch.equal(labels[own].sort().values - start, torch.arange(lengths[n]))
        assert torch.equal(positions[own], labels[own] - start)


@pytest.mark.thorough
def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
    ours: Any = importlib.import_module("cp_fast.integrations.transformers")
    sizes = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    torch.manual_seed(0)
    alone = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(num_hidden_layers=2, **sizes)
    ).double()
    lengths = (30, 4, 11)
    batch = batch_of(lengths, packed=True)
    parts = batch["input_ids"].split(list(lengths), dim=1)
    losses = [alone(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1) for ids in parts]
    (torch.stack(losses).sum() / (sum(lengths) - len(lengths))).backward()

    def one(member: Any) -> list[torch.Tensor]:
        cp = cp_fast.ContextParallel(member, layout="balanced")
        model = ours.prepare(copy.deepcopy(alone), cp)
        model.zero_grad()
        model(**ours.shard_batch(batch, cp=cp, model=model)).loss.backward()
        return [weight.grad for weight in model.parameters()]

    found = SimGroup(2).run(one)
    for n, weight in enumerate(alone.parameters()):
        torch.testing.assert_close(sum(grads[n] for grads in found), weight.grad, rtol=1e-9, atol=1e-12)


def test_a_batch_is_laid_out_once() -> None:
    def one(member: Any) -> None:
        cp, lengths = cp_fast.ContextParallel(member, layout="balanced"), torch.tensor([0, 30, 33, 48])
        found = table_of_batch(cp, "thd", lengths)
        assert table_of_batch(cp, "thd", lengths.clone()) is found
        assert table_of_batch(cp, "thd", lengths + torch.tensor([0, 0, 1, 0])) is not found
        assert slice_rows(found.problem, "q") == 24
        laid = found.over(cp)
        assert found.over(cp) is laid
        assert str(laid).endswith("layout=a table, backend='auto')")
        with pytest.raises(ValueError, match="layout of a table is known to a plan alone"):
            cp_fast.shard(torch.zeros(48), cp=laid, qkv_format="thd", cu_seqlens_padded=lengths)
        whole = cp_fast.unshard(cp_fast.shard(torch.arange(48), cp=cp, plan=found), cp=laid, plan=found)
        assert torch.equal(whole, torch.arange(48))

    SimGroup(2).run(one)
