"""A helper's results against its definition, on buffers that show every row that a helper must not touch.

A target that is changed in place lies inside a larger buffer, and its margins must stay. Rows outside the sequences
(the tail, the other half) keep their bits. Memory that must not be read holds NaN. Helpers that move data have to give
the same bits. Helpers that compute have to be right to float32 (float64 for float64), with one rounding when they
store. A call that has no right answer must raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from conformance.checks.budgets import same_bytes, worst
from conformance.checks.hygiene import ASSERTED, context_error
from conformance.checks.reference import describe_error, values_of_ranks
from conformance.implementation import Implementation, Missing, context
from conformance.problems.helper_calls import Arguments, Broken, Built, HelperCall
from conformance.problems.helper_definitions import _OF_BATCHES, _OF_HALVES, _OF_ROWS
from conformance.problems.problem import call, shape_findings
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import check_choice

__all__ = ["HELPERS", "Helper", "Malformed", "helper_calls", "malformed_calls"]

HELPERS = _OF_ROWS | _OF_HALVES | _OF_BATCHES
_SPOILS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of cumulative lengths
    "one too long": lambda x: torch.cat([x[:-1], x[-1:] + 1]),
    "decreasing": lambda x: torch.cat([x, x[-1:] - 1]),
    "beyond the buffer": lambda x: torch.cat([x[:-1], x[-1:] + 4096]),
    "not from 0": lambda x: torch.cat([x[:1] + 2, x[1:] + 2]),
    "float": lambda x: x.double(),
    "2-d": lambda x: x[None].repeat(2, 1),
    "empty": lambda x: x[:0],
}
_MARGIN = 3  # rows of a guarded margin
_MOVED_DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int8",
    "uint8",
    "bool",
)


@dataclass(frozen=True)
class Helper(HelperCall):
    """A well-formed call."""

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        if self.name not in HELPERS:
            raise ValueError(f"there is no helper {self.name!r}; there are: {', '.join(HELPERS)}")
        if len(self.real) != len(self.slots):
            raise ValueError(f"slots has {len(self.slots)} lengths and real has {len(self.real)}")

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings about a helper's result, by its definition."""
        if self.name == "get_batch_on_this_cp_rank":
            return _check_batch(impl, self, device)
        built = HELPERS[self.name].build(self, device)
        kept = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in built.arguments.items()}
        buffer = _guard(built) if built.target else None
        before = None if buffer is None else buffer.clone()
        result = call(impl, _function(impl, self.name), **built.arguments)
        found = [
            f"{name} was changed"
            for name, x in built.arguments.items()
            if name != built.target and isinstance(x, torch.Tensor) and not same_bytes(x, kept[name])
        ]
        if buffer is not None and before is not None:
            got = built.arguments[built.target]
            before[_MARGIN : len(before) - _MARGIN] = got
            if not same_bytes(buffer, before):
                found.append(f"memory around {built.target} was written to")
            return found + _judge(self, built, kept, {built.target: got})
        outputs = result if isinstance(result, tuple) else (result,)
        names = [self.name] if len(outputs) == 1 else [f"{self.name}[{n}]" for n in range(len(outputs))]
        return found + _judge(self, built, kept, dict(zip(names, outputs, strict=True)))


