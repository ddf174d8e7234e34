"""FlashAttention 4's kernels for Hopper with scores and dropout of a `ScoreProgram`.

The library applies a score_mod to one score after the other, wraps each index by a division, and loads what it needs
for each score again. Its backward pass gives wrong heads and rows for GQA. Here a tile's scores are computed together
(`score_tiles`), by the same hooks.

Dropout is between the softmax and the product with V. In the forward pass probabilities are dropped after the library's
softmax has summed them up, so the log-sum-exp is that of all. In the backward pass, with the probability p, the factor
k (0, or 1 / (1 - dropout_p)), and delta as in `BackwardOperands`:

    dv = (p k)^T dout        ds = p (k dp - delta)

The library computes p and p (dp - delta); both hooks see p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

from cp_fast.kernels.attention.fa4.scores.expressions import FLOAT
from cp_fast.kernels.attention.fa4.scores.launch_program import ScoreProgram
from cp_fast.kernels.attention.fa4.scores.score_tiles import ScoreTile, Values, constant, library, select

__all__ = [
    "backward_kernel",
    "forward_kernel",
    "score_arguments",
    "score_call",
]

# ---- the kernels


_BITS = 32


@cache
def forward_kernel() -> type:
    """The forward kernel's class."""
    layout_utils, base = library("quack.layout_utils"), library("flash_attn.cute.flash_fwd_sm90")

    class Forward(base.FlashAttentionForwardSm90):
        score_mod: ScoreProgram

        def apply_score_mod(
            self,
            thr_mma_qk: Any,
            batch_idx: Any,
            head_idx: Any,
            m_block: Any,
            acc_S: Any,
            n_block: Any,
            softmax_scale: Any,
            seqlen: Any,
            aux_data: Any = None,
            fastdiv_mods: Any = None,
            dropped: Any = None,
        ) -> None:
            shape = self.tile_m, self.tile_n
            places = layout_utils.reshape_acc_to_mn(
                thr_mma_qk.partition_C(_coordinates(shape, (m_block * shape[0], n_block * shape[1])))
            )
            group = self.qhead_per_kvhead if self.pack_gqa else 1
            rows = [_query(places[r, 0][0], head_idx, group) for r in range(_size(places, 0))]
            columns = [places[0, c][1] for c in range(_size(places, 1))]
            tile = ScoreTile(self.score_mod, rows, columns, batch_idx, seqlen, aux_data, rows_apart=True)
            _modify(tile, self.score_mod, layout_utils.reshape_acc_to_mn(acc_S), softmax_scale)
            if dropped is not None:
                dropped.keep(tile)

        def first_half_block_overlap(self, *args: Any, **kwargs: Any) -> Any:
            return super().first_half_block_overlap(*args, **self._dropping(kwargs))

        def mma_one_n_block(self, *args: Any, **kwargs: Any) -> Any:
            return super().mma_one_n_block(*args, **self._dropping(kwargs))

        def mma_one_n_block_intrawg_overlap(self, *args: Any, **kwargs: Any) -> Any:
            return super().mma_one_n_block_intrawg_overlap(*args, **self._dropping(kwargs))

        def epilogue(self, acc_O: Any, *args: Any, **kwargs: Any) -> Any:
            if self.score_mod.dropout_p:
                acc_O.store(acc_O.load() * (1 / (1 - self.score_mod.dropout_p)))
            return super().epilogue(acc_O, *args, **kwargs)

        def _dropping(self, kwargs: dict[str, Any]) -> dict[str, Any]:
            """The arguments of a block, with a softmax and a score_mod that share which pairs are dropped."""
            if not self.score_mod.dropout_p:
                return kwargs
            dropped = _Dropped()
            softmax = _DroppingSoftmax(kwargs["softmax"], dropped)
            return {**kwargs, "softmax": softmax, "score_mod_fn": partial(kwargs["score_mod_fn"], dropped=dropped)}

    return Forward


