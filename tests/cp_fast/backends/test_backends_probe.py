"""The probe passes a right backend and kills mutants of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cp_fast.backends import by_name
from cp_fast.backends.backend_probe import probe
from cp_fast.backends.backend_protocol import Backend, BackwardOperands, Gradients, LaunchOptions, Partial, VarlenBatch
from cp_ref.schedules.words import Feature

CPU = by_name("cpu")


class Mutant(Backend):
    """The cpu backend behind changed segments or results."""

    name: str = "mutant"
    features: frozenset[Feature] = CPU.features

    def __init__(
        self,
        segments: Callable[[VarlenBatch], VarlenBatch] = lambda s: s,
        partial: Callable[[Partial], Partial] = lambda p: p,
        gradients: Callable[[Gradients], Gradients] = lambda g: g,
    ) -> None:
        self._segments, self._partial, self._gradients = segments, partial, gradients

    def why_not(self) -> str | None:
        return None

    def forward(self, q: Any, k: Any, v: Any, segments: VarlenBatch, options: LaunchOptions) -> Partial:
        return self._partial(CPU.forward(q, k, v, self._segments(segments), options))

    def backward(self, operands: BackwardOperands, segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        return self._gradients(CPU.backward(operands, self._segments(segments), options))


def top_left(s: VarlenBatch) -> VarlenBatch:
    """The same window from the top-left corner, for launches of one alignment."""
    shift = (s.cu_kv[1] - s.cu_kv[0]) - (s.cu_q[1] - s.cu_q[0])
    return replace_window(
        s, s.left if s.left is None else s.left + shift, s.right if s.right is None else s.right - shift
    )


def replace_window(s: VarlenBatch, left: int | None, right: int | None) -> VarlenBatch:
    return replace(s, left=left, right=right)


def more(side: int | None, by: int) -> int | None:
    return None if side is None else side + by


def test_the_probe_passes_the_cpu_backend() -> None:
    assert probe(CPU, "cpu") is None


@pytest.mark.parametrize(
    ("mutant", "word"),
    [
        (Mutant(lambda s: replace_window(s, more(s.left, 1), s.right)), "columns"),
        (Mutant(lambda s: replace_window(s, s.left, more(s.right, -1))), "columns"),
        (Mutant(lambda s: replace_window(s, s.left, None if s.right == 0 else s.right)), "columns"),
        (Mutant(top_left), "columns"),
        (Mutant(partial=lambda p: p._replace(lse=p.lse / torch.tensor(2.0).log())), "columns"),
        (Mutant(partial=lambda p: p._replace(lse=p.lse.T.contiguous())), "lse is"),
        (Mutant(partial=lambda p: p._replace(out=p.out.roll(1, 1))), "out"),
        (Mutant(gradients=lambda g: g._replace(dv=g.dv * 0.98)), "dv"),
        (Mutant(gradients=lambda g: g._replace(dv=g.dv.roll(1, 0))), "dv"),
        (Mutant(gradients=lambda g: g._replace(dk=g.dk + 1)), "dk"),
        (Mutant(gradients=lambda g: g._replace(dq=g.dq * torch.nan)), "dq"),
    ],
)
def test_the_probe_kills_mutants(mutant: Mutant, word: str) -> None:
    problem = probe(mutant, "cpu")
    assert problem is not None
    assert word in problem
    assert "mutant" in problem
