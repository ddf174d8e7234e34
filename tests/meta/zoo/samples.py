"""Small implementations for the tests of the suite itself: right ones, wrong ones, and ones that end their process."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

import cp_ref
from cp_ref import thd
from cp_ref.reference.executor.merge_partials import merge as merge_two
from cp_ref.reference.executor.tile_attention import tile_backward, tile_forward, visible_pairs
from cp_ref.schedules.areas import UNBOUNDED
from cp_ref.schedules.problem import ScoreSpec


class Sick:
    """`cp_ref`, but where the softcap is used something happens."""

    def __getattr__(self, name: str) -> Any:
        return getattr(cp_ref, name)

    def attention(self, *tensors: torch.Tensor, cp: Any, softcap: float = 0.0, plan: Any = None, **rest: Any) -> Any:
        used = softcap or (plan.problem.softcap if plan is not None else 0.0)
        options = {"softcap": softcap} if plan is None else {"plan": plan}
        result = cp_ref.attention(*tensors, cp=cp, **options, **rest)
        return self.happen(cp, result) if used else result

    def happen(self, cp: Any, result: Any) -> Any:
        return result


class Exits(Sick):
    def happen(self, cp: Any, result: Any) -> Any:
        os._exit(3)


class Killed(Sick):
    def happen(self, cp: Any, result: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Segfaults(Sick):
    def happen(self, cp: Any, result: Any) -> Any:
        import ctypes

        return ctypes.string_at(0)


class Hangs(Sick):
    def happen(self, cp: Any, result: Any) -> Any:
        while cp.rank == cp.size - 1:
            time.sleep(0.01)
        return result


class HangsInC(Sick):
    """Holding the interpreter's lock, so that only another process can notice."""

    def happen(self, cp: Any, result: Any) -> Any:
        return sum(range(10**18))


class EatsMemory(Sick):
    def happen(self, cp: Any, result: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB")


class EatsHostMemory(Sick):
    def happen(self, cp: Any, result: Any) -> Any:
        return torch.empty(1 << 60)


class Wrong(Sick):
    def happen(self, cp: Any, result: Any) -> Any:
        return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result * 1.01


class OverProcesses:
    """`cp_ref` over torch.distributed."""

    group_kind = "process"

    def __getattr__(self, name: str) -> Any:
        return getattr(cp_ref, name)


class OneRankExits(OverProcesses):
    def attention(self, *tensors: torch.Tensor, cp: Any, **rest: Any) -> Any:
        if cp.rank == 1 and rest.get("softmax_type") == "off-by-one":
            os._exit(7)
        return cp_ref.attention(*tensors, cp=cp, **rest)


class OneRankHangs(OverProcesses):
    def attention(self, *tensors: torch.Tensor, cp: Any, **rest: Any) -> Any:
        while cp.rank == 1 and rest.get("softmax_type") == "off-by-one":
            time.sleep(0.01)
        return cp_ref.attention(*tensors, cp=cp, **rest)


class OneRankRaises(OverProcesses):
    def attention(self, *tensors: torch.Tensor, cp: Any, **rest: Any) -> Any:
        if cp.rank == 1:
            raise RuntimeError("not today")
        return cp_ref.attention(*tensors, cp=cp, **rest)


class _Gathered(torch.autograd.Function):
    """[b, s / n, h, d] of every rank -> [b, s, h, d]. (torch.distributed.nn's own is wrong for gradients that are not
    contiguous, as the suite found.)
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None


class AllGather:
    """What an engineer might bring: K and V gathered over the process group, bshd, causal or not."""

    group_kind = "process"
    bug = False

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cp: Any, qkv_format: str = "bshd",
        attn_mask_type: str = "causal", softmax_scale: float | None = None, **rest: Any,
    ) -> torch.Tensor:  # fmt: skip
        rest.pop("deterministic", None)
        plain = {"window_size": (-1, -1), "softcap": 0.0, "softmax_type": "vanilla", "softmax_offset": None}
        if qkv_format != "bshd" or cp.layout != "contiguous" or cp.cp_comm_type != "all_gather":
            raise NotImplementedError(f"{qkv_format}, {cp.layout}, {cp.cp_comm_type}")
        if attn_mask_type not in ("causal", "no_mask") or any(rest[name] != plain.get(name) for name in rest):
            raise NotImplementedError(f"{attn_mask_type}, {rest}")
        group, rank = cp.group, dist.get_rank(cp.group)
        k, v = (_Gathered.apply(x, group) for x in (k, v))
        rows = torch.arange(q.shape[1]) + rank * q.shape[1]
        hidden = torch.arange(k.shape[1])[None] > rows[:, None] + (1 if self.bug else 0)
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
        if attn_mask_type == "causal":
            empty = hidden.all(1)
            scores = scores.masked_fill(hidden & ~empty[:, None], -torch.inf)
            weights = scores.softmax(-1).masked_fill(hidden, 0.0)
        else:
            weights = scores.softmax(-1)
        return torch.einsum("bhnm,bmhd->bnhd", weights, v)


class AllGatherWithABug(AllGather):
    bug = True


class Lower:
    """The three lower levels, from the reference's parts."""

    thd = thd
    ContextParallel = cp_ref.ContextParallel  # which the reference's helpers ask for

    def merge(self, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = parts[0][0].to(parts[0][1].dtype), parts[0][1]
        for out_step, lse_step in parts[1:]:
            out, merged = merge_two(out, lse.t(), out_step.to(lse.dtype), lse_step.t())
            lse = merged.t()
        return out, lse

    def tile(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        if not len(q) or not len(k):
            return self._nothing(q, k, v)[:2]
        q_wide, k_wide, v_wide, visible, kept = self._operands(q, k, v, options)
        out, lse, _ = tile_forward(q_wide, k_wide, v_wide, visible, kept)
        return out.to(q.dtype), lse.t()

    def tile_backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        dout: torch.Tensor, **options: Any,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        if not len(q) or not len(k):
            return self._nothing(q, k, v)[2:]
        q_wide, k_wide, v_wide, visible, kept = self._operands(q, k, v, options)
        delta = (dout.to(q_wide.dtype) * out.to(q_wide.dtype)).sum(-1)
        dq, dk, dv = tile_backward(q_wide, k_wide, v_wide, dout.to(q_wide.dtype), lse.t(), delta, visible, kept)
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(q.dtype) for x in (dk, dv))
        return dq.to(q.dtype), dk, dv

    def _operands(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> Any:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        shift, (left, right) = len(k) - len(q), (options["left"], options["right"])
        lo, hi = -UNBOUNDED if left is None else shift - left, UNBOUNDED if right is None else shift + right
        visible = visible_pairs(slice(0, len(q)), slice(0, len(k)), lo, hi, q.device)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).to(wide) for x in (k, v))
        return q.to(wide), k, v, visible, ScoreSpec(options["scale"], options["softcap"])

    def _nothing(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros(len(q), q.shape[1], v.shape[2])
        lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=wide)
        return out, lse, torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
