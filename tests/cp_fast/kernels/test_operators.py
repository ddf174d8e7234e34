"""The registered operators: schemas, fakes, gradients, and compiled graphs."""

from __future__ import annotations

import pytest
import torch

from conformance.adapters.cp_fast import operator_calls, tensors
from cp_fast import thd
from cp_fast.movers.select_movers import use, why_not
from tests.cp_fast.kernels.operators import HELPERS, KERNELS, flat, other_values

CALLS = list(operator_calls("cpu"))
NAMES = ["torch", "native"]


def needs(name: str) -> None:
    if (reason := why_not(name, "cpu")) is not None:
        pytest.skip(f"needs the kernels {name!r}: {reason}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.one_in(3)
def test_opcheck(name: str, call: str) -> None:
    needs(name)
    operator, arguments = operator_calls("cpu")[call]
    with use(name):
        torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("helper", list(HELPERS))
@pytest.mark.one_in(3)
def test_compiled_in_one_graph(helper: str) -> None:
    t = tensors("cpu")
    torch._dynamo.reset()
    compiled = torch.compile(HELPERS[helper], fullgraph=True, backend="aot_eager")
    for one, other in zip(flat(compiled(t)), flat(HELPERS[helper](t)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("helper", ["rank order", "sequence order", "half", "half of kv"])
def test_gradients(name: str, helper: str) -> None:
    """Each is linear, so its gradient is exact: (move(x) * w).sum() by hand, through the rows that it reads."""
    needs(name)
    t = tensors("cpu", requires_grad=True)
    with use(name):
        results = flat(HELPERS[helper](t))
        weights = [torch.randn_like(x) for x in results]
        sources = [t["kv"]] if helper == "half of kv" else [t["x"], t["y"]][: len(results)]
        got = torch.autograd.grad(results, sources, weights)
        for source, result, weight, grad in zip(sources, results, weights, got, strict=True):
            number = torch.arange(source.numel(), dtype=torch.float32).view(source.shape)
            moved = flat(HELPERS[helper](t | {"x": number, "y": number, "kv": number}))
            where = next(m for m in moved if m.shape == result.shape).long().flatten()
            want = torch.zeros(source.numel()).index_add_(0, where, weight.flatten())
            assert torch.equal(grad.flatten(), want)


def test_gradients_of_some_results_and_twice() -> None:
    t = tensors("cpu")
    x, y = t["x"].double().requires_grad_(), t["y"].double().requires_grad_()
    first, _ = thd.thd_read_half_tensor((x, y), t["cu"], 1)
    assert torch.autograd.grad(first.sum(), y)[0].eq(0).all()
    assert torch.autograd.gradgradcheck(
        lambda x, y: thd.thd_sequence_order_to_cp_rank_order((x * x, y * y), t["cu"], 2), (x, y)
    )


def test_changes_in_place_are_known_to_autograd() -> None:
    t = tensors("cpu")
    before = t["out"]._version
    thd.thd_grad_correction(t["out"], t["step"], t["local"], "add", "copy")
    assert t["out"]._version > before


@pytest.mark.parametrize("call", list(HELPERS | KERNELS))
def test_native_and_pytorch_agree(call: str) -> None:
    """On the operands that captured graphs are replayed with, before and after they change."""
    needs("native")
    t = tensors("cpu")
    for _ in range(2):
        results: list[list[torch.Tensor]] = []
        for name in NAMES:
            with use(name):
                results.append(flat((HELPERS | KERNELS)[call](t)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        other_values(t)
