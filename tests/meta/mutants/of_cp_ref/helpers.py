"""Bugs of the THD helpers, and of merging; the levels `helpers` and `merge` have to see them."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]


def _contiguous_parts(indices: Any, cu: torch.Tensor, total: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    part = len(indices(cu, total, cp_size, cp_rank))
    return torch.arange(cp_rank * part, (cp_rank + 1) * part, dtype=cu.dtype, device=cu.device)


def _next_rank(indices: Any, cu: torch.Tensor, total: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    return indices(cu, total, cp_size, (cp_rank + 1) % cp_size)


def _applied_backwards(other: str) -> Any:
    """The inverse in place of the reorder: equal for cp_size 1 alone."""

    def wrong(reorder: Any, x: Any, cu: torch.Tensor, cp_size: int) -> Any:
        from pkgutil import resolve_name

        return resolve_name(f"cp_ref.thd.indices:{other}")(x, cu, cp_size)

    return wrap(wrong)


def _tail_lost(reorder: Any, x: Any, cu: torch.Tensor, cp_size: int) -> Any:
    """The tail is not moved at all."""
    result, end = reorder(x, cu, cp_size), int(cu[-1])
    if not isinstance(result, torch.Tensor):
        return result
    return torch.cat([result[:end], x[end:]])


def _all_slots_copied(
    copy: Any, out: torch.Tensor, inp: torch.Tensor, cu_padded: torch.Tensor, cu: torch.Tensor
) -> None:
    copy(out, inp, cu_padded, cu_padded - cu_padded[0])


def _other_half(read: Any, x: Any, cu: torch.Tensor, half: int) -> Any:
    return read(x, cu, 1 - half)


def _minus_inf_where_nothing(read: Any, lse: torch.Tensor, *rest: Any) -> torch.Tensor:
    result = read(lse, *rest)
    return result.masked_fill(result == 0, float("-inf"))


def _lse_of_the_step(correct: Any, lse: torch.Tensor, lse_step: torch.Tensor, *rest: Any) -> None:
    correct(lse.fill_(float("-inf")), lse_step, *rest)


def _lse_with_nan(correct: Any, lse: torch.Tensor, lse_step: torch.Tensor, *rest: Any) -> None:
    def unguarded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.maximum(a, b) + torch.log1p(torch.exp(torch.minimum(a, b) - torch.maximum(a, b)))

    from unittest import mock

    with mock.patch("torch.logaddexp", unguarded):
        correct(lse, lse_step, *rest)


def _not_rescaled(correct: Any, out: Any, out_step: Any, lse: Any, lse_step: Any, *rest: Any, **named: Any) -> None:
    correct(out, out_step, torch.zeros_like(lse), torch.zeros_like(lse_step), *rest, **named)


def _rounded_twice(correct: Any, out: torch.Tensor, out_step: torch.Tensor, *rest: Any, **named: Any) -> None:
    """Each share is rounded to bfloat16 before it is added."""
    share = torch.zeros_like(out)
    correct(share, out_step, *rest, **named)
    out.add_(share.bfloat16().to(out.dtype))


def _copied(correct: Any, grad: Any, step: Any, cu: Any, first: str, second: str) -> None:
    correct(grad, step, cu, first.replace("add", "copy"), second.replace("add", "copy"))


def _halves_exchanged(correct: Any, grad: Any, step: Any, cu: Any, first: str, second: str) -> None:
    correct(grad, step, cu, second, first)


def _by_division(local: Any, cu: torch.Tensor, cu_padded: torch.Tensor, cp_size: int, *rest: Any) -> torch.Tensor:
    return cu // cp_size


def _late_chunk_missing(local: Any, cu: Any, padded: Any, cp_size: int, rank: int, first: bool, second: bool) -> Any:
    return local(cu, padded, cp_size, rank, first, second and not first)


def _labels_padded_as_ids(pad: Any, ids: Any, labels: Any, cu: Any, factor: int, token: int, _: int, *rest: Any) -> Any:
    return pad(ids, labels, cu, factor, token, token, *rest)


def _one_more_block(pad: Any, ids: Any, labels: Any, cu: Any, factor: int, *rest: Any, **named: Any) -> Any:
    """A sequence that divides already is padded by a whole factor."""
    return pad(ids, labels, cu, factor + 1 if factor > 1 else factor, *rest, **named)


def _zeros_in_front(pad_v: Any, v: torch.Tensor, d_qk: int) -> torch.Tensor:
    padded = pad_v(v, d_qk)
    return padded.roll(d_qk - v.shape[-1], -1)


def _last_columns(trim_out: Any, out: torch.Tensor, d_v: int) -> torch.Tensor:
    return out[..., out.shape[-1] - d_v :] if trim_out(out, d_v) is not None else out


def _loss_mask_whole(cut: Any, batch: Any, **named: Any) -> Any:
    return {name: batch[name] if name == "loss_mask" else x for name, x in cut(batch, **named).items()}


def _bound(spoil: Any) -> Any:
    """The spoiled helper takes its arguments by name too."""

    def with_names(original: Any) -> Any:
        signature, wrong = inspect.signature(original), spoil(original)

        def called(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            return wrong(*bound.args, **bound.kwargs)

        return called

    return with_names


def _helper(text: str, name: str, spoil: Any) -> Mutant:
    return Mutant(text, f"cp_ref.thd.{name}", _bound(spoil), "helpers", "helpers")


_REORDER, _INVERSE = "thd_sequence_order_to_cp_rank_order", "thd_cp_rank_order_to_sequence_order"

MUTANTS: dict[str, Mutant] = {
    "partition-contiguous": _helper("equal parts, not chunks", "thd_get_partitioned_indices", wrap(_contiguous_parts)),
    "partition-of-the-next-rank": _helper("rank + 1", "thd_get_partitioned_indices", wrap(_next_rank)),
    "reorder-backwards": _helper("the inverse in its place", _REORDER, _applied_backwards(_INVERSE)),
    "reorder-inverse-backwards": _helper("the reorder in its place", _INVERSE, _applied_backwards(_REORDER)),
    "reorder-without-the-tail": _helper("the tail stays at the end", _REORDER, wrap(_tail_lost)),
    "padding-copied": _helper(
        "slots are copied, not tokens",
        "thd_copy_valid_tokens_from_per_split_to_rank_local",
        wrap(_all_slots_copied),
    ),
    "other-half-read": _helper("half 1 for half 0", "thd_read_half_tensor", wrap(_other_half)),
    "lse-of-nothing-is-minus-inf": _helper(
        "slots without a token hold -inf, not 0", "thd_read_second_half_lse", wrap(_minus_inf_where_nothing)
    ),
    "lse-overwritten": _helper(
        "the step's LSE replaces the running one", "thd_second_half_lse_correction", wrap(_lse_of_the_step)
    ),
    "lse-of-two-empty-rows": _helper(
        "-inf merged with -inf is NaN", "thd_second_half_lse_correction", wrap(_lse_with_nan)
    ),
    "out-not-rescaled": _helper("out_step is added as it is", "thd_out_correction", wrap(_not_rescaled)),
    "out-in-bf16": _helper("shares are rounded before they are added", "thd_out_correction", wrap(_rounded_twice)),
    "gradient-copied": _helper("add copies", "thd_grad_correction", wrap(_copied)),
    "gradient-of-the-other-half": _helper("halves exchanged", "thd_grad_correction", wrap(_halves_exchanged)),
    "lengths-by-division": _helper("real lengths are divided", "get_cu_seqlens_on_cp_rank", wrap(_by_division)),
    "late-chunk-not-counted": _helper(
        "of both chunks the early one is counted", "get_cu_seqlens_on_cp_rank", wrap(_late_chunk_missing)
    ),
    "labels-padded-as-ids": _helper("padding has a label", "pad_thd_sequences_for_cp", wrap(_labels_padded_as_ids)),
    "padded-to-another-factor": _helper(
        "the factor is one too large", "pad_thd_sequences_for_cp", wrap(_one_more_block)
    ),
    "v-padded-in-front": _helper("zeros before V, not behind", "pad_v", wrap(_zeros_in_front)),
    "last-columns-kept": _helper("the first columns are trimmed", "trim_out", wrap(_last_columns)),
    "loss-mask-not-cut": _helper("the loss mask stays whole", "get_batch_on_this_cp_rank", wrap(_loss_mask_whole)),
}
