"""The demonstration's check: every result against the oracle, document by document, and the padding against zero."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from cp_fast.tools.cli.demo.job import Job
from cp_ref.common.cli.options import window
from cp_ref.spec import Problem, Sequence

__all__ = ["check_exact", "check_results"]

_RESULTS = ("out", "lse", "dq", "dk", "dv")
Tensors = dict[str, torch.Tensor]


def check_exact(job: Job, got: Tensors) -> list[tuple[str, int, int]]:
    """(condition, how many values break it, of how many): tokens and positions came back unchanged, and the padding,
    with NaN inputs, reached no result.
    """
    ids = job.token_ids()
    positions = torch.cat([torch.arange(n) for n in job.slots])
    padding = [got[name][ids < 0] for name in ("out", "dq", "dk", "dv")] + [got["lse"][:, ids < 0].exp()]
    return [
        ("token ids", int((got["ids"] != ids).sum()), len(ids)),
        ("RoPE positions", int((got["positions"] != positions).sum()), len(ids)),
        ("padding is 0", sum(int((x != 0).sum()) for x in padding), sum(x.numel() for x in padding)),
        ("free of NaN", sum(int(got[n].isnan().sum()) for n in _RESULTS), sum(got[n].numel() for n in _RESULTS)),
    ]


def check_results(job: Job, got: Tensors) -> list[Any]:
    """The rows of `conformance.judge.budgets.compare`: each result's error and its bound, document by document.

    The inputs are those of the ranks. The baseline is plain attention in the same dtype.
    """
    from conformance.judge.baseline import eager_attention
    from conformance.judge.budgets import compare
    from conformance.judge.reference import dense_attention

    got = got | {"lse": got["lse"].transpose(0, 1)}
    if job.spoil in _RESULTS:
        got = got | {job.spoil: got[job.spoil].clone()}
        got[job.spoil][(0,) * got[job.spoil].ndim] += 0.125
    parts: list[dict[str, list[torch.Tensor]]] = [defaultdict(list) for _ in range(3)]  # got, exact, baseline
    window_size, mask = window(job.window), job.mask.removeprefix("padding_").replace("padding", "no_mask")
    heads, dtype = job.heads // job.heads_kv, str(job.torch_dtype).removeprefix("torch.")
    any_length = Problem(1, (), layout="contiguous", attn_mask_type=mask, window_size=window_size, heads_q=heads)
    any_length = replace(any_length, d_qk=job.head_dim, d_v=job.head_dim, dtype=dtype)
    for start, length in zip(accumulate(job.slots, initial=0), job.lengths, strict=False):
        # One document alone, without padding; then kv head by kv head, to save memory.
        problem = replace(any_length, sequences=(Sequence(length, length, length, length),))
        exactly = partial(dense_attention, qkv_format="bshd", attn_mask_type=mask, window_size=window_size)
        one = {name: x[start : start + length].to(job.where[1]) for name, x in got.items()}
        wide = {name: x.double() for name, x in one.items()}  # a leaf's gradient has the leaf's dtype
        for head in range(job.heads_kv):
            baseline = _attend(job, one, head, partial(eager_attention, problem=problem))
            found = [one[name].unflatten(1, (job.heads_kv, -1))[:, head] for name in _RESULTS]
            for part, results in zip(parts, (found, _attend(job, wide, head, exactly), baseline), strict=True):
                for name, x in zip(_RESULTS, results, strict=True):
                    part[name].append(x.flatten(0, 1))
    own, exact, baseline = ({name: torch.cat(xs) for name, xs in part.items()} for part in parts)
    return list(compare(own, exact, baseline, job.torch_dtype))


def _attend(job: Job, one: Tensors, head: int, attend: Callable[..., Any]) -> list[torch.Tensor]:
    """One document and kv head through a dense attention and its autograd: out, lse, dq, dk, dv."""
    cut = {name: one[name].unflatten(1, (job.heads_kv, -1))[None, :, head] for name in ("q", "k", "v", "dout")}
    inputs = [cut[name].detach().requires_grad_() for name in ("q", "k", "v")]
    out, lse, _ = attend(*inputs)
    grads = torch.autograd.grad(out, inputs, cut["dout"].to(out.dtype))
    return [x.detach() for x in (out[0], lse[0].transpose(0, 1), *(g[0] for g in grads))]
