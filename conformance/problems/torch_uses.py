"""Tier `torch`: attention as a citizen of PyTorch. A table of what training loops do with a layer, under every
schedule.

    gradcheck       float64, numerically, through the ranks of the whole group, out and lse and every input
    autocast        inside torch.autocast nothing changes, or the inputs are cast first, as for PyTorch's own attention
    checkpoint      torch.utils.checkpoint around the call gives the same bits
    retain-graph    two backward passes of one forward pass give the same bits
    no-grad         under no_grad and inference_mode the same results, without a graph
    requires-grad   every subset of inputs that need a gradient gives the gradients that all together give
    compile         a layer with a plan is one graph of torch.compile(fullgraph=True), and computes the same
    opcheck         torch.library.opcheck of registered operators, fake tensors included

The last two are for those who claim them: `supports_compile = True`, and `ops`, a list of (operator, arguments), or a
function from a device to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from conformance.case import Case
from conformance.checks.budgets import Tensors, close, same_bits
from conformance.checks.play import RankCall, on_every_rank, play
from conformance.checks.reference import UnsupportedCase
from conformance.implementation import Implementation
from conformance.problems.capabilities import adapted, capabilities_of, judged_plainly
from conformance.problems.problem import NamedProblem
from conformance.record import Judged, Verdict
from conformance.tensors import GlobalTensors, build
from cp_ref.schedules.problem import Problem, Sequence

__all__ = ["USES", "TorchUse", "gradcheck", "result_names"]

# ---- gradients, numerically
#
# Gradients checked numerically, through all ranks: a part of the tier `torch`.


def result_names(case: Case) -> list[str]:
    """Of the results of the forward pass."""
    return ["out", "lse"] if case.return_lse else ["out"]


class _Whole(torch.autograd.Function):
    """All ranks' attention as one function of the global tensors: each pass plays the whole group."""

    @staticmethod
    def forward(
        ctx: Any, impl: Implementation, case: Case, tensors: GlobalTensors, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.impl, ctx.case, ctx.tensors, ctx.inputs = impl, case, tensors, inputs
        results = _played(impl, replace(case, grads=""), _with_inputs(tensors, inputs))
        return tuple(results[name] for name in result_names(case))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        upstream = {f"d{name}": grad.contiguous() for name, grad in zip(result_names(ctx.case), grads, strict=True)}
        tensors = replace(_with_inputs(ctx.tensors, ctx.inputs), **upstream)
        results = _played(ctx.impl, ctx.case, tensors)
        names = ["dq", "dk", "dv", "d_offset"][: len(ctx.inputs)]
        return None, None, None, *(results[name] for name in names)


def _with_inputs(tensors: GlobalTensors, inputs: tuple[torch.Tensor, ...]) -> GlobalTensors:
    q, k, v, *offset = (x.detach() for x in inputs)
    return replace(tensors, q=q, k=k, v=v, softmax_offset=offset[0] if offset else None)


def _played(impl: Implementation, case: Case, tensors: GlobalTensors) -> Tensors:
    played = play(impl, case, tensors)
    if played.findings:
        raise AssertionError("; ".join(played.findings))
    return played.results


def gradcheck(impl: Implementation, case: Case, device: str) -> list[str]:
    """Findings of `torch.autograd.gradcheck`, through the ranks of the whole group."""
    tensors = build(case, device)
    inputs = [
        x.clone().requires_grad_() for x in (tensors.q, tensors.k, tensors.v, tensors.softmax_offset) if x is not None
    ]
    try:
        torch.autograd.gradcheck(
            lambda *x: _Whole.apply(impl, case, tensors, *x), inputs, fast_mode=True, nondet_tol=1e-12
        )
    except (AssertionError, RuntimeError) as wrong:
        return [f"gradcheck: {' '.join(str(wrong).split())[:400]}"]
    return []


# ---- uses of a layer
#
# Uses of a layer in training loops, each on one rank: the rows of the tier `torch` that play no whole group.


def _autocast(call: RankCall) -> list[str]:
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


def _checkpointed(call: RankCall) -> list[str]:
    want, leaves = call.both(call.leaves()), call.leaves()
    names = list(leaves)

    def attend(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(call.attend(dict(zip(names, inputs, strict=True))).values())

    results = checkpoint(attend, *leaves.values(), use_reentrant=False)
    assert results is not None
    named: dict[str, torch.Tensor] = dict(zip(result_names(call.case), results, strict=True))
    got = {name: x.detach() for name, x in named.items()} | call.backward(named, leaves)
    return same_bits("inside a checkpoint", want, got)


def _retained(call: RankCall) -> list[str]:
    results = call.attend(leaves := call.leaves())
    first = call.backward(results, leaves, retain_graph=True)
    return same_bits("of a second backward pass", first, call.backward(results, leaves))


def _no_grad(call: RankCall) -> list[str]:
    want = {name: x.detach() for name, x in call.attend(call.leaves()).items()}
    found: list[str] = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = call.attend(call.leaves())
        found += [f"{n} needs a gradient under {mode.__name__}" for n, x in got.items() if x.requires_grad]
        found += same_bits(f"under {mode.__name__}", want, got)
    return found


def _subsets(call: RankCall) -> list[str]:
    everything, found = call.both(call.leaves()), []
    letters = [name[0] for name in call.inputs]
    for size in (1, 2):
        for wanted in combinations(letters, size):
            got = call.both(call.leaves("".join(wanted)))
            found += same_bits(f"with gradients of {', '.join(wanted)} alone", {n: everything[n] for n in got}, got)
    return found


class _Layer(torch.nn.Module):
    """A product, attention with a plan, a product: what is compiled."""

    def __init__(self, call: RankCall, plan: Any) -> None:
        super().__init__()
        self.call, self.plan = call, plan

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: torch.Tensor | None) -> Any:
        more = self.call.score_arguments | ({} if offset is None else {"softmax_offset": offset})
        attention, wishes = self.call.impl.attention, self.call.case.wishes
        results = attention(q * 1.5, k, v, cp=self.call.cp, plan=self.plan, **more, **wishes)
        return (results[0] * 2.0, results[1]) if self.call.case.return_lse else (results * 2.0,)


def _compiled(call: RankCall) -> list[str]:
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


USES: dict[str, Callable[[RankCall], list[str]]] = {
    "autocast": _autocast,
    "checkpoint": _checkpointed,
    "retain-graph": _retained,
    "no-grad": _no_grad,
    "requires-grad": _subsets,
    "compile": _compiled,
}


# ---- the table


_FREE = ("qkv_format", "layout", "heads_kv", "softmax_type")
_SCHEDULES = {"p2p": 1, "all_gather": 1, "a2a": 2, "a2a+p2p": 1}


class TorchUse(NamedProblem):
    """A use of attention under a schedule, "USE SCHEDULE", or "opcheck"."""

    word = "torch"

    @classmethod
    def names(cls) -> list[str]:
        """All names of the table."""
        return [f"{name} {comm}" for name in (*USES, "gradcheck") for comm in _SCHEDULES] + ["opcheck"]

    @property
    def cases(self) -> tuple[Case, ...]:
        """The problems of one entry; opcheck has none."""
        name, _, comm = self.name.partition(" ")
        if name == "opcheck":
            return ()
        if name != "gradcheck":
            return tuple(_of_schedule(comm))
        return tuple(_smallest(case) for case in (_case(comm, "float64"), _of_places(_case(comm, "float64"))))

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings about one entry, and what became of each of its problems.

        Raises:
            UnsupportedCase: the implementation does not have the schedule, or does not claim the feature.
        """
        name = self.name.partition(" ")[0]
        if name == "opcheck":
            return _check_ops(impl, device)
        if name == "gradcheck":
            if not capabilities_of(impl, device).has("dtype", "float64"):
                raise UnsupportedCase("gradcheck needs float64")
            return _each(self.cases, impl, lambda case: gradcheck(impl, case, device), device)
        if name == "compile" and _claim(impl, "supports_compile") is not True:
            raise UnsupportedCase("supports_compile is not claimed")
        body = USES[name]
        return _each(self.cases, impl, lambda case: on_every_rank(impl, case, build(case, device), body), device)


def _each(problems: Iterable[Case], impl: Implementation, judge: Callable[[Case], list[str]], device: str) -> Judged:
    """The findings of all, each in words that the implementation has: another dtype if it must be, and no lse. Leave
    out refused cases, unless all are refused.

    Raises:
        UnsupportedCase: all of it is; with the last reason.
    """
    found: list[str] = []
    became: dict[str, Verdict] = {}
    refused: UnsupportedCase | None = None
    capabilities = capabilities_of(impl, device)
    for problem in problems:
        nearest = adapted(problem, capabilities, _FREE)
        try:
            case, findings = judged_plainly(nearest, capabilities, lambda plain: judge(_comparable(plain)))
        except UnsupportedCase as refusal:
            became[str(_comparable(nearest))], refused = "unsupported", refusal
            continue
        became[str(_comparable(case))] = "wrong" if findings else "right"
        found += findings
    if refused is not None and set(became.values()) == {"unsupported"}:
        raise refused
    return Judged(found, cases=became)


def _comparable(case: Case) -> Case:
    """The same, deterministic: bits are compared."""
    return replace(case, deterministic=True)


def _claim(impl: Implementation, name: str) -> Any:
    """An attribute of the module or object itself; None where it has none."""
    return getattr(getattr(impl, "offered", impl), name, None)


def _case(comm: str, dtype: str) -> Case:
    sequences = (Sequence(8, 8, 8, 8), Sequence(4, 4, 4, 4))
    problem = Problem(
        2,
        sequences,
        comm,
        _SCHEDULES[comm],
        qkv_format="thd",
        attn_mask_type="padding_causal",
        heads_q=4,
        heads_kv=2,
        d_qk=8,
        d_v=8,
        softmax_type="learnable",
        dtype=dtype,
    )
    return Case(problem, seed=5, return_lse=True, loss="out+lse", deterministic=True)


def _of_places(case: Case) -> Case:
    """With ALiBi, a score_mod and dropout."""
    return replace(case, problem=replace(case.problem, score_mod="capped", dropout_p=0.4), alibi="document")


def _smallest(case: Case) -> Case:
    """The calls that gradcheck can take apart, one input after the other, when it fails."""
    sizes = {"sequences": (Sequence(4, 4, 4, 4),), "heads_q": 2, "heads_kv": 1, "d_qk": 2, "d_v": 2}
    return replace(case, problem=replace(case.problem, **sizes))


def _of_schedule(comm: str) -> Iterator[Case]:
    """Packed with a sink, the same with scores of places, and a plain batch in bshd."""
    case = _case(comm, "float32")
    yield case
    yield _of_places(case)
    batch = (Sequence(8, 8, 8, 8),) * 2
    yield replace(
        case,
        problem=replace(
            case.problem, sequences=batch, qkv_format="bshd", attn_mask_type="causal", softmax_type="vanilla"
        ),
    )


def _check_ops(impl: Implementation, device: str) -> list[str]:
    """`torch.library.opcheck` of every operator that the implementation names."""
    ops = _claim(impl, "ops")
    ops = ops(device) if callable(ops) else ops
    if not isinstance(ops, list | tuple) or not ops:
        raise UnsupportedCase("no registered operators are named: an attribute `ops`, a list of (operator, arguments)")
    found = []
    for op, arguments in ops:
        try:
            torch.library.opcheck(op, arguments)
        except Exception as wrong:  # opcheck raises many kinds
            found.append(f"opcheck of {op}: {' '.join(str(wrong).split())[:400]}")
    return found
