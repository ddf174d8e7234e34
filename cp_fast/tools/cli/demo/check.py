"""The demonstration's check: every result against the oracle, document by document, and the padding against zero."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch

from cp_fast.tools.cli.demo.job import Job
from cp_fast.tools.cli.demo.ranks import Measured
from cp_ref.spec import Sequence

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
    """The rows of `compare`: each result's error and its bound. The baseline is plain attention in the same dtype, on
    the inputs of the ranks.
    """
    from conformance.case import Case
    from conformance.judge.budgets import compare
    from conformance.judge.reference import exact_results
    from conformance.run.case_tensors import GlobalTensors
    from conformance.tiers.budget import eager_results

    problem, group = measured.problem, measured.problem.group_size
    alone = replace(problem, cp_size=1, cp_comm_type="p2p", a2a_size=1, layout="contiguous")
    alone = replace(alone, heads_q=group, heads_kv=1)
    own, exact, baseline = (defaultdict[str, list[torch.Tensor]](list) for _ in range(3))
    for start, document in zip(problem.starts_q, problem.sequences, strict=False):
        # One document alone, without padding; then kv head by kv head, to save memory.
        n = document.len_q
        case, real = Case(replace(alone, sequences=(Sequence(n, n, n, n),))), torch.ones(n, dtype=torch.bool)
        rows = {name: x[start : start + n].to(job.where[1]) for name, x in got.items() if x.ndim > 1}
        for head in range(problem.heads_kv):
            one = {name: x.unflatten(1, (problem.heads_kv, -1))[:, head] for name, x in rows.items()}
            one["lse"] = one["lse"].t()
            tensors = GlobalTensors(one["q"], one["k"], one["v"], one["dout"], one["lse"], None, real, real)
            found = one, exact_results(case, tensors), eager_results(case, tensors)
            for part, results in zip((own, exact, baseline), found, strict=True):
                for name in _RESULTS:
                    part[name].append(results[name].flatten(0, 1))
    own, exact, baseline = ({name: torch.cat(xs) for name, xs in part.items()} for part in (own, exact, baseline))
    return list(compare(own, exact, baseline, job.torch_dtype))
