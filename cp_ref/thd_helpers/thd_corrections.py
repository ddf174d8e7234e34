"""Helpers for packed sequences, declared: halves of every sequence, and merging a ring step's results in place."""

from __future__ import annotations

from typing import Any

import torch

from cp_ref.calls.declared import declare
from cp_ref.schedules.values import check_choice
from cp_ref.thd_helpers.thd_checks import (
    MOST_ROWS,
    Tensors,
    check_count,
    check_device,
    check_flag,
    check_lengths,
    check_lse,
    check_tensor,
    check_written,
    device_of,
    half_of,
    tensors_of,
    token_axis,
)

__all__ = [
    "check_grad_correction",
    "check_lse_correction",
    "check_out_correction",
    "check_read_half",
    "check_read_second_half_lse",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
]


@declare
def thd_read_half_tensor(x: Tensors, cu_seqlens_padded: torch.Tensor, half: int) -> Tensors:
    """Read the first or the second half of every sequence.

    Args:
        x: [t], [t, d] or [t, h, d], or [2, t, h, d] (K and V in one tensor); any dtype. t is even. Or a
            tuple of such tensors (K and V) with the same t, which `cp_fast` reads in one launch.
        cu_seqlens_padded: LOCAL cumulative lengths with padding (of x itself), int32 or int64 [b + 1]; every length is
            even.
        half: 0 for the first half, 1 for the second.

    Returns:
        A new tensor (a tuple for a tuple) with t / 2 tokens: a half of each sequence, in order, then the same half of
        the tail. Its cumulative lengths are cu_seqlens_padded // 2. Differentiable.

    Raises:
        ValueError, TypeError: an odd length (naming the sequence), an odd t, another half, fewer tokens than lengths.

    TransformerEngine: `tex.thd_read_half_tensor`.

    >>> x = torch.tensor([10, 11, 12, 13, 20, 21])
    >>> thd_read_half_tensor(x, torch.tensor([0, 4, 6]), half=0).tolist()
    [10, 11, 20]
    >>> thd_read_half_tensor(x, torch.tensor([0, 4, 6]), half=1).tolist()
    [12, 13, 21]
    """
    raise NotImplementedError


@declare
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool, max_seqlen: int
) -> torch.Tensor:
    """Read the LSE of the second half of every sequence, which the backward pass of an upper tile needs.

    Args:
        lse: float32 or float64, [h, t] if lse_packed, else [b, h, s].
        cu_seqlens_padded: LOCAL cumulative lengths with padding (of whole sequences, not of the halves), int32 or int64
            [b + 1]; every length is even.
        lse_packed: which of the two shapes lse has.
        max_seqlen: the size of the result's last axis: the sum of all half lengths (packed) or the longest half
            (padded), or more.

    Returns:
        [h, max_seqlen] or [b, h, max_seqlen], of lse's dtype; 0 where there is no token.

    Raises:
        ValueError, TypeError: an odd length (naming the sequence), another shape or dtype, a max_seqlen too small.

    TransformerEngine: `tex.thd_read_second_half_lse`.

    >>> packed = torch.tensor([[10.0, 11.0, 12.0, 13.0, 20.0, 21.0]])
    >>> thd_read_second_half_lse(packed, torch.tensor([0, 4, 6]), True, 3).tolist()
    [[12.0, 13.0, 21.0]]
    >>> padded = torch.tensor([[[10.0, 11.0, 12.0, 13.0]], [[20.0, 21.0, 0.0, 0.0]]])
    >>> thd_read_second_half_lse(padded, torch.tensor([0, 4, 6]), False, 2).tolist()
    [[[12.0, 13.0]], [[21.0, 0.0]]]
    """
    raise NotImplementedError


def check_read_half(x: Any, cu_seqlens_padded: Any, half: Any) -> list[torch.Tensor]:
    """The arguments of `thd_read_half_tensor` -> the tensors of x."""
    xs = tensors_of(x, kv_axis=True)
    for one in xs:
        half_of("x", one, token_axis("x", one))
    check_count("half", half, 0, below=2)
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, xs[0].device)
    return xs


def check_read_second_half_lse(lse: Any, cu_seqlens_padded: Any, lse_packed: Any, max_seqlen: Any) -> None:
    """The arguments of `thd_read_second_half_lse`."""
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, device_of(lse))
    check_lse("lse", lse, len(cu_seqlens_padded) - 1, None, None, lse_packed)
    check_count("max_seqlen", max_seqlen, 0, at_most=MOST_ROWS)


