"""Uses of a layer in training loops, each on one rank: the rows of the tier `torch` that play no whole group."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from conformance.tiers.calls.one_rank import Call, Tensors, close, same_bits
from conformance.tiers.gradcheck import result_names

__all__ = ["USES"]


def _autocast(call: Call) -> list[str]:
    plain = call.both(call.leaves())
    with torch.autocast(call.dout.device.type, dtype=torch.bfloat16):
        results = call.attend(leaves := call.leaves())
    dtype = results["out"].dtype
    if dtype == call.dout.dtype:
        got = {name: x.detach() for name, x in results.items()} | call.backward(results, leaves)
        return same_bits("inside autocast", plain, got)
    cast = {n: x.detach().to(dtype if n != "offset" else x.dtype).requires_grad_() for n, x in leaves.items()}
    want = call.attend(cast)
    found = same_bits(
        "inside autocast", {n: x.detach() for n, x in want.items()}, {n: x.detach() for n, x in results.items()}
    )
    dout = call.dout.to(dtype)
    expected = call.backward(want, cast, dout=dout)
    grads = call.backward(results, leaves, dout=dout)
    found += [f"{n} has dtype {x.dtype} inside autocast" for n, x in grads.items() if x.dtype != torch.float32]
    return found + same_bits("inside autocast", {n: x.float() for n, x in expected.items()}, grads)


def _checkpointed(call: Call) -> list[str]:
    want, leaves = call.both(call.leaves()), call.leaves()
    names = list(leaves)

    def attend(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(call.attend(dict(zip(names, inputs, strict=True))).values())

    results = checkpoint(attend, *leaves.values(), use_reentrant=False)
    assert results is not None
    named: dict[str, torch.Tensor] = dict(zip(result_names(call.case), results, strict=True))
    got = {name: x.detach() for name, x in named.items()} | call.backward(named, leaves)
    return same_bits("inside a checkpoint", want, got)


def _retained(call: Call) -> list[str]:
    results = call.attend(leaves := call.leaves())
    first = call.backward(results, leaves, retain_graph=True)
    return same_bits("of a second backward pass", first, call.backward(results, leaves))


def _no_grad(call: Call) -> list[str]:
    want = {name: x.detach() for name, x in call.attend(call.leaves()).items()}
    found: list[str] = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = call.attend(call.leaves())
        found += [f"{n} needs a gradient under {mode.__name__}" for n, x in got.items() if x.requires_grad]
        found += same_bits(f"under {mode.__name__}", want, got)
    return found


def _subsets(call: Call) -> list[str]:
    everything, found = call.both(call.leaves()), []
    letters = [name[0] for name in call.inputs]
    for size in (1, 2):
        for wanted in combinations(letters, size):
            got = call.both(call.leaves("".join(wanted)))
            found += same_bits(f"with gradients of {', '.join(wanted)} alone", {n: everything[n] for n in got}, got)
    return found


class _Layer(torch.nn.Module):
    """A product, attention with a plan, a product: what is compiled."""

    def __init__(self, call: Call, plan: Any) -> None:
        super().__init__()
        self.call, self.plan = call, plan

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: torch.Tensor | None) -> Any:
        more = self.call.score_arguments | ({} if offset is None else {"softmax_offset": offset})
        attention, wishes = self.call.impl.attention, self.call.case.wishes
        results = attention(q * 1.5, k, v, cp=self.call.cp, plan=self.plan, **more, **wishes)
        return (results[0] * 2.0, results[1]) if self.call.case.return_lse else (results * 2.0,)


def _compiled(call: Call) -> list[str]:
    layer = _Layer(call, call.plan())
    torch._dynamo.reset()
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    both: list[Tensors] = []
    for run in (layer, graph):
        leaves = call.leaves()
        results = run(leaves["q"], leaves["k"], leaves["v"], leaves.get("offset"))
        named: Tensors = dict(zip(result_names(call.case), results, strict=True))
        both.append({n: x.detach() for n, x in named.items()} | call.backward(named, leaves))
    return close("compiled", call.case, *both)


USES: dict[str, Callable[[Call], list[str]]] = {
    "autocast": _autocast,
    "checkpoint": _checkpointed,
    "retain-graph": _retained,
    "no-grad": _no_grad,
    "requires-grad": _subsets,
    "compile": _compiled,
}
