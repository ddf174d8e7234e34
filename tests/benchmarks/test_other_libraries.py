"""`benchmarks/attention.py --peers`, as far as a CPU goes: what stands in for FlashAttention 2, and what is named."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.parts import others as module
from benchmarks.parts.others import WAYS, flash_attn_interface, others
from cp_fast.kernels.attention.choose_backend import by_name
from cp_ref.schedules.problem import Problem, Sequence

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_rank_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the modules that are put into `sys.modules`, afterwards."""
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 1)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", ModuleType("none"))


def problem(*lengths: int, **fields: Any) -> Problem:
    sizes = {"heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": "bfloat16"} | fields
    sequences = tuple(Sequence(n, n, n, n) for n in lengths)
    return Problem(2, sequences, qkv_format="thd", attn_mask_type="padding_causal", **sizes)


def test_what_is_left_out_is_named_with_its_reason() -> None:
    found, reasons = others(problem(32), by_name("cpu"), None, CPU)
    assert {f"{one.library} {one.schedule}" for one in found} | set(reasons) == {f"{a} {c}" for a, _, c in WAYS}
    assert "no sharding strategy" in reasons["pytorch p2p"]
    assert "pip install" in reasons["transformer_engine a2a"]
    assert "github.com/SandAI-org/MagiAttention" in reasons["magi_attention p2p"]


def test_a_library_is_given_this_ranks_rows_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only what its adapter says that it takes."""
    asked: dict[str, Any] = {}

    def why_not(cp: Any, sizes: Any, dtype: Any, device: Any, arguments: dict[str, Any]) -> str:
        asked.update(arguments)
        return "no windows" * (arguments["window_size"] != (-1, -1))

    def zigzag(q: Any, k: Any, v: Any, **how: Any) -> Any:
        return q, k, v, how

    functions = {"zigzag_ring_flash_attn_func": zigzag, "zigzag_ring_flash_attn_varlen_func": zigzag}
    monkeypatch.setattr(module, "WAYS", [("ring_flash_attn", "documented", "p2p")])
    monkeypatch.setitem(
        sys.modules,
        "conformance.adapters.ring_flash_attn",
        SimpleNamespace(documented=SimpleNamespace(why_not=why_not)),  # type: ignore[arg-type]
    )
    monkeypatch.setitem(sys.modules, "ring_flash_attn", SimpleNamespace(**functions))  # type: ignore[arg-type]
    x = torch.arange(24)[:, None, None]
    [one], reasons = others(problem(16, 8), by_name("cpu"), "the group", CPU)
    assert reasons == {}
    assert one.slices(x).flatten().tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 18, 19, 20, 21]
    given: Any = one.attend(x, x, x)
    how = given[3]
    assert how["cu_seqlens"].tolist() == [0, 8, 12]
    assert (how["max_seqlen"], how["causal"], how["group"]) == (8, True, "the group")
    assert asked["cu_seqlens_q"].tolist() == [0, 16, 24]
    assert asked["attn_mask_type"] == "padding_causal"
    [one], _ = others(problem(16), by_name("cpu"), "the group", CPU)
    assert one.slices(x[:16]).shape == (1, 8, 1, 1)
    given = one.attend(x, x, x)
    assert "cu_seqlens" not in given[3]
    assert others(problem(16, window_size=(3, 0)), by_name("cpu"), None, CPU) == (
        [],
        {"ring_flash_attn p2p": "no windows"},
    )


def test_magi_attention_is_given_the_mask_and_places_tokens_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def key_of(areas: Any, *others: Any) -> str:
        asked.append((str(areas), *others))
        return "the key"

    def calc_attn(q: Any, k: Any, v: Any, key: str, softmax_scale: float) -> Any:
        return (key, softmax_scale), "lse"

    api = SimpleNamespace(dispatch=lambda x, key: (x, key), calc_attn=calc_attn)
    adapter = SimpleNamespace(bf16=SimpleNamespace(why_not=lambda *_: ""), key_of=key_of)
    monkeypatch.setattr(module, "WAYS", [("magi_attention", "bf16", "p2p")])
    monkeypatch.setattr(module, "_urgent_group", lambda: "its group")
    for name in module.MAGI_SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is as before, afterwards
    monkeypatch.setitem(sys.modules, "conformance.adapters.magi_attention", adapter)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "magi_attention", ModuleType("magi_attention"))
    monkeypatch.setitem(sys.modules, "magi_attention.api", api)  # type: ignore[arg-type]
    [one], reasons = others(problem(16, 8), by_name("cpu"), "the group", CPU)
    assert reasons == {}
    assert asked == [("area q[0:16] k[0:16] band *:0\narea q[16:24] k[16:24] band *:0\n", 24, 4, 2, 8, "its group")]
    x: Any = "a global tensor"
    assert one.slices(x) == (x, "the key")
    assert one.attend(x, x, x) == ("the key", 8**-0.5)
    assert one.layout == "its own"
    assert {name: os.environ[name] for name in module.MAGI_SETTINGS} == module.MAGI_SETTINGS


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_what_stands_in_for_flash_attention(packed: bool, causal: bool) -> None:
    lengths = (5, 3) if packed else (8,)
    kernels: Any = flash_attn_interface(by_name("cpu"), {8: lengths}, CPU)
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(8, 4, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(8, 2, 16, generator=generator) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    parts = zip(*(x.split(lengths) for x in leaves), strict=True)
    want = torch.cat(
        [
            F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), is_causal=causal, enable_gqa=True)
            .transpose(0, 1)
            for part in parts
        ]
    )  # fmt: skip
    grads = [torch.empty_like(x) for x in (q, k, v)]
    if packed:
        cu = torch.tensor([0, 5, 8], dtype=torch.int32)
        where = (cu, cu, 5, 5, 0.0, 0.25, causal)
        out, lse, *_ = kernels._flash_attn_varlen_forward(q, k, v, *where)
        kernels._flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *where)
    else:
        where = (0.0, 0.25, causal, -1, -1, 0.0, None)
        out, lse, *_ = kernels._flash_attn_forward(q[None], k[None], v[None], *where, False)
        batched = [x[None] for x in (dout, q, k, v)]
        kernels._flash_attn_backward(*batched, out, lse, *(x[None] for x in grads), *where, False)
        assert out.shape == (1, 8, 4, 16)
        assert lse.shape == (1, 4, 8)
    torch.testing.assert_close(out.view_as(want), want.detach(), rtol=1e-5, atol=1e-5)
    for got, expected in zip(grads, torch.autograd.grad(want, leaves, dout), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
