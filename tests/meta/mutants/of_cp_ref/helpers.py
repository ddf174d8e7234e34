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


def _applied_backwards(other: str) -> Any:
    """The inverse in place of the reorder: equal for cp_size 1 alone."""

    def wrong(reorder: Any, x: Any, cu: torch.Tensor, cp_size: int) -> Any:
        from pkgutil import resolve_name

        return resolve_name(f"cp_ref.thd:{other}")(x, cu, cp_size)

    return wrap(wrong)


def _all_slots_copied(
    copy: Any, out: torch.Tensor, inp: torch.Tensor, cu_padded: torch.Tensor, cu: torch.Tensor
) -> None:
    copy(out, inp, cu_padded, cu_padded - cu_padded[0])


def _other_half(read: Any, x: Any, cu: torch.Tensor, half: int) -> Any:
    return read(x, cu, 1 - half)


def _lse_of_the_step(correct: Any, lse: torch.Tensor, lse_step: torch.Tensor, *rest: Any) -> None:
    correct(lse.fill_(float("-inf")), lse_step, *rest)


def _rounded_twice(correct: Any, out: torch.Tensor, out_step: torch.Tensor, *rest: Any, **named: Any) -> None:
    """Each share is rounded to bfloat16 before it is added."""
    share = torch.zeros_like(out)
    correct(share, out_step, *rest, **named)
    out.add_(share.bfloat16().to(out.dtype))


def _copied(correct: Any, grad: Any, step: Any, cu: Any, first: str, second: str) -> None:
    correct(grad, step, cu, first.replace("add", "copy"), second.replace("add", "copy"))


def _by_division(local: Any, cu: torch.Tensor, cu_padded: torch.Tensor, cp_size: int, *rest: Any) -> torch.Tensor:
    return cu // cp_size


def _one_more_block(pad: Any, ids: Any, labels: Any, cu: Any, factor: int, *rest: Any, **named: Any) -> Any:
    """A sequence that divides already is padded by a whole factor."""
    return pad(ids, labels, cu, factor + 1 if factor > 1 else factor, *rest, **named)


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
    "reorder-backwards": _helper("the inverse in its place", _REORDER, _applied_backwards(_INVERSE)),
    "padding-copied": _helper(
        "slots are copied, not tokens",
        "thd_copy_valid_tokens_from_per_split_to_rank_local",
        wrap(_all_slots_copied),
    ),
    "other-half-read": _helper("half 1 for half 0", "thd_read_half_tensor", wrap(_other_half)),
    "lse-overwritten": _helper(
        "the step's LSE replaces the running one", "thd_second_half_lse_correction", wrap(_lse_of_the_step)
    ),
    "out-in-bf16": _helper("shares are rounded before they are added", "thd_out_correction", wrap(_rounded_twice)),
    "gradient-copied": _helper("add copies", "thd_grad_correction", wrap(_copied)),
    "lengths-by-division": _helper("real lengths are divided", "get_cu_seqlens_on_cp_rank", wrap(_by_division)),
    "padded-to-another-factor": _helper(
        "the factor is one too large", "pad_thd_sequences_for_cp", wrap(_one_more_block)
    ),
    "loss-mask-not-cut": _helper("the loss mask stays whole", "get_batch_on_this_cp_rank", wrap(_loss_mask_whole)),
}
