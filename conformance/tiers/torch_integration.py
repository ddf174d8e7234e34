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
from typing import Any

import torch

from conformance.case import Case
from conformance.draw.adapted import adapted, judged_plainly
from conformance.draw.capabilities import Capabilities, capabilities_of
from conformance.implementation import Implementation
from conformance.judge.ranks import UnsupportedCase
from conformance.judge.run_record import Judged, Verdict
from conformance.run.case_tensors import build
from conformance.tiers.calls.one_rank import on_every_rank
from conformance.tiers.calls.uses import USES
from conformance.tiers.gradcheck import gradcheck
from cp_ref.schedules.problem import Problem, Sequence

__all__ = ["cases", "check", "ids"]

_FREE = ("qkv_format", "layout", "heads_kv", "softmax_type")
_SCHEDULES = {"p2p": 1, "all_gather": 1, "a2a": 2, "a2a+p2p": 1}


def ids(capabilities: Capabilities) -> list[str]:
    """The ids that `check` takes."""
    return [f"{name} {comm}" for name in (*USES, "gradcheck") for comm in _SCHEDULES] + ["opcheck"]


def cases(entry_id: str) -> tuple[Case, ...]:
    """The problems of one entry; opcheck has none."""
    name, _, comm = entry_id.partition(" ")
    if comm not in _SCHEDULES:
        return ()
    if name != "gradcheck":
        return tuple(_cases(comm))
    return tuple(_smallest(case) for case in (_case(comm, "float64"), _of_places(_case(comm, "float64"))))


def check(impl: Implementation, entry_id: str, device: str = "cpu") -> list[str]:
    """Findings about one entry, and what became of each of its problems.

    Raises:
        ValueError: there is no such entry.
        UnsupportedCase: the implementation does not have the schedule, or does not claim the feature.
    """
    name, _, comm = entry_id.partition(" ")
    if entry_id == "opcheck":
        return _check_ops(impl, device)
    if comm not in _SCHEDULES or (name not in USES and name != "gradcheck"):
        raise ValueError(f"there is no torch case {entry_id!r}")
    if name == "gradcheck":
        if not capabilities_of(impl, device).has("dtype", "float64"):
            raise UnsupportedCase("gradcheck needs float64")
        return _each(cases(entry_id), impl, lambda case: gradcheck(impl, case, device), device)
    if name == "compile" and _claim(impl, "supports_compile") is not True:
        raise UnsupportedCase("supports_compile is not claimed")
    body = USES[name]
    return _each(cases(entry_id), impl, lambda case: on_every_rank(impl, case, build(case, device), body), device)


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


def _case(comm: str, dtype: str, softmax_type: str = "learnable") -> Case:
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
        softmax_type=softmax_type,
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


def _cases(comm: str) -> Iterator[Case]:
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
