"""The demonstration's check: every result against the oracle, document by document, and the padding against zero."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import cp_fast
from cp_fast.tools.cli.demo import Job
from cp_fast.tools.cli.demo import Measured
from cp_ref.schedules.problem import Sequence

__all__ = ["checks"]

_RESULTS = ("out", "lse", "dq", "dk", "dv")


def checks(job: Job, measured: Measured) -> list[tuple[str, tuple[str, ...], bool]]:
    """(what is checked, its errors and bounds in words, whether it is right)."""
    got, ids = dict(measured.tensors), job.token_ids()
    if job.spoil in _RESULTS:
        got[job.spoil] = got[job.spoil].clone()
        got[job.spoil].view(-1)[0] += 0.125
    wrong = {
        "token ids": [got["ids"] != ids],
        "RoPE positions": [got["positions"] != torch.cat([torch.arange(n) for n in job.slots])],
        "padding is 0": [(x.exp() if n == "lse" else x)[ids < 0] != 0 for n, x in got.items() if n in _RESULTS],
        "free of NaN": [got[name].isnan() for name in _RESULTS],
    }  # the padding's inputs are NaN, and reach no result
    rows = [
        (row.name, tuple(f"{x:.2e}" for x in (row.max_error, row.max_bound, row.mean_error, row.mean_bound)), row.ok)
        for row in _errors(job, measured, got)
    ]
    for name, parts in wrong.items():
        count = sum(int(part.sum()) for part in parts)
        words = f"{count:,} wrong" if count else "none wrong", f"of {sum(x.numel() for x in parts):,}", "", ""
        rows.append((name, words, not count))
    return rows


def _errors(job: Job, measured: Measured, got: dict[str, torch.Tensor]) -> list[Any]:
    """The rows of `conformance.compare`: each result's error against `dense_attention` in float64, and its bound, which
    comes from plain attention in the same dtype on the same inputs.
    """
    from conformance import compare, eager_attention

    problem, group = measured.problem, measured.problem.group_size
    alone = replace(problem, cp_size=1, cp_comm_type="p2p", a2a_size=1, layout="contiguous")
    alone = replace(alone, heads_q=group, heads_kv=1)
    masks: dict[str, Any] = {"attn_mask_type": problem.attn_mask_type, "window_size": problem.window_size}
    own, exact, baseline = (defaultdict[str, list[torch.Tensor]](list) for _ in range(3))
    for start, document in zip(problem.starts_q, problem.sequences, strict=False):
        # One document alone, without padding; then kv head by kv head, to save memory.
        n = document.len_q
        of_document = replace(alone, sequences=(Sequence(n, n, n, n),))
        lengths: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, n])}
        rows = {name: x[start : start + n].to(job.where[1]) for name, x in got.items() if x.ndim > 1}
        for head in range(problem.heads_kv):
            one = {name: x.unflatten(1, (problem.heads_kv, -1))[:, head] for name, x in rows.items()}
            one["lse"] = one["lse"].t()
            wide = {name: x.double() for name, x in one.items()}
            found = (
                one,
                _both(wide, partial(cp_fast.dense_attention, **lengths, **masks)),
                _both(one, partial(eager_attention, problem=of_document)),
            )
            for part, results in zip((own, exact, baseline), found, strict=True):
                for name in _RESULTS:
                    part[name].append(results[name].flatten(0, 1))
    own, exact, baseline = ({name: torch.cat(xs) for name, xs in part.items()} for part in (own, exact, baseline))
    return list(compare(own, exact, baseline, job.torch_dtype))


def _both(given: dict[str, torch.Tensor], attend: Callable[..., tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    """The results of both passes on q, k, v and dout."""
    leaves = [given[name].detach().requires_grad_() for name in "qkv"]
    out, lse, _ = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, given["dout"].to(out.dtype))
    return dict(zip(_RESULTS, (out.detach(), lse.detach(), *grads), strict=True))
