"""The implementation under test: what it may offer, and how it is found by name.

An implementation is a module or an object. An implementation offers any of six levels; members that it lacks are
reported as missing.

helpers    `thd`: a namespace with any of the functions of `cp_ref.thd`, with the same names, arguments and results.

merge      `merge(parts) -> (out, lse)`: the result over all keys of partial results over disjoint sets of keys.
           parts: list of (out, lse), one or more, in any order; out [t, h, d], lse [h, t], natural logarithm, -inf
           and out 0 where the part saw nothing. Operands are float64, or float32, or out in bfloat16 or float16 with
           lse in float32. Returns out [t, h, d] in the parts' dtype or wider, and lse [h, t] in theirs. Inputs stay
           as they are.

kernel     `tile(q, k, v, *, left, right, scale, softcap) -> (out, lse)`: one diagonal band tile.
           q [n, h_q, d_qk], k [m, h_kv, d_qk], v [m, h_kv, d_v]. Query i sees key j iff
           i + (m - n) - left <= j <= i + (m - n) + right: aligned to the last query and the last key. `left` and
           `right` are any integers (-1 is minus one, and moves the diagonal band off the diagonal), or None for
           unbounded. Scores are scale * q.k, then softcap * tanh(score / softcap) if softcap > 0. out [n, h_q, d_v] in
           q's dtype, lse [h_q, n] in float32 (float64 for float64), natural logarithm; a row that sees nothing has out
           0 and lse -inf.
           `tile_backward(q, k, v, out, lse, dout, *, left, right, scale, softcap) -> (dq, dk, dv)`, or `tile` is
           differentiable by autograd in q, k and v, or neither.

schedule   `attention`, with the signature and meaning of `cp_ref.attention`, on every rank; without a parameter called
           `areas` it is played without areas, and without `alibi_slopes`, `score_mod` or `dropout_p` without what these
           ask for. Beside it, any of
           ContextParallel  without it `cp` is a `Context`, below
           supports         without it a problem is unsupported when `attention` raises Unsupported on every rank
           Unsupported      without it NotImplementedError
           shard            without it the suite cuts the tensors itself
           make_plan, unshard, position_ids        without them what needs them is missing
           group_kind       "member" (the default): the group is one member of a simulated group, with `rank`, `size`,
                            `exchange`, `all_gather_object` and `split` (see `cp_ref.SimGroup`); all ranks are
                            threads of one process. "process": it is a torch.distributed ProcessGroup, a pair
                            (a2a_group, p2p_group) of these for "a2a+p2p", and every rank is a process (gloo on the
                            CPU, NCCL on GPUs).
           softmax_offset_grad   "share" (the default): a rank's gradient of softmax_offset is of its own queries, and
                            the ranks' shares add up to the total. "total": it is the total, the same on every rank.
           same_bits        `same_bits(case) -> names`, of a `conformance.case.Case`: those of out, lse, dq, dk and dv
                            whose bits are claimed to be those of the same problem on one rank, for every cp_size and
                            layout, and whoever else is in the batch. The tier metamorphic holds the implementation to
                            it. Or a list of pairs (match, names), each for the cases that `match` covers, as an entry
                            of known failures does (`conformance.matching`).
           batch_invariant  True, or a function of two problems: see `conformance.checks.metamorphic`.

linear     `linear_attention` and `causal_conv1d`, with the signatures and meaning of those of `cp_ref`, on every
           rank; with `ContextParallel` and `make_plan(..., linear=True)` as for the level schedule.

sparse     `sparse_attention`, `select_keys` and `index_loss`, with the signatures and meaning of those of `cp_ref`, on
           every rank; with `ContextParallel` and `make_plan` as for the level schedule. With `compress_keys` and
           `compressed_attention` it has compressed keys too.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import torch

from conformance.case import Case, score_features
from conformance.matching import field_values, matches
from conformance.record import Level, readable
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import check_choice
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS, canonical_layout

__all__ = [
    "ENTRY_POINTS",
    "LEVEL_MEMBER",
    "RESULTS_WITH_BITS",
    "Context",
    "Implementation",
    "LoadError",
    "Missing",
    "as_implementation",
    "context",
    "load",
]

ENTRY_POINTS = "cp_attention.implementations"

# This project's packages offer the levels merge and kernel through their adapters.
_IN_FULL = {"cp_ref": "conformance.adapters.cp_ref", "cp_fast": "conformance.adapters.cp_fast:auto"}

LEVEL_MEMBER: dict[Level, str] = {
    "helpers": "thd",
    "merge": "merge",
    "kernel": "tile",
    "schedule": "attention",
    "linear": "linear_attention",
    "sparse": "sparse_attention",
}
RESULTS_WITH_BITS = ("out", "lse", "dq", "dk", "dv")
_SCHEDULE_MEMBERS = ("ContextParallel", "supports", "Unsupported", "shard", "make_plan", "unshard", "position_ids")

# The callers of attention, merge and tile check their results.
_RETURNS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("shard", "unshard", "position_ids"), (torch.Tensor, "a tensor")),
    "make_plan": (object, "a plan"),
}


class LoadError(ValueError):
    """There is no such implementation, or it offers nothing, or importing it fails."""


class Missing(Exception):
    """The implementation does not offer a member that was called."""


@dataclass
class Context:
    """The participating ranks, for implementations that have no `ContextParallel`.

    `group` is one member of a simulated group or a ProcessGroup; for "a2a+p2p" a pair (a2a_group, p2p_group).
    """

    group: Any
    cp_comm_type: str = "p2p"
    layout: str = "dual_chunk"
    backend: str = "auto"

    def __post_init__(self) -> None:
        """Raises ValueError or TypeError for what no call can mean."""
        check_choice("cp_comm_type", self.cp_comm_type, CP_COMM_TYPES)
        self.layout = canonical_layout(self.layout)
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("backend", self.backend, ("auto",))
        if isinstance(self.group, str):
            raise TypeError(f"group is {self.group!r}; it must be a group of ranks")
        pair = self.group if isinstance(self.group, tuple) else (self.group,)
        ranks, sizes = ([_number(part, name) for part in pair] for name in ("rank", "size"))
        self.size = sizes[0] * sizes[-1] if len(pair) == 2 else sizes[0]
        self.rank = ranks[1] * sizes[0] + ranks[0] if len(pair) == 2 else ranks[0]  # p2p_rank * a2a_size + a2a_rank
        self.a2a_size = {"a2a": self.size, "a2a+p2p": sizes[0]}.get(self.cp_comm_type, 1)


def _number(group: Any, name: str) -> int:
    """`group.rank` or `group.size`, which are methods of a ProcessGroup."""
    value: Any = getattr(group, name)
    return cast("int", value() if callable(value) else value)


class Implementation:
    """The implementation under test. Members that it lacks are filled in if that makes sense.

    Any attribute is that of the module or object; a member that it does not offer raises `Missing` when it is called.
    """

    def __init__(self, offered: Any, name: str = "") -> None:
        self.offered = offered
        self.name = name or getattr(offered, "__name__", type(offered).__name__)
        self.probed: dict[str, Any] = {}  # By device: the capabilities found by `conformance.problems.capabilities`.

    def offers(self, member: str) -> bool:
        """Whether the module or object has it. (A package may have a submodule called `merge`; that is no merge.)"""
        value = getattr(self.offered, member, None)
        return value is not None if member in ("thd", "group_kind") else callable(value)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels that it offers."""
        return tuple(level for level, member in LEVEL_MEMBER.items() if self.offers(member))

    @property
    def missing(self) -> tuple[str, ...]:
        """The members of levels and of the schedule level that it does not offer."""
        members = (*LEVEL_MEMBER.values(), *_SCHEDULE_MEMBERS)
        return tuple(member for member in members if not self.offers(member))

    def why_not(self, problem: Problem, alibi: str = "") -> str:
        """Which parameter its `attention` lacks that the problem needs; "" if it has all."""
        needed = (*(["areas"] if problem.areas is not None else []), *score_features(problem, alibi))
        if not needed:
            return ""
        there = inspect.signature(self.attention).parameters
        return next((f"its attention has no parameter called {name}" for name in needed if name not in there), "")

    @property
    def group_kind(self) -> str:
        """The group that its `attention` takes: "member" or "process"."""
        return getattr(self.offered, "group_kind", "member")

    @property
    def softmax_offset_grad(self) -> str:
        """Its gradient of softmax_offset: "share" or "total"."""
        return getattr(self.offered, "softmax_offset_grad", "share")

    def same_bits(self, case: Case) -> frozenset[str]:
        """The results of a case that it claims to have the bits of one rank.

        Raises:
            ValueError: it names no result.
        """
        claims: Any = getattr(self.offered, "same_bits", ())
        if inspect.isroutine(claims):
            named = frozenset[str](claims(case))
        else:
            values = field_values(str(case)) if claims else {}
            named = frozenset(name for match, names in claims if matches(values, match) for name in names)
        if unknown := named.difference(RESULTS_WITH_BITS):
            rule = f"some of {', '.join(RESULTS_WITH_BITS)}"
            raise ValueError(f"same_bits of {self.name!r} names {', '.join(sorted(unknown))}; it must name {rule}")
        return named

    @property
    def Unsupported(self) -> type[Exception]:
        """The exception that the implementation raises for an unsupported call."""
        return getattr(self.offered, "Unsupported", NotImplementedError)

    def ContextParallel(self, group: Any, *arguments: Any, **options: Any) -> Any:
        """Its own, or `Context`; a place among processes becomes its ProcessGroup."""
        pair = tuple(_process_group(part) for part in group) if isinstance(group, tuple) else _process_group(group)
        return getattr(self.offered, "ContextParallel", Context)(pair, *arguments, **options)

    def supports(self, **arguments: Any) -> tuple[bool, str]:
        """Its own, or (True, "")."""
        answer = self.offered.supports(**arguments) if self.offers("supports") else (True, "")
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], str):
            raise AssertionError(f"supports returned {answer!r}, but should return a pair (bool, reason)")
        return bool(answer[0]), readable(answer[1])

    def __getattr__(self, name: str) -> Any:
        """The member of the module or object, or a function that raises `Missing`."""
        if name.startswith("__"):
            raise AttributeError(name)
        if not self.offers(name):
            return self._absent(name)
        member = getattr(self.offered, name)
        return self._returning(name, member) if name in _RETURNS else member

    def _returning(self, name: str, member: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any, **options: Any) -> Any:
            result = member(*arguments, **options)
            kind, words = _RETURNS[name]
            if not isinstance(result, kind) or result is None:
                raise AssertionError(f"{name} returned {type(result).__name__}, but should return {words}")
            return result

        return checked

    def _absent(self, name: str) -> Callable[..., Any]:
        def absent(*_: Any, **__: Any) -> Any:
            raise Missing(f"the implementation does not offer {name}")

        return absent