@dataclass(frozen=True)
class Malformed(Helper):
    """A call that was well-formed until `spoil`."""

    spoil: str = next(iter(_SPOILS))

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        super().__post_init__()
        check_choice("spoil", self.spoil, [*_SPOILS])

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """A call without a right answer must raise ValueError or TypeError, and must not change its target.

        Where the lengths lie on a GPU, and nobody waits for them, it may end in a device-side assertion instead.
        """
        built, function = HELPERS[self.name].build(self, device), _function(impl, self.name)
        name, arguments = built.lengths, built.arguments
        arguments[name] = _SPOILS[self.spoil](arguments[name])
        kept = arguments[built.target].clone() if built.target else None
        why = _broken_rule(self.name, arguments)
        if why is None:
            return []  # The call has a right answer after all.
        try:
            function(**arguments)
            end = context_error(device)
        except (ValueError, TypeError, NotImplementedError, impl.Unsupported):
            changed = kept is not None and not same_bytes(kept, arguments[built.target])
            return [f"{built.target} was changed by a call that was refused"] if changed else []
        except Exception as error:
            if device == "cpu" or ASSERTED not in str(error):
                said = describe_error(error)
                return [f"{self.name} raised {said}, but should have raised a ValueError or TypeError: {why}"]
            return []
        if end:
            return [] if ASSERTED in end else [f"{self.name} ended in {end}, but should have been refused: {why}"]
        return [f"{self.name} returned, but should have raised a ValueError or TypeError: {why}"]


@st.composite
def helper_calls(draw: DrawFn, name: str) -> Helper:
    """Well-formed calls of one helper."""
    count = draw(st.integers(0, 6))
    many = draw(st.sampled_from([False] * 15 + [True]))  # More than 12,287 sequences, all tiny.
    cp_size = draw(st.sampled_from([1] if many else [1, 2, 3, 4, 8]))
    length = st.integers(0, 1) if many else st.one_of(st.integers(0, 4), st.just(17))
    dtypes = _MOVED_DTYPES if HELPERS[name].moves else ("float32", "float64", "bfloat16", "float16")
    return Helper(
        name=name,
        slots=tuple(draw(st.lists(length, min_size=count, max_size=count))),
        real=tuple(draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))),
        repeat=2500 if many else 1,
        tail=draw(st.integers(0, 3)),
        cp_size=cp_size,
        rank=draw(st.integers(0, cp_size - 1)),
        index_dtype=draw(st.sampled_from(["int32", "int64"])),
        dtype=draw(st.sampled_from(dtypes)),
        wide=draw(st.booleans()),
        dims=draw(st.sampled_from([(), (3,), (2, 4)] + ([] if many else [(1, 64), (8, 16), (5, 7)]))),
        packed=draw(st.booleans()),
        choices=(draw(st.integers(0, 2)), draw(st.integers(0, 2))),
        spare=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 99)),
    )


def malformed_calls(name: str) -> SearchStrategy[Malformed]:
    """Calls of one helper that have no right answer."""

    def spoil(case: Helper, how: str) -> Malformed:
        fields = {key: value for key, value in vars(case).items() if key != "repeat"}
        return Malformed(**{**fields, "slots": (*case.slots, 2), "real": (*case.real, 4)}, spoil=how)

    return st.builds(spoil, helper_calls(name), st.sampled_from([*_SPOILS]))


def _function(impl: Implementation, name: str) -> Callable[..., Any]:
    """One of `thd`. Raises Missing."""
    found = getattr(impl.thd, name, None)
    if found is None:
        raise Missing(f"the implementation does not offer thd.{name}")
    return found


def _guard(built: Built) -> torch.Tensor:
    """Put the target into a larger buffer, contiguous as before; the margins hold what nobody would write."""
    x = built.arguments[built.target]
    buffer = torch.full((len(x) + 2 * _MARGIN, *x.shape[1:]), 77, dtype=x.dtype, device=x.device)
    inside = buffer[_MARGIN : len(buffer) - _MARGIN]
    inside.copy_(x)
    built.arguments[built.target] = inside
    return buffer