ACTIONS = ("add", "copy", "none")


@declare
def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, lse_packed: bool
) -> None:
    """Merge a step's LSE into the second half of every sequence: lse = log(exp(lse) + exp(lse_step)). In place.

    Two empty rows stay empty: -inf with -inf is -inf, not NaN.

    Args:
        lse: the running LSE, float32 or float64, [h, t] if lse_packed, else [b, h, s]. Changed in place: the second
            half of every sequence, nothing else.
        lse_step: the step's, of the second halves alone, float32 or float64: [h, t / 2], or [b, h, s2] with s2 at least
            the longest half.
        cu_seqlens_padded: LOCAL cumulative lengths with padding (of whole sequences), int32 or int64 [b + 1]; every
            length is even.
        lse_packed: which of the two shapes both have.

    Raises:
        ValueError, TypeError: an odd length (naming the sequence), another shape or dtype, operands that overlap
            what is changed.

    TransformerEngine: `tex.thd_second_half_lse_correction`.

    >>> lse = torch.tensor([[1.0, 2.0, 4.0, 5.0]]).log()                  # h 1, t 4: two rows in the second half
    >>> thd_second_half_lse_correction(lse, torch.tensor([[3.0, 0.0]]).log(), torch.tensor([0, 4]), lse_packed=True)
    >>> [round(x, 4) for x in lse.exp().flatten().tolist()]               # 4 + 3 and 5 + 0
    [1.0, 2.0, 7.0, 5.0]
    """
    raise NotImplementedError