@cache
def backward_kernel() -> type:
    """The backward kernel's class."""
    cute, utils, base = map(library, ("cutlass.cute", "flash_attn.cute.utils", "flash_attn.cute.flash_bwd_sm90"))
    layout_utils, copy_utils = library("quack.layout_utils"), library("quack.copy_utils")

    class Backward(base.FlashAttentionBackwardSm90):
        score_mod: ScoreProgram

        def apply_score_mod(
            self,
            acc_S: Any,
            thr_mma_SdP: Any,
            batch_idx: Any,
            head_idx: Any,
            m_block: Any,
            n_block: Any,
            softmax_scale: Any,
            seqlen_info: Any,
            aux_data: Any = None,
            fastdiv_mods: Any = None,
            dropped: Any = None,
        ) -> None:
            tile = self._tile(thr_mma_SdP, batch_idx, head_idx, m_block, n_block, seqlen_info, aux_data)
            _modify(tile, self.score_mod, self._rows_first(acc_S), softmax_scale, for_gradients=True)
            if dropped is not None:
                dropped.keep(tile)
                dropped.probabilities = acc_S  # The library makes them of scores in place.

        def apply_score_mod_bwd(
            self,
            grad_tensor: Any,
            score_tensor: Any,
            thr_mma_SdP: Any,
            batch_idx: Any,
            head_idx: Any,
            m_block: Any,
            n_block: Any,
            softmax_scale: Any,
            seqlen_info: Any,
            aux_data: Any = None,
            fastdiv_mods: Any = None,
        ) -> None:
            program, pulled_back = self.score_mod, self.score_mod.traced.pulled_back
            if pulled_back.is_leaf:
                return
            tile = self._tile(thr_mma_SdP, batch_idx, head_idx, m_block, n_block, seqlen_info, aux_data)
            values, grads, scores = Values(pulled_back, tile), *map(self._rows_first, (grad_tensor, score_tensor))
            for r, c in tile.order:
                grad = grads[r, c]
                result = values.at(r, c, score=scores[r, c] * softmax_scale, grad=grad)
                grads[r, c] = select(grad == 0.0, constant(0.0, FLOAT), result) if program.guarded else result

        def mma_one_m_block(self, *args: Any, **kwargs: Any) -> Any:
            program = self.score_mod
            if not program.dropout_p:
                return super().mma_one_m_block(*args, **kwargs)
            dropped, factor = _Dropped(), 1 / (1 - program.dropout_p)
            copy_p, product, pull_back = kwargs["copy_P_r2s"], kwargs["mma_pdo_fn"], kwargs["score_mod_bwd_fn"]
            state = args[1] if self.Q_stage == self.dO_stage else args[2]
            stage = state.index if self.dO_stage > 1 else 0
            deltas = kwargs["tLSEsdPsum"]

            def kept_probabilities() -> Any:
                whole = dropped.probabilities
                part = cute.make_fragment_like(whole)
                these, those = self._rows_first(part), self._rows_first(whole)
                for r, c in dropped.order:
                    these[r, c] = select(dropped.keeps(r, c), those[r, c] * factor, constant(0.0, FLOAT))
                return utils.cvt_f16(layout_utils.reshape_acc_to_frgA(part), self.dtype)

            def copy_kept(_: Any, **others: Any) -> Any:
                return copy_p(kept_probabilities(), **others)

            def product_of_kept(**others: Any) -> Any:
                return product(**{**others, "tCrA": kept_probabilities()} if "tCrA" in others else others)

            def pull_back_kept(grad_tensor: Any, score_tensor: Any, **others: Any) -> Any:
                loaded, lane = copy_utils.load_s2r(deltas[None, stage]), cute.arch.lane_idx()
                grads, probabilities = self._rows_first(grad_tensor), self._rows_first(dropped.probabilities)
                by_row: dict[int, Any] = {}
                for r, c in dropped.order:
                    if r not in by_row:
                        by_row[r] = self._get_stat(loaded, r, lane, shuffle=self.shuffle_dPsum)
                    part = probabilities[r, c] * by_row[r]
                    kept = grads[r, c] * factor + part * (factor - 1.0)
                    grads[r, c] = select(dropped.keeps(r, c), kept, part * -1.0)
                return pull_back(grad_tensor, score_tensor, **others)

            changed = {"copy_P_r2s": copy_kept if copy_p is not None else None, "mma_pdo_fn": product_of_kept}
            changed["score_mod_fn"] = partial(kwargs["score_mod_fn"], dropped=dropped)
            return super().mma_one_m_block(*args, **{**kwargs, **changed, "score_mod_bwd_fn": pull_back_kept})

        def _tile(
            self, thr_mma: Any, batch_idx: Any, head_idx: Any, m_block: Any, n_block: Any, seqlen: Any, aux_data: Any
        ) -> ScoreTile:
            shape, start = (self.tile_m, self.tile_n), (m_block * self.tile_m, n_block * self.tile_n)
            if self.SdP_swapAB:
                shape, start = shape[::-1], start[::-1]
            places = self._rows_first(thr_mma.partition_C(_coordinates(shape, start)))
            query, key = (1, 0) if self.SdP_swapAB else (0, 1)
            rows = [(places[r, 0][query], head_idx) for r in range(_size(places, 0))]
            columns = [places[0, c][key] for c in range(_size(places, 1))]
            apart = not self.SdP_swapAB
            return ScoreTile(self.score_mod, rows, columns, batch_idx, seqlen, aux_data, rows_apart=apart)

        def _rows_first(self, acc: Any) -> Any:
            return layout_utils.reshape_acc_to_mn(acc, transpose=self.SdP_swapAB)

    return Backward


