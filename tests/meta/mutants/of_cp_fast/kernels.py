"""Bugs of the movers by PyTorch's operators, and of the backend for the CPU: masks, scores, groups of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cp_ref.schedules.problem import ScoreOptions
from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]

Tensor = torch.Tensor


def _rows_as_a_range(gather: Any, self: Any, xs: Any, rows: Any) -> Any:
    if isinstance(rows, Tensor) and len(rows):
        rows = rows.clone()
        rows[-1] = rows[0]
    return gather(self, xs, rows)


def _put_in_reverse(scatter: Any, self: Any, outs: Any, xs: Any, rows: Any, add: bool = False) -> None:
    scatter(self, outs, xs if add else [x.flip(0) for x in xs], rows, add)


def _heads_of_rank_0(front: Any, self: Any, xs: Any, rows: Any, first_heads: Any, heads: Any) -> Any:
    parts = len(first_heads) // len(xs)
    return front(self, xs, rows, [first_heads[n // parts * parts] for n in range(len(first_heads))], heads)


Side = int | None


def _sides(change: Callable[[Side, Side, int], tuple[Side, Side]]) -> Callable[[Any], Any]:
    """Another window in every block of scores; `change` gets the sides and the shift of the diagonal."""

    def wrong(
        visible: Any, first: int, last: int, lq: int, lk: int, left: Side, right: Side, width: int, masks: Any
    ) -> Any:
        left, right = change(left, right, lk - lq)
        return visible(first, last, lq, lk, left, right, width, masks)

    return wrap(wrong)


def _moved(side: Side, by: int) -> Side:
    return None if side is None else side + by


def _unmasked(visible: Any, *arguments: Any) -> Any:
    return [c._replace(hidden=None) for c in visible(*arguments)]


def _one_key_lost(visible: Any, *arguments: Any) -> Any:
    """The first column of the last row of a block with some columns is hidden."""
    blocks = visible(*arguments)
    if blocks and blocks[0].stop - blocks[0].start > 4:
        first, rows = blocks[0], arguments[1] - arguments[0]
        hidden = torch.zeros(rows, first.stop - first.start, dtype=torch.bool) if first.hidden is None else first.hidden
        hidden = hidden.clone()
        hidden[-1, int((~hidden[-1]).int().argmax())] = True
        blocks[0] = first._replace(hidden=hidden)
    return blocks


def _softcap_not_divided(scores: Any, queries: Tensor, key: Tensor, options: ScoreOptions, scratch: Any) -> Tensor:
    return scores(queries * options.softcap if options.softcap > 0 else queries, key, options, scratch)


def _softcap_dropped(scores: Any, queries: Tensor, key: Tensor, options: ScoreOptions, scratch: Any) -> Tensor:
    return scores(queries, key, options._replace(softcap=0.0), scratch)


def _groups_interleaved(fold: Any, x: Tensor, heads_kv: int, dtype: torch.dtype) -> Tensor:
    """Query head h is put beside kv head h % h_kv."""
    return fold(x.unflatten(1, (-1, heads_kv)).transpose(1, 2).flatten(1, 2), heads_kv, dtype)


def _lse_rounded(forward: Any, *arguments: Any) -> Any:
    part = forward(*arguments)
    return part._replace(lse=part.lse.bfloat16().to(part.lse.dtype))


def _max_logit_of_another_head(forward: Any, *arguments: Any) -> Any:
    part = forward(*arguments)
    return part._replace(max_logit=part.max_logit.roll(1))


def _dlse_ignored(backward: Any, self: Any, operands: Any, *rest: Any) -> Any:
    return backward(self, operands._replace(dlse=None), *rest)


def _delta_lost(backward: Any, self: Any, operands: Any, *rest: Any) -> Any:
    return backward(self, operands._replace(out=torch.zeros_like(operands.out)), *rest)


def _dk_unscaled(backward: Any, self: Any, operands: Any, segments: Any, options: Any) -> Any:
    part = backward(self, operands, segments, options)
    return part._replace(dk=part.dk / options.scores.scale)


def _dk_heads_rotated(backward: Any, *arguments: Any) -> Any:
    part = backward(*arguments)
    return part._replace(dk=part.dk.roll(1, 1), dv=part.dv.roll(1, 1))


_KERNELS, _BACKEND = (
    "cp_fast.movers.torch_movers.torch_kernels.TorchKernels",
    "cp_fast.backends.blockwise.BlockwiseBackend",
)
_COLUMNS, _SCORES = (
    "cp_fast.backends.blockwise.visible_columns",
    "cp_fast.backends.blockwise._scores",
)
_FOLD = "cp_fast.backends.blockwise.fold"


def _tile(text: str, target: str, change: Any, tier: str = "kernel") -> Mutant:
    return Mutant(text, target, change, tier, "kernel", "tile")


MUTANTS: dict[str, Mutant] = {
    "mover-repeats-a-row": Mutant(
        "the last row of an index is its first", f"{_KERNELS}.gather", wrap(_rows_as_a_range), "probes"
    ),
    "mover-puts-in-reverse": Mutant(
        "rows are put into place in reverse", f"{_KERNELS}.scatter_", wrap(_put_in_reverse), "probes"
    ),
    "mover-sends-the-first-heads": Mutant(
        "every rank gets the first rank's heads", f"{_KERNELS}.gather_heads", wrap(_heads_of_rank_0), "probes"
    ),
    "block-window-too-wide": Mutant(
        "the window shows one key more", _COLUMNS, _sides(lambda left, right, _: (_moved(left, 1), right)), "probes"
    ),
    "block-window-too-narrow": Mutant(
        "the window shows one key less", _COLUMNS, _sides(lambda left, right, _: (_moved(left, -1), right)), "probes"
    ),
    "block-window-dropped": _tile("the left window is ignored", _COLUMNS, _sides(lambda left, right, _: (None, right))),
    "block-diagonal-hidden": Mutant(
        "no query sees its own key", _COLUMNS, _sides(lambda left, right, _: (left, _moved(right, -1))), "probes"
    ),
    "block-future-shown": Mutant(
        "every query sees the next key", _COLUMNS, _sides(lambda left, right, _: (left, _moved(right, 1))), "probes"
    ),
    "block-aligned-to-the-first-key": _tile(
        "the diagonal is aligned to the first key",
        _COLUMNS,
        _sides(lambda left, right, shift: (_moved(left, shift), _moved(right, -shift))),
    ),
    "block-mask-forgotten": Mutant("blocks are not masked inside", _COLUMNS, wrap(_unmasked), "probes"),
    "block-loses-one-key": Mutant("one key of some rows is hidden", _COLUMNS, wrap(_one_key_lost), "probes"),
    "block-softcap-not-divided": _tile("scores are not divided by the softcap", _SCORES, wrap(_softcap_not_divided)),
    "block-softcap-dropped": Mutant("the softcap is ignored", _SCORES, wrap(_softcap_dropped), "logic"),
    "block-groups-interleaved": Mutant("kv head h % h_kv", _FOLD, wrap(_groups_interleaved), "logic"),
    "tile-lse-rounded": Mutant("a tile's lse is bfloat16", f"{_BACKEND}.forward", wrap(_lse_rounded), "budget"),
    "tile-max-logit-of-another-head": Mutant(
        "max_logit of the next head", f"{_BACKEND}.forward", wrap(_max_logit_of_another_head), "logic"
    ),
    "tile-dlse-ignored": Mutant(
        "a tile's backward pass ignores dlse", f"{_BACKEND}.backward", wrap(_dlse_ignored), "logic"
    ),
    "tile-delta-lost": _tile("ds is p * dp", f"{_BACKEND}.backward", wrap(_delta_lost), "kernel-backward"),
    "tile-dk-unscaled": _tile("dk is not scaled", f"{_BACKEND}.backward", wrap(_dk_unscaled), "kernel-backward"),
    "tile-dkv-heads-rotated": Mutant(
        "gradients of the next kv head", f"{_BACKEND}.backward", wrap(_dk_heads_rotated), "logic"
    ),
}
