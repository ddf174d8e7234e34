"""Bugs in merging, scaling, softcap, sinks, and in the precision of what is added up."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from cp_ref.schedules.problem import ScoreOptions
from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]


def _base_2(merge: Any, *parts: torch.Tensor) -> Any:
    with mock.patch("torch.logaddexp", torch.logaddexp2):
        return merge(*parts)


def _without_a_maximum(merge: Any, *parts: torch.Tensor) -> Any:
    def naive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.exp() + b.exp()).log()

    with mock.patch("torch.logaddexp", naive):
        return merge(*parts)


def _without_rescaling(merge: Any, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    return out_a + out_b, merge(out_a, lse_a, out_b, lse_b)[1]


def _rounded_result(kind: str, number: int | None = None) -> Any:
    """What is added up is rounded to the inputs' dtype after every addition: all of it, or one of its tensors."""

    def add(original: Any, self: Any, what: str, rows: slice, heads: slice, *values: torch.Tensor) -> None:
        original(self, what, rows, heads, *values)
        if what == kind:
            for n, x in enumerate(self.tensors[what]):
                if number in (None, n):
                    x[rows, heads] = x[rows, heads].to(self.tensors["q"][0].dtype).to(x.dtype)

    return wrap(add)


def _bf16_lse(lse_from_packed: Any, lse: torch.Tensor, *rest: Any) -> torch.Tensor:
    return lse_from_packed(lse if lse.dtype == torch.float64 else lse.bfloat16().to(lse.dtype), *rest)


def _rounded_scores(scores: Any, q: torch.Tensor, k: torch.Tensor, *rest: Any) -> Any:
    """As plain PyTorch rounds them: lse, a float32 result, is then not one."""
    s, slope = scores(q, k, *rest)
    for dtype in (torch.bfloat16, torch.float16):
        if q.dtype == torch.float32 and q.numel() and torch.equal(q.to(dtype).float(), q):
            return s.to(dtype).float(), slope
    return s, slope


def _bf16_dq(run_backward: Any, problem: Any, *arguments: Any) -> Any:
    dq, dk, dv = run_backward(problem, *arguments)
    return (dq.bfloat16().to(dq.dtype) if problem.dtype == "float16" else dq), dk, dv


def _mask_before_softcap(tile: Any, *arguments: Any) -> Any:
    """tanh(-inf) is -1: hidden keys get the score -softcap."""
    options = next(x for x in arguments if isinstance(x, ScoreOptions))
    if options.softcap <= 0:
        return tile(*arguments)

    def masked(capped: torch.Tensor, visible: torch.Tensor, extra: Any) -> torch.Tensor:
        scores = capped if extra is None else extra.modified(capped)
        return scores.masked_fill(~visible[:, None, :], -options.softcap)

    with mock.patch("cp_ref.executor.tile_attention._masked", masked):
        return tile(*arguments)


def _softcap_without_dividing(capped: Any, q: Any, k: Any, options: ScoreOptions) -> Any:
    return capped(q, k, options._replace(scale=options.scale / max(options.softcap, 1.0)))


def _scale_of_v(tile: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
    def scaled(options: ScoreOptions) -> ScoreOptions:
        return options._replace(scale=v.shape[-1] ** -0.5) if options.scale == q.shape[-1] ** -0.5 else options

    return tile(q, k, v, *(scaled(x) if isinstance(x, ScoreOptions) else x for x in rest))


def _nan_for_nothing(run_forward: Any, *arguments: Any, **named: Any) -> Any:
    results = run_forward(*arguments, **named)
    return results._replace(out=results.out.masked_fill((results.lse == -torch.inf)[..., None], torch.nan))


_MERGE = "cp_ref.executor.rank_tensors.merge"
_ADD = "cp_ref.executor.rank_tensors.World.add"

MUTANTS: dict[str, Mutant] = {
    "lse-in-base-2": Mutant("LSEs are merged to the base 2", _MERGE, wrap(_base_2), "probes"),
    "merge-without-a-maximum": Mutant("exp(lse) overflows", _MERGE, wrap(_without_a_maximum), "special"),
    "empty-rows-are-nan": Mutant(
        "what sees nothing is NaN", "cp_ref.reference_attention.run_forward", wrap(_nan_for_nothing), "probes"
    ),
    "merge-without-rescaling": Mutant(
        "partial outputs are added as they are", _MERGE, wrap(_without_rescaling), "probes"
    ),
    "partial-outputs-in-bf16": Mutant(
        "partial outputs are merged in the inputs' dtype", _ADD, _rounded_result("out", 0), "budget"
    ),
    "dq-in-bf16": Mutant("dq is added up in the inputs' dtype", _ADD, _rounded_result("dq"), "known", where="rfa-42"),
    "dkv-in-bf16": Mutant(
        "dk and dv are added up in the inputs' dtype", _ADD, _rounded_result("dkv"), "known", where="rfa-42"
    ),
    "lse-in-bfloat16": Mutant(
        "lse is rounded", "cp_ref.reference_attention.lse_from_packed", wrap(_bf16_lse), "budget"
    ),
    "scores-in-bf16": Mutant(
        "scores are rounded before the softmax",
        "cp_ref.executor.tile_attention._capped",
        wrap(_rounded_scores),
        "budget",
    ),
    "dq-always-bf16": Mutant(
        "dq is bfloat16 for float16 inputs",
        "cp_ref.reference_attention.run_backward",
        wrap(_bf16_dq),
        "known",
        where="rfa-87",
    ),
    "mask-before-softcap": Mutant(
        "hidden keys get the score -softcap",
        "cp_ref.executor.play_schedule.tile_forward cp_ref.executor.play_schedule.tile_backward",
        wrap(_mask_before_softcap),
        "logic",
    ),
    "softcap-divides-twice": Mutant(
        "scores are divided by the softcap once more",
        "cp_ref.executor.tile_attention._capped",
        wrap(_softcap_without_dividing),
        "logic",
    ),
    "scale-of-d-v": Mutant(
        "the default scale is d_v ** -0.5",
        "cp_ref.executor.play_schedule.tile_forward cp_ref.executor.play_schedule.tile_backward",
        wrap(_scale_of_v),
        "logic",
    ),
    "sink-dropped": Mutant(
        "softmax_type is ignored", "cp_ref.reference_attention._sink", lambda _: lambda *a: None, "probes"
    ),
    "max-logit-of-one-rank": Mutant(
        "max_logit is not reduced",
        "cp_ref.reference_attention.all_reduce_max",
        lambda _: lambda group, x: x,
        "logic",
    ),
}
