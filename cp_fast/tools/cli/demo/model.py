"""The little of a model that attention needs: bytes become q, k, v through fixed random weights and RoPE.

legend   t = tokens, e = width of the embedding, h = heads, d = head dim
"""

from __future__ import annotations

import torch

from cp_fast.tools.cli.demo.job import Job

__all__ = ["Model", "random_grad"]

_WIDTH = 128  # e


class Model:
    """The same weights on every rank, by the seed alone."""

    def __init__(self, job: Job, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(job.seed)  # on the CPU, so that every device has the same numbers
        h, g, d = job.heads_q, job.heads_kv, job.head_dim
        self.job, self.device, self.dtype = job, device, job.torch_dtype
        self.embedding = self._weights(draw, 256, _WIDTH)
        self.w_q, self.w_k, self.w_v = (self._weights(draw, _WIDTH, n * d) * _WIDTH**-0.5 for n in (h, g, g))
        self.frequencies = 10_000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64, device=device) / d)  # [d/2]

    def _weights(self, draw: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(self.device)

    def qkv(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids [t] (-1: padding) and their positions [t] to q [t, h_q, d], k and v [t, h_kv, d].

        Padding becomes NaN on purpose: nothing of it may reach a result.
        """
        x = self.embedding[ids.clamp(min=0)]  # [t, e]
        x[ids < 0] = float("nan")
        q, k, v = ((x @ w).unflatten(-1, (-1, self.job.head_dim)) for w in (self.w_q, self.w_k, self.w_v))
        return self._rotated(q, positions), self._rotated(k, positions), v.to(self.dtype)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE: dims n and n + d/2 are turned together by the angle positions * frequencies[n]."""
        angles = positions.double()[:, None, None] * self.frequencies  # [t, 1, d/2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(self.dtype)


def random_grad(job: Job) -> torch.Tensor:
    """A gradient of the whole output [t, h_q, d], NaN in the padding, the same on every rank."""
    draw = torch.Generator().manual_seed(job.seed + 1)
    ids = job.token_ids()
    dout = torch.randn(len(ids), job.heads_q, job.head_dim, generator=draw)
    dout[ids < 0] = float("nan")
    return dout.to(job.torch_dtype)
