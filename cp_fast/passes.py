"""The table of compiler passes: every optimisation, in the order in which they run, with a switch for tests.

With all passes off a plan is slow and right: each tile is a separate launch, each message fills a separate buffer,
and no buffer is freed before the end of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "PASSES",
    "CompilerPass",
    "bit_of",
    "is_on",
    "names_of",
    "skipped",
    "switched_off",
]


@dataclass(frozen=True)
class CompilerPass:
    """One line of the table.

    Attributes:
        on: the input of the pass: a schedule, tiles before they are launches, the instructions of a plan, or the
            launches of a kernel library.
        does: what it does, in one sentence.
        needs_position_free_scores: whether a row then stands for several sequences, and a head for several numbers. If
            scores depend on them, the pass is skipped.
        keeps_places: whether buffers and messages keep their places. If not, a plan that is updated in place skips the
            pass.
    """

    name: str
    on: Literal["schedule", "tiles", "instructions", "launches"]
    does: str
    needs_position_free_scores: bool = False
    keeps_places: bool = True


PASSES = (
    CompilerPass("split_heads", "schedule", "exchanges a few heads at a time, so that launches hide messages"),
    CompilerPass(
        "own_keys_first",
        "schedule",
        "lets own keys attend while the others travel, in the passes of all_gather where that is faster",
    ),
    CompilerPass("delay_keys", "schedule", "lets own keys wait for the keys that arrive, so that both are one launch"),
    CompilerPass(
        "fold_batch",
        "schedule",
        "makes sbhd without padding one sequence of b * h heads, which needs no copy",
        needs_position_free_scores=True,
    ),
    CompilerPass(
        "merge_adjacent",
        "tiles",
        "makes touching tiles of an area the rectangle around them, if that has no other rows and pairs",
    ),
    CompilerPass(
        "merge_causal",
        "tiles",
        "makes the own tiles of a causal area (early x early, late x early, late x late) one causal square; "
        "makes it and tiles that see what it hides rectangles, where common keys cost nothing; makes many rows that "
        "see a key more each one causal segment",
    ),
    CompilerPass(
        "split_windows", "tiles", "splits a tile into at most three, so that tiles of all sequences share four windows"
    ),
    CompilerPass(
        "merge_dense",
        "tiles",
        "makes tiles without hidden pairs and with the same queries one segment with all keys",
    ),
    CompilerPass(
        "factor_keys",
        "tiles",
        "where areas share rows, or one has many segments that share keys: lets queries take the keys that "
        "they share together",
    ),
    CompilerPass(
        "dedupe_queries",
        "tiles",
        "the same case: makes all queries that see the same keys one segment",
    ),
    CompilerPass("batch_segments", "tiles", "makes segments with equal windows one varlen launch"),
    CompilerPass(
        "split_disjoint",
        "tiles",
        "puts segments that share rows into few launches without common queries; forward, where the kernel library "
        "can, with any common keys",
    ),
    CompilerPass(
        "sort_keys",
        "tiles",
        "lets a launch read keys in the order of their buffer, without a copy",
    ),
    CompilerPass(
        "write_in_place",
        "instructions",
        "writes outs of launches where they belong in the result, if nothing is added to them",
        keeps_places=False,
    ),
    CompilerPass(
        "accumulate_late",
        "instructions",
        "accumulates partial results beside the next messages, those of one sum together",
    ),
    CompilerPass(
        "recv_in_place", "instructions", "receives rows where a launch reads them, without a copy", keeps_places=False
    ),
    CompilerPass(
        "copy_early",
        "instructions",
        "copies own rows that a launch or a message reads while the first messages travel",
        keeps_places=False,
    ),
    CompilerPass("free_early", "instructions", "frees every buffer after its last use"),
    CompilerPass(
        "low_precision_grads",
        "instructions",
        "sends gradients from a single launch in the launch's dtype; the ranks agree on it once",
        keeps_places=False,
    ),
    CompilerPass(
        "record_launches", "launches", "records FlashAttention 4's launches once, and repeats them without its Python"
    ),
)

_NAMES = tuple(one.name for one in PASSES)
_off: frozenset[str] = frozenset()


@contextmanager
def switched_off(*names: str) -> Iterator[None]:
    """Switch these passes off inside, in any thread: plans are made, and kernels launched, without them.

    Raises:
        ValueError: a name that is not in `PASSES`.
    """
    global _off
    if unknown := set(names) - set(_NAMES):
        raise ValueError(f"names has {sorted(unknown)}, which are no compiler passes; the passes are {list(_NAMES)}")
    before, _off = _off, _off | set(names)
    try:
        yield
    finally:
        _off = before


def is_on(name: str) -> bool:
    """Say whether a pass is switched on."""
    return name not in _off


def skipped(*, position_free_scores: bool = True, in_place: bool = False) -> dict[str, str]:
    """Name the passes that do not run for a plan, and why.

    Args:
        position_free_scores: whether a score depends on its query and key alone, not on their positions.
        in_place: whether the plan is updated in place.

    >>> skipped(in_place=True)["recv_in_place"]
    'the plan is updated in place'
    """
    found: dict[str, str] = {}
    for one in PASSES:
        if one.name in _off:
            found[one.name] = "it is switched off"
        elif one.needs_position_free_scores and not position_free_scores:
            found[one.name] = "scores depend on positions"
        elif in_place and not one.keeps_places:
            found[one.name] = "the plan is updated in place"
    return found


def bit_of(name: str) -> int:
    """Return a pass as a bit: columns of tiles say by such bits which passes made each one."""
    return 1 << _NAMES.index(name)


def names_of(bits: int) -> tuple[str, ...]:
    """Return the passes of these bits.

    >>> names_of(bit_of("merge_causal") | bit_of("batch_segments"))
    ('merge_causal', 'batch_segments')
    """
    return tuple(name for n, name in enumerate(_NAMES) if bits >> n & 1)
