"""The table of special cases: every edge of what attention means, one name each."""

from __future__ import annotations

from conformance.judge.named_entries import TableEntry
from conformance.special.gradients import GRADIENTS
from conformance.special.heads import HEADS
from conformance.special.special_lengths import LENGTHS
from conformance.special.special_masks import MASKS
from conformance.special.special_scores import SCORES
from conformance.special.special_values import VALUES

__all__ = ["SPECIAL"]

SPECIAL: dict[str, TableEntry] = VALUES | LENGTHS | MASKS | HEADS | GRADIENTS | SCORES