def _judge(case: Helper, built: Built, kept: dict[str, Any], got: dict[str, Any]) -> list[str]:
    record = HELPERS[case.name]
    arguments = {
        name: x.double() if not record.moves and isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in kept.items()
    }
    target = arguments.get(built.target)
    arguments = arguments | ({built.target: target.clone()} if target is not None else {})
    result = record.definition(**arguments)
    result = arguments[built.target] if built.target else result
    exact = dict(zip(got, result if isinstance(result, tuple) else (result,), strict=False))
    found = []
    if len(exact) != len(got):
        return [f"{case.name} returned {len(got)} results"]
    for name, x in got.items():
        model = kept[built.target] if built.target else exact[name]
        wrong = shape_findings(name, x, model.shape, (model.dtype,))
        if wrong:
            found += wrong
        elif record.moves:
            found += _same(name, x, exact[name])
        else:
            found += _same(f"{name} outside the sequences", x[~built.touched], kept[name][~built.touched])
            found += worst(name, x[built.touched], exact[name][built.touched], _bound(built, x, exact[name]))
    return found


def _bound(built: Built, got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """One rounding of the result to its own dtype, and float32 arithmetic (float64 with a float64 operand)."""
    floats = [x for x in built.arguments.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    wide = torch.float64 if all(x.dtype == torch.float64 for x in floats) else torch.float32
    largest = max((x[x.isfinite()].abs().max().item() for x in floats if x.isfinite().any()), default=1.0)
    rounding = torch.finfo(got.dtype).eps / 2 * exact[built.touched].abs().nan_to_num(0.0, 0.0, 0.0)
    return 1.01 * rounding + 16 * torch.finfo(wide).eps * (1.0 + largest) ** 2


def _same(name: str, got: torch.Tensor, exact: torch.Tensor) -> list[str]:
    """The same bits."""
    got = got.detach()
    if same_bytes(got, exact):
        return []
    a, b = (x.contiguous().view(torch.uint8) if x.dim() and x.numel() else x for x in (got, exact))
    wrong = (a != b).reshape(len(got), -1).any(1) if got.dim() else (a != b).reshape(1)
    rows = wrong.nonzero().flatten().tolist()
    return [
        f"{name} is wrong in {len(rows)} of {len(wrong)} rows, first in row {rows[0]}: "
        f"{_values(got[rows[0]])}, but should be {_values(exact[rows[0]])}"
    ]


def _values(x: torch.Tensor) -> str:
    values = (x.double() if x.is_floating_point() else x).flatten().tolist()
    return f"{values[:8]}{' ...' if len(values) > 8 else ''}"


def _check_batch(impl: Implementation, case: Helper, device: str) -> list[str]:
    """`get_batch_on_this_cp_rank` of every rank, with the implementation's own ContextParallel."""
    record, problem = HELPERS[case.name], Problem(case.cp_size, (), layout="dual_chunk")
    built, helper = record.build(case, device), _function(impl, case.name)

    def one_rank(member: Any) -> Any:
        mine = helper(cp=context(impl, problem, member), **built.arguments)
        return mine, record.definition(cp_size=case.cp_size, rank=member.rank, **built.arguments)

    ranks, found = values_of_ranks(case.cp_size, one_rank, impl.Unsupported, NotImplementedError)
    for rank, (got, exact) in enumerate(ranks):
        if list(got) != list(exact):
            found.append(f"rank {rank} has the entries {list(got)}, but should have {list(exact)}")
            continue
        for name, x in exact.items():
            if not isinstance(x, torch.Tensor):
                found += [] if got[name] == x else [f"rank {rank}: {name} is {got[name]!r}, but should be {x!r}"]
            else:
                wrong = shape_findings(f"rank {rank}: {name}", got[name], x.shape, (x.dtype,))
                found += wrong or _same(f"rank {rank}: {name}", got[name], x)
    return found


def _broken_rule(name: str, arguments: Arguments) -> str | None:
    """The rule that a call breaks, in words; None if the call has an answer.

    >>> arguments = {"x": torch.zeros(6), "cu_seqlens_padded": torch.tensor([0, 3]), "half": 0}
    >>> _broken_rule("thd_read_half_tensor", arguments)
    'every length of cu_seqlens_padded must be a multiple of 2: [3]'
    """
    rule = HELPERS[name].rule
    assert rule is not None, f"{name} takes no lengths"
    try:
        rule(arguments)
    except Broken as broken:
        return str(broken)
    return None