def _coordinates(shape: tuple[int, int], start: tuple[Any, Any]) -> Any:
    cute = library("cutlass.cute")
    return cute.domain_offset(start, cute.make_identity_tensor(shape))


def _size(places: Any, mode: int) -> int:
    return int(library("cutlass.cute").size(places, mode=[mode]))


def _query(row: Any, head: Any, group: int) -> tuple[Any, Any]:
    """The query in its segment and the query head of a row; rows of several heads may be packed."""
    if group == 1:
        return row, head
    query = row // group
    return query, head * group + (row - query * group)


def _modify(
    tile: ScoreTile, program: ScoreProgram, scores: Any, softmax_scale: Any, *, for_gradients: bool = False
) -> None:
    """Replace products of q and k by scores."""
    values = Values(program.traced.modified, tile)
    for r, c in tile.order:
        score = values.at(r, c, score=scores[r, c] * softmax_scale)
        if for_gradients and program.guarded:  # A NaN, of rows behind the segment's last, would reach dk and dv.
            score = select(score < constant(float("inf"), FLOAT), score, constant(float("-inf"), FLOAT))
        scores[r, c] = score


class _Dropped:
    """Which pairs of a tile dropout keeps, as bits: registers that live until the probabilities are there."""

    def __init__(self) -> None:
        self.order: list[tuple[int, int]] = []
        self.probabilities: Any = None
        self._words: list[Any] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def keep(self, tile: ScoreTile) -> None:
        uint32 = library("cutlass").Uint32
        self.order = tile.order
        kept = tile.kept_by_dropout()
        for number, pair in enumerate(self.order):
            if number % _BITS == 0:
                self._words.append(uint32(0))
            self._numbers[pair] = number
            self._words[-1] = self._words[-1] | select(kept[pair], uint32(1 << number % _BITS), uint32(0))

    def keeps(self, r: int, c: int) -> Any:
        uint32 = library("cutlass").Uint32
        number = self._numbers[r, c]
        return (self._words[number // _BITS] & uint32(1 << number % _BITS)) != uint32(0)


class _DroppingSoftmax:
    """The library's softmax of a block, which drops probabilities once they are summed up."""

    def __init__(self, softmax: Any, dropped: _Dropped) -> None:
        self._softmax, self._dropped = softmax, dropped

    def online_softmax(self, acc_S: Any, **kwargs: Any) -> Any:
        scales = self._softmax.online_softmax(acc_S, **kwargs)
        probabilities = library("quack.layout_utils").reshape_acc_to_mn(acc_S)
        for r, c in self._dropped.order:
            probabilities[r, c] = select(self._dropped.keeps(r, c), probabilities[r, c], constant(0.0, FLOAT))
        return scales

    def rescale_O(self, *args: Any) -> None:
        self._softmax.rescale_O(*args)


# ---- the library's two functions with these kernels
#
# The library's two functions with a program of scores in place of a score_mod, as functions of tensors and numbers.


def score_arguments(count: int) -> tuple[str, ...]:
    """The names of `count` tensors that a program reads."""
    return tuple(f"score_tensor_{n}" for n in range(count))


def score_call(interface: ModuleType, name: str, count: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function of the library that takes the arguments of `score_arguments`, `program` and `first_head` too."""
    function, names = getattr(interface, name), score_arguments(count)

    def call(*, program: Any, first_head: int, **arguments: Any) -> tuple[torch.Tensor, ...]:
        int32 = library("cutlass").Int32
        tensors = [arguments.pop(one) for one in names]
        mods = {"score_mod": program} | ({"score_mod_bwd": program} if name == "_flash_attn_bwd" else {})
        if program.dropout_p and name == "_flash_attn_fwd":
            mods["pack_gqa"] = False  # Rows 8 apart are queries 8 apart: they share random words.
        with _kernels(interface):
            return function(**arguments, **mods, aux_tensors=tensors, aux_scalars=(int32(first_head),))

    call.compile_cache = function.compile_cache  # type: ignore[attr-defined]
    return call


@contextmanager
def _kernels(interface: ModuleType) -> Iterator[None]:
    """The library compiles our kernels."""
    ours = {"FlashAttentionForwardSm90": forward_kernel(), "FlashAttentionBackwardSm90": backward_kernel()}
    theirs = {name: getattr(interface, name) for name in ours}
    try:
        vars(interface).update(ours)
        yield
    finally:
        vars(interface).update(theirs)
