"""The problems of `benchmarks/forward`: two ranks, packed sequences, 32 heads over 8, d 128, bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch

import cp_fast
from cp_fast import masks

__all__ = ["HEADS", "SCHEDULES", "Case", "cases_of"]

SCHEDULES = "p2p,all_gather,a2a"
HEADS: dict[str, int] = {"heads_q": 32, "heads_kv": 8, "d_qk": 128, "d_v": 128}
_BLOCK, _PROMPT, _ANSWER = 2048, 8192, 1024
_SIXTEEN = (1024, 512, 2048, 256, 4096, 1024, 512, 8192, 256, 2048, 512, 1024, 64, 2048, 4096, 5056)


@dataclass(frozen=True)
class Case:
    """Documents under a causal mask, or the mask that `areas` makes of the number of tokens."""

    name: str
    lengths: tuple[int, ...]
    layout: Literal["dual_chunk", "balanced"] = "dual_chunk"
    window: int = -1
    areas: Callable[[int], torch.Tensor] | None = None

    @property
    def tokens(self) -> int:
        """The tokens of all ranks."""
        return sum(self.lengths)

    @property
    def mask(self) -> dict[str, Any]:
        """The mask as arguments of `make_plan` and `attention`."""
        if self.areas is None:
            return {"attn_mask_type": "padding_causal", "window_size": (self.window, 0)}
        return {"areas": self.areas(self.tokens)}

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Cumulative lengths, int32."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)

    def plan(self, member: Any, schedule: Any, device: str) -> tuple[Any, cp_fast.Plan]:
        """A rank's context and plan."""
        cp = cp_fast.ContextParallel(member, schedule, layout=self.layout)
        sizes: dict[str, Any] = {**HEADS, "dtype": torch.bfloat16, "device": device}
        return cp, cp_fast.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=self.cu_seqlens, **self.mask, **sizes)


def cases_of(scale: int = 1) -> dict[str, Case]:
    """All problems by name, with lengths divided by `scale`."""

    def cut(*lengths: int) -> tuple[int, ...]:
        return tuple(n // scale for n in lengths)

    (block, prompt, answer), whole = cut(_BLOCK, _PROMPT, _ANSWER), cut(32768)
    found = (
        Case("dense", whole),
        Case("dense, 8,192 a GPU", cut(16384)),
        Case("dense, 4,096 a GPU", cut(8192)),
        Case("8:4:2:1:1", cut(16384, 8192, 4096, 2048, 2048), "balanced"),
        Case("sixteen documents", cut(*_SIXTEEN), "balanced"),
        Case("window 4,096", whole, window=4096 // scale),
        Case("window 4,096, balanced", whole, "balanced", window=4096 // scale),
        Case("block-causal", whole, areas=lambda n: masks.block_causal(n, block)),
        Case("block-causal, balanced", whole, "balanced", areas=lambda n: masks.block_causal(n, block)),
        Case("prefix-LM", whole, areas=lambda n: masks.prefix_lm(prompt, n)),
        Case("prefix-LM, balanced", whole, "balanced", areas=lambda n: masks.prefix_lm(prompt, n)),
        Case(
            "a prompt with answers",
            whole,
            "balanced",
            areas=lambda n: masks.shared_prefix(prompt, [answer] * ((n - prompt) // answer)),
        ),
    )
    return {one.name: one for one in found}
