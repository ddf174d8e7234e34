"""Rules for lengths on a GPU, asserted where they lie: `torch._assert_async` waits for nothing.

On a CPU the caller has checked them, and has said which sequence breaks the rule.
"""

from __future__ import annotations

import torch

__all__ = ["assert_lengths", "assert_real_lengths"]


def assert_lengths(
    helper: str, lengths: torch.Tensor, divisor: int, total: int, tail_divisor: int = 1, from_zero: bool = True
) -> None:
    """The lengths begin at 0, do not decrease, divide, and end inside `total` rows with a tail that divides."""
    if lengths.device.type == "cpu":
        return
    wide = lengths.long()
    sizes, tail = wide.diff(), total - wide[-1]
    first = wide[0] == 0 if from_zero else wide[0] >= 0
    right = first & (sizes >= 0).all() & (sizes % divisor == 0).all() & (tail >= 0) & (tail % tail_divisor == 0)
    rule = (
        f"lengths must {'begin at 0' if from_zero else 'not be negative'}, not decrease, be multiples of {divisor}, "
        f"and end by {total} with a tail that is a multiple of {tail_divisor}"
    )
    torch.ops.aten._assert_async.msg(right, f"cp_fast {helper}: {rule}")


def assert_real_lengths(helper: str, real_lengths: torch.Tensor, lengths: torch.Tensor) -> None:
    """The real lengths begin at 0 and fit into the slots."""
    if lengths.device.type == "cpu":
        return
    real, slots = real_lengths.long().diff(), lengths.long().diff()
    right = (real_lengths[0] == 0) & (real >= 0).all() & (real <= slots).all()
    rule = "real lengths must begin at 0, not decrease, and fit into the slots"
    torch.ops.aten._assert_async.msg(right, f"cp_fast {helper}: {rule}")