def _process_group(group: Any) -> Any:
    return getattr(group, "process_group", group)


def as_implementation(offered: Any) -> Implementation:
    """Convert a module or object to an `Implementation`; an `Implementation` is returned unchanged."""
    return offered if isinstance(offered, Implementation) else Implementation(offered)


def load(name: str) -> Implementation:
    """Load the implementation called `name`.

    Args:
        name: an entry point of the group "cp_attention.implementations", or pkg.module, or pkg.module:object. A class
            is instantiated, without arguments. The bare names "cp_ref" and "cp_fast" mean these packages' adapters,
            which offer all levels; with an object behind them ("cp_fast:attention") they mean what they say.

    Raises:
        LoadError: it cannot be imported (whatever importing it raises), or it offers none of the levels.
    """
    found = entry_points(group=ENTRY_POINTS, name=name)
    target = next(iter(found)).value if found else name
    module, _, attribute = _IN_FULL.get(target, target).partition(":")
    try:
        offered: Any = importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            offered = getattr(offered, part)
        if isinstance(offered, type):
            offered = offered()
    except (Exception, SystemExit) as error:
        said = readable(f"{type(error).__name__}: {error}")
        root = module.partition(".")[0]
        if getattr(error, "name", None) == root and (Path(root).is_dir() or Path(f"{root}.py").is_file()):
            said += f"; {root} is in this folder, which `pytest` leaves out: run `python -m pytest`, or set PYTHONPATH"
        raise LoadError(f"cannot load the implementation {name!r}: {said}") from error
    impl = Implementation(offered, name)
    if not impl.levels:
        members = ", ".join(f"{member} ({level})" for level, member in LEVEL_MEMBER.items())
        raise LoadError(f"the implementation {name!r} offers nothing to test; it needs one of {members}")
    if impl.group_kind not in ("member", "process"):
        raise LoadError(f"the implementation {name!r} has group_kind {impl.group_kind!r}; it must be member or process")
    check_choice(f"softmax_offset_grad of the implementation {name!r}", impl.softmax_offset_grad, ("share", "total"))
    return impl


def context(impl: Any, problem: Problem, member: Any) -> Any:
    """One rank's ContextParallel for the problem; `member` is its place in the group."""
    split = getattr(member, "split", None) if problem.cp_comm_type == "a2a+p2p" else None
    group = member if split is None else split(problem.a2a_size)
    named = {"layout": problem.layout} if isinstance(problem.layout, str) else {}  # A table belongs to a plan.
    return as_implementation(impl).ContextParallel(group, problem.cp_comm_type, **named)
