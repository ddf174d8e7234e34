"""Calls of a helper as problems: their text, and how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from conformance.levels.helpers import batches, halves, rows
from conformance.levels.problem_text import LevelCase

__all__ = ["HELPERS", "Helper", "Malformed", "malformed", "strategy"]

HELPERS = rows.HELPERS | halves.HELPERS | batches.HELPERS
_SPOILS = ("one too long", "decreasing", "beyond the buffer", "not from 0", "float", "2-d", "empty")
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
class Helper(LevelCase):
    """One call of a helper. Which fields it depends on, its record's `build` says.

    `slots` are the padded lengths in units that the helper can divide, `real` the share of them, in eighths, that are
    valid tokens; both are repeated `repeat` times.
    """

    name: str = ""
    slots: tuple[int, ...] = ()
    real: tuple[int, ...] = ()
    repeat: int = 1
    tail: int = 0  # In units too.
    cp_size: int = 1
    rank: int = 0
    index_dtype: str = "int32"
    dtype: str = "float32"
    wide: bool = False  # Accumulate into float32 from another dtype.
    dims: tuple[int, ...] = ()  # Of a row.
    packed: bool = True  # LSEs are [h, t], and not [b, h, s]; tokens of a batch are [t], and not [1, t].
    choices: tuple[int, ...] = (0, 0)  # The half, the actions or the format: see the helper.
    spare: int = 0  # Room beyond what is needed.
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        if self.name not in HELPERS:
            raise ValueError(f"there is no helper {self.name!r}; there are: {', '.join(HELPERS)}")
        if len(self.real) != len(self.slots):
            raise ValueError(f"slots has {len(self.slots)} lengths and real has {len(self.real)}")


@dataclass(frozen=True)
class Malformed(Helper):
    """A call that was well-formed until `spoil`."""

    spoil: str = _SPOILS[0]


@st.composite
def strategy(draw: DrawFn, name: str) -> Helper:
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


def malformed(name: str) -> SearchStrategy[Malformed]:
    """Calls of one helper that have no right answer."""

    def spoil(case: Helper, how: str) -> Malformed:
        fields = {key: value for key, value in vars(case).items() if key != "repeat"}
        return Malformed(**{**fields, "slots": (*case.slots, 2), "real": (*case.real, 4)}, spoil=how)

    return st.builds(spoil, strategy(name), st.sampled_from(_SPOILS))
