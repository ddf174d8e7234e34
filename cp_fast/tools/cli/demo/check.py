"""The demonstration's check: every result against the oracle, document by document, and the padding against zero."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cp_fast.tools.cli.demo.job import Job
from cp_ref.spec import Problem, Sequence

__all__ = ["RESULTS", "Exact", "check_exact", "check_results", "spoiled"]

RESULTS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True)
class Exact:
    """A condition that must hold to the last bit."""

    name: str
    wrong: int
    of: int


def check_exact(job: Job, got: dict[str, torch.Tensor]) -> list[Exact]:
    """Check that tokens and positions came back unchanged, and that the padding, with NaN inputs, reached no result."""
    ids = job.token_ids()
    real = ids >= 0
    positions = torch.cat([torch.arange(n) for n in job.slots])
    padding = {name: got[name][~real] for name in ("out", "dq", "dk", "dv")}
    padding["lse"] = got["lse"][:, ~real].exp()  # -inf in padding.
    return [
        Exact("token ids", int((got["ids"] != ids).sum()), len(ids)),
        Exact("RoPE positions", int((got["positions"] != positions).sum()), len(ids)),
        Exact("padding is 0", sum(int((x != 0).sum()) for x in padding.values()), _count(padding)),
        Exact("free of NaN", sum(int(got[name].isnan().sum()) for name in RESULTS), _count(got, RESULTS)),
    ]


def spoiled(job: Job, got: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results, with one value changed a little if a test requests it: the check must find it."""
    if job.spoil not in RESULTS:
        return got
    wrong = got[job.spoil].clone()
    wrong[(0,) * wrong.ndim] += 0.125
    return got | {job.spoil: wrong}


def check_results(
    job: Job, got: dict[str, torch.Tensor], device: torch.device, on_document: Callable[[int], None]
) -> list[Any]:
    """The rows of `conformance.judge.budgets.compare`: each result's error and its bound.

    The inputs are those of the ranks. The baseline is plain attention in the same dtype. `on_document` gets each
    document's length when it is done.
    """
    from conformance.judge.budgets import compare, eager_attention
    from conformance.judge.reference import dense_attention

    parts: dict[str, dict[str, list[torch.Tensor]]] = {
        name: defaultdict(list) for name in ("fast", "exact", "yardstick")
    }
    for start, length in zip(job.cu_seqlens_padded.tolist(), job.lengths, strict=False):
        rows = slice(start, start + length)
        one = {name: got[name][rows].to(device) for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv")}
        one["lse"] = got["lse"][:, rows].transpose(0, 1).to(device)
        for name in RESULTS:
            parts["fast"][name].append(one[name])
        problem = _one_head_group(job, length)
        mask = {"attn_mask_type": problem.attn_mask_type, "window_size": problem.window_size}
        wide = {name: x.double() for name, x in one.items()}  # A leaf's gradient has the leaf's dtype.
        for name, x in _attend(job, wide, partial(dense_attention, qkv_format="bshd", **mask)).items():
            parts["exact"][name].append(x)
        for name, x in _attend(job, one, partial(eager_attention, problem=problem)).items():
            parts["yardstick"][name].append(x)
        on_document(length)
    joined = {whose: {name: torch.cat(xs) for name, xs in tensors.items()} for whose, tensors in parts.items()}
    return list(compare(joined["fast"], joined["exact"], joined["yardstick"], job.torch_dtype))


def _one_head_group(job: Job, length: int) -> Problem:
    """One document and one kv head as a separate problem. Alone it has no padding, so it needs no padding mask."""
    return Problem(
        cp_size=1,
        sequences=(Sequence(length, length, length, length),),
        layout="contiguous",
        attn_mask_type=job.attn_mask_type.removeprefix("padding_").replace("padding", "no_mask"),
        window_size=job.window_size,
        heads_q=job.heads_q // job.heads_kv,
        d_qk=job.head_dim,
        d_v=job.head_dim,
        dtype=job.dtype,
    )


def _attend(job: Job, one: dict[str, torch.Tensor], attend: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """One document through a dense attention and its autograd, kv head by kv head to save memory.

    Returns:
        out, dq, dk, dv [n, h, d] and lse [n, h].
    """
    group = job.heads_q // job.heads_kv
    heads: dict[str, list[torch.Tensor]] = defaultdict(list)
    for head in range(job.heads_kv):
        rows, column = slice(head * group, (head + 1) * group), slice(head, head + 1)
        q = one["q"][None, :, rows].detach().requires_grad_()
        k, v = (one[name][None, :, column].detach().requires_grad_() for name in ("k", "v"))
        out, lse, _ = attend(q, k, v)
        (out * one["dout"][None, :, rows].to(out.dtype)).sum().backward()
        heads["out"].append(out[0].detach())
        heads["lse"].append(lse[0].detach().transpose(0, 1))
        for name, x in (("dq", q), ("dk", k), ("dv", v)):
            assert x.grad is not None
            heads[name].append(x.grad[0])
    return {name: torch.cat(xs, dim=1) for name, xs in heads.items()}


def _count(tensors: dict[str, torch.Tensor], names: tuple[str, ...] | None = None) -> int:
    return sum(x.numel() for name, x in tensors.items() if names is None or name in names)
