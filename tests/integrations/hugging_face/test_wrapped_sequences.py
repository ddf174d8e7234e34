"""Log-probabilities of models in wrappers, over contexts that have a batch each, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import cp_fast
from cp_fast.integrations import sequences
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.loss import loss_for_backward
from cp_fast.integrations.sequences import sequence_sum, token_log_probs
from tests.dist.workers import Processes
from tests.integrations.hugging_face.families import tiny

pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

LENGTHS = ((11, 3, 18, 7), (5, 9, 14, 6))  # of the documents of each context's batch: pairs of answers
WRAPPERS = ("DDP", "DDP of the contexts", "the context", "all ranks", "contexts and ranks", "the head apart")


def batch_of(context: int) -> dict[str, torch.Tensor]:
    """A packed row; prompts of two tokens are not learnt."""
    lengths = LENGTHS[context]
    ids = torch.randint(1, 50, (1, sum(lengths)), generator=torch.Generator().manual_seed(context))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions < 2, -100)}


def dpo(scores: torch.Tensor) -> torch.Tensor:
    better, worse = scores.view(-1, 2).T
    return -F.logsigmoid(0.1 * (better - worse)).sum()


def alone(model: Any, contexts: int) -> list[torch.Tensor]:
    """The log-probabilities of each context's tokens; the gradients are those of all losses."""
    found: list[torch.Tensor] = []
    for context in range(contexts):
        batch = batch_of(context)
        parts: list[torch.Tensor] = []
        for ids, labels in zip(*(batch[n][0].split(LENGTHS[context]) for n in ("input_ids", "labels")), strict=True):
            targets = F.pad(labels[1:], (0, 1), value=-100)
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            parts.append(-F.cross_entropy(logits, targets, reduction="none"))
        dpo(torch.stack([part.sum() for part in parts])).backward()
        found.append(torch.cat(parts).detach())
    return found


def wrapped(model: Any, wrapper: str, mesh: Any) -> tuple[Any, Any]:
    """The model in a wrapper, and the group over which gradients are still to be added up."""
    if wrapper == "DDP":
        return DistributedDataParallel(model), None
    if wrapper == "DDP of the contexts":
        return DistributedDataParallel(model, process_group=mesh["dp"].get_group()), mesh["cp"].get_group()
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    over = {"the context": mesh["cp"], "contexts and ranks": mesh}.get(wrapper, everyone)
    apart = [model.lm_head] if wrapper == "the head apart" else []
    for module in (*model.model.layers, *apart, model):
        fully_shard(module, mesh=over, reshard_after_forward=wrapper != "all ranks")
    return model, mesh["dp"].get_group() if wrapper == "the context" else None


def step_of(wrapper: str, tied: bool, frozen: bool, checkpointed: bool) -> None:
    sequences._CHUNK_BYTES = 3 * 4 * 5 * 50  # pyright: ignore[reportPrivateUsage]  # three tokens
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    one = tiny("LlamaForCausalLM", tie_word_embeddings=tied).double()
    for weight in one.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    one.get_output_embeddings().requires_grad_(not frozen)
    context = cp_fast.ContextParallel(mesh["cp"], layout="balanced")
    inner = ours.prepare(copy.deepcopy(one), context).train()
    if checkpointed:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = alone(one, 2)
    model, group = wrapped(inner, wrapper, mesh)
    mine = mesh["dp"].get_local_rank()
    part = ours.shard_batch(batch_of(mine), cp=context, model=model)
    found = token_log_probs(model, part)
    loss_for_backward(dpo(sequence_sum(found, part)) / context.size, averaged_over=model).backward()
    torch.testing.assert_close(part["cp_batch"].unshard(found)[0], expected[mine], rtol=1e-6, atol=1e-6)
    for (name, weight), theirs in zip(inner.named_parameters(), one.parameters(), strict=True):
        assert (weight.grad is None) == (theirs.grad is None), name
        if weight.grad is not None:
            grad: Any = weight.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            if group is not None:
                dist.all_reduce(grad, group=group)
            torch.testing.assert_close(grad, theirs.grad, rtol=1e-6, atol=1e-7, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(token_log_probs(model, part), found)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrapper", "tied", "frozen", "checkpointed"),
    [
        *((wrapper, False, frozen, not frozen) for wrapper in WRAPPERS for frozen in (False, True)),
        *((wrapper, True, False, False) for wrapper in WRAPPERS[:-1]),  # a tied head is not apart
    ],
)
def test_a_step_of_wrapped_models(four: Processes, wrapper: str, tied: bool, frozen: bool, checkpointed: bool) -> None:
    """Heads that are gathered or sharded, trained, frozen, or tied to the embedding; then without gradients."""
    assert four.run(step_of, wrapper, tied, frozen, checkpointed) == [None] * 4


def rounded() -> str:
    context = cp_fast.ContextParallel(dist.group.WORLD)
    model: Any = ours.prepare(tiny("LlamaForCausalLM"), context)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16))
    with pytest.raises(TypeError) as caught:
        token_log_probs(model, ours.shard_batch(batch_of(0), cp=context, model=model))
    return str(caught.value)


def test_outputs_that_a_wrapper_rounds_are_refused(two: Processes) -> None:
    for said in two.run(rounded):
        assert "outputs are torch.bfloat16, which would round log-probabilities; give FSDP's" in said