@declare
def thd_out_correction(
    out: torch.Tensor,
    out_step: torch.Tensor,
    lse: torch.Tensor,
    lse_step: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Add a step's partial output, rescaled to the final denominator: out += exp(lse_step - lse) * out_step. In place.

    Start with out = 0 and do it once for every step, when `lse` is the LSE over all steps. A row for which a step saw
    no key (lse_step -inf) gets nothing from it, whatever its out_step.

    Args:
        out: [t, h, d], float16, bfloat16, float32 or float64 (float32 or wider, to accumulate without loss).
        out_step: the step's output, [t, h, d], or [t / 2, h, d] if only_second_half; any of those dtypes.
        lse: the final LSE, float32 or float64, [h, t] if lse_packed, else [b, h, s].
        lse_step: the step's, [h, t] or [b, h, s]; if only_second_half [h, t / 2] or [b, h, s2] with s2 at least the
            longest half.
        cu_seqlens_padded: LOCAL cumulative lengths with padding (of whole sequences), int32 or int64 [b + 1]; if
            only_second_half, every length is even.
        only_second_half: whether the step had the second halves alone.
        lse_packed: which of the two shapes both LSEs have.

    Raises:
        ValueError, TypeError: an odd length (naming the sequence), another shape or dtype, operands that overlap
            what is changed.

    TransformerEngine: `tex.thd_out_correction`.

    >>> out = torch.zeros(2, 1, 1)                                         # t 2, h 1, d 1
    >>> lse = torch.tensor([[2.0, 8.0]]).log()
    >>> lengths = torch.tensor([0, 2])
    >>> first = torch.tensor([[[5.0]], [[1.0]]]), torch.tensor([[2.0, 6.0]]).log()
    >>> thd_out_correction(out, first[0], lse, first[1], lengths, only_second_half=False, lse_packed=True)
    >>> second = torch.tensor([[[9.0]]]), torch.tensor([[2.0]]).log()      # the second row alone
    >>> thd_out_correction(out, second[0], lse, second[1], lengths, only_second_half=True, lse_packed=True)
    >>> [round(x, 4) for x in out.flatten().tolist()]                      # 5 * 2/2, and 1 * 6/8 + 9 * 2/8
    [5.0, 3.0]
    """
    raise NotImplementedError


@declare
def thd_grad_correction(
    grad: torch.Tensor, grad_step: torch.Tensor, cu_seqlens_padded: torch.Tensor, first_half: str, second_half: str
) -> None:
    """Put a step's gradient into an accumulator, with one action for each half of every sequence. In place.

    The first step that touches a half copies (so the accumulator needs no zeroing), and later ones add. A half that the
    step did not touch does not change.

    Args:
        grad: [t], [t, d] or [t, h, d], or [2, t, h, d] (dK and dV in one tensor); float16, bfloat16, float32 or
            float64 (float32 or wider, to accumulate without loss).
        grad_step: of any of those dtypes, with t tokens if both halves are added or copied, t / 2 if one is "none", and
            either if both are.
        cu_seqlens_padded: LOCAL cumulative lengths with padding (of whole sequences), int32 or int64 [b + 1]; every
            length is even.
        first_half, second_half: "add", "copy" or "none".

    Raises:
        ValueError, TypeError: an action that does not exist, an odd length (naming the sequence), another shape or
            dtype, a grad_step that overlaps grad.

    TransformerEngine: `tex.thd_grad_correction`, which refuses three of the nine pairs.

    >>> grad = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> thd_grad_correction(grad, torch.tensor([10.0, 20.0]), torch.tensor([0, 4]), "none", "add")
    >>> grad.tolist()
    [1.0, 2.0, 13.0, 24.0]
    >>> thd_grad_correction(grad, torch.tensor([5.0, 6.0, 7.0, 8.0]), torch.tensor([0, 4]), "add", "copy")
    >>> grad.tolist()
    [6.0, 8.0, 7.0, 8.0]
    """
    raise NotImplementedError


def check_lse_correction(lse: Any, lse_step: Any, cu_seqlens_padded: Any, lse_packed: Any) -> None:
    """The arguments of `thd_second_half_lse_correction`."""
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, device_of(lse))
    sequences = len(cu_seqlens_padded) - 1
    check_lse("lse", lse, sequences, None, None, lse_packed)
    step_tokens = half_of("lse", lse, 1) if lse_packed else None
    check_lse("lse_step", lse_step, sequences, step_tokens, lse.shape[-2], lse_packed)
    check_device(lse=lse, lse_step=lse_step)
    check_written("lse", lse)


def check_out_correction(
    out: Any, out_step: Any, lse: Any, lse_step: Any, cu_seqlens_padded: Any, only_second_half: Any, lse_packed: Any
) -> None:
    """The arguments of `thd_out_correction`."""
    check_tensor("out", out, floats_only=True)
    check_tensor("out_step", out_step, floats_only=True)
    check_flag("only_second_half", only_second_half)
    if out.ndim != 3:
        raise ValueError(f"out has shape {list(out.shape)}; it must be [t, h, d]")
    tokens, heads, _ = out.shape
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, out.device)
    step_tokens = half_of("out", out, 0) if only_second_half else tokens
    if tuple(out_step.shape) != (step_tokens, *out.shape[1:]):
        raise ValueError(
            f"out_step has shape {list(out_step.shape)}; with out {list(out.shape)} and "
            f"only_second_half={only_second_half} it must be {[step_tokens, *out.shape[1:]]}"
        )
    check_lse("lse", lse, len(cu_seqlens_padded) - 1, tokens, heads, lse_packed)
    check_lse("lse_step", lse_step, len(cu_seqlens_padded) - 1, step_tokens, heads, lse_packed)
    check_device(out=out, out_step=out_step, lse=lse, lse_step=lse_step)
    check_written("out", out)


def check_grad_correction(grad: Any, grad_step: Any, cu_seqlens_padded: Any, first_half: Any, second_half: Any) -> None:
    """The arguments of `thd_grad_correction`."""
    check_choice("first_half", first_half, ACTIONS)
    check_choice("second_half", second_half, ACTIONS)
    axis = token_axis("grad", grad)
    check_tensor("grad", grad, floats_only=True)
    check_tensor("grad_step", grad_step, floats_only=True)
    check_lengths("cu_seqlens_padded", cu_seqlens_padded, grad.device)
    tokens, half_tokens = grad.shape[axis], half_of("grad", grad, axis)
    idle = (first_half, second_half).count("none")
    allowed = [size for size, fits in ((tokens, idle != 1), (half_tokens, idle > 0)) if fits]
    shapes = [[*grad.shape[:axis], size, *grad.shape[axis + 1 :]] for size in allowed]
    if list(grad_step.shape) not in shapes:
        raise ValueError(
            f"grad_step has shape {list(grad_step.shape)}; with grad {list(grad.shape)}, first_half {first_half!r} and "
            f"second_half {second_half!r} it must be {' or '.join(map(str, shapes))}"
        )
    check_device(grad=grad, grad_step=grad_step)
    check_written("grad", grad)
