"""Functions of scores, each with the tensors that it captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["FUNCTIONS", "SLOPES", "TABLE", "places", "refused"]

SLOPES = torch.linspace(-1, 1, 4)
TABLE = torch.sin(torch.arange(28.0)).reshape(4, 7)
KINDS = torch.arange(100) % 3
FLAGS = torch.arange(100) % 2 == 0

FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]] = {
    "arithmetic": (lambda s, b, h, i, j, d: -(s * 2 - 1) / 3 + (i - j) * 0.5 + b + 7, {}),
    "slopes": (lambda s, b, h, i, j, d, slopes: s - slopes[h] * (d - j).abs(), {"slopes": SLOPES}),
    "bfloat16": (lambda s, b, h, i, j, d, slopes: s + slopes[h], {"slopes": SLOPES.bfloat16()}),
    "halves": (lambda s, b, h, i, j, d, t: s * t[h].abs() - t[b].float() * 2, {"t": SLOPES.half()}),
    "waves": (lambda s, b, h, i, j, d: torch.cos(s).expand(s.shape) + torch.sin(s * (i - j)), {}),
    "table": (lambda s, b, h, i, j, d, t: s * t[h, (i - j).clamp(-3, 3) + 3], {"t": TABLE}),
    "first row": (lambda s, b, h, i, j, d, t: s * t[1][h] + t[-1, 2] + t[:, 3][h], {"t": TABLE}),
    "from the end": (lambda s, b, h, i, j, d, t: s + t[-1 - h, -1 - b], {"t": TABLE}),
    "kinds": (lambda s, b, h, i, j, d, k: torch.where(k[i] == k[j], s, -float("inf")), {"k": KINDS}),
    "flags": (lambda s, b, h, i, j, d, f: torch.where(f[i] & ~f[j] | (f[j] ^ f[i]), s, s / 2), {"f": FLAGS}),
    "one element": (lambda s, b, h, i, j, d, c, e: s * c + e, {"c": torch.tensor(0.5), "e": torch.tensor([2.0])}),
    "doubles": (lambda s, b, h, i, j, d, c: s * c, {"c": torch.tensor(0.3, dtype=torch.float64)}),
    "whole numbers": (lambda s, b, h, i, j, d: s + (i - j) // 3 + (i - j) % 5 + (i - j) % -4 + (j - i) // -7, {}),
    "bits": (lambda s, b, h, i, j, d, k: s + ((i ^ j) & 21).float() + (~(i | 8) ^ k[j] | h) * 0.5, {"k": KINDS}),
    "long": (lambda s, b, h, i, j, d, k: s + (k[i] * 1000 - j) // 7 % 11, {"k": KINDS}),
    "floats": (lambda s, b, h, i, j, d: s % 1.5 + i.float() % -2.5 + i.float() // 4, {}),
    "softcap": (lambda s, b, h, i, j, d: 30 * torch.tanh(s / 30), {}),
    "curves": (lambda s, b, h, i, j, d: torch.exp(-s.abs()) + torch.log(s * s + 1) + torch.sigmoid(s) * 2.0**s, {}),
    "roots": (lambda s, b, h, i, j, d: (s * s + 1).sqrt() + (s.square() + 1).rsqrt() + (s.abs() + 1) ** -0.5, {}),
    "powers": (lambda s, b, h, i, j, d: s**3 - s**2 + (s.abs() + 1) ** -2 + s**0 + s**1, {}),
    "limits": (lambda s, b, h, i, j, d: torch.maximum(s, -s / 2) + torch.minimum(s, s * s) + s.clamp(-1, 1), {}),
    "one limit": (lambda s, b, h, i, j, d: s.clamp(min=-0.5) + s.clamp(max=0.5) + s.relu(), {}),
    "logic": (lambda s, b, h, i, j, d: torch.where(torch.logical_not(i > j) & (h != 1) | (s > 1), s, s * 0.1), {}),
    "masked": (lambda s, b, h, i, j, d: s.masked_fill(i < j, -3.0) * (i >= j) + (i == j).float() * s, {}),
    "in place": (lambda s, b, h, i, j, d: s.mul_(2).add_(i), {}),
    "softplus": (
        lambda s, b, h, i, j, d: torch.nn.functional.softplus(s) + torch.log1p(s.abs()) + torch.expm1(-s * s),
        {},
    ),
    "logarithms": (
        lambda s, b, h, i, j, d: torch.log2(s.abs() + 1) - torch.log10(s.abs() + 2) + torch.exp2(-s.abs()),
        {},
    ),
    "constants": (lambda s, b, h, i, j, d: torch.where(i > j, torch.tensor(2.0), torch.ones_like(s)) * s, {}),
    "constant": (lambda s, b, h, i, j, d: torch.zeros_like(s) + i, {}),
    "alpha": (lambda s, b, h, i, j, d: torch.sub(torch.add(s, i, alpha=2), j, alpha=0.5), {}),
    "sign": (lambda s, b, h, i, j, d: s * torch.sign(s) + torch.sign(i - j), {}),
    "unchanged": (lambda s, b, h, i, j, d: s, {}),
}


def refused() -> dict[str, tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor], str]]:
    """Functions that cannot be compiled, and a word of the error."""
    table: Any = {"t": TABLE}
    return {
        "a sum": (lambda s, b, h, i, j, d: s - s.sum(), {}, "aten.sum"),
        "a matrix product": (lambda s, b, h, i, j, d: s @ s.T @ s, {}, "aten.permute"),
        "erf": (lambda s, b, h, i, j, d: torch.erf(s), {}, "aten.erf"),
        "random": (lambda s, b, h, i, j, d: s + torch.rand_like(s), {}, "aten.rand"),
        "a branch": (lambda s, b, h, i, j, d: s if s.max() > 0 else -s, {}, "without values"),
        "a host read": (lambda s, b, h, i, j, d: s * float(s[0, 0]), {}, "without values"),
        "too few indices": (lambda s, b, h, i, j, d, t: s + t[h][..., 0], table, "fewer indices"),
        "no index": (lambda s, b, h, i, j, d, t: s + t[:2, :3], table, "aten.slice"),
        "a half's arithmetic": (
            lambda s, b, h, i, j, d, t: s + t[h] * 2,
            {"t": SLOPES.bfloat16()},
            "torch.bfloat16",
        ),
        "a double's arithmetic": (lambda s, b, h, i, j, d, t: s + t[h], {"t": SLOPES.double()}, "torch.float64"),
        "a tensor of its own": (lambda s, b, h, i, j, d: s + torch.arange(3.0)[h], {}, "aten"),
        "a large power": (lambda s, b, h, i, j, d: s**9, {}, "the power 9"),
        "a power of tensors": (lambda s, b, h, i, j, d: s.abs() ** s, {}, "power"),
        "moved elements": (lambda s, b, h, i, j, d: s.flip(0), {}, "aten.flip"),
    }


def places(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Random b, h, q_idx, kv_idx, diagonal: int32 [count]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, most, (count,), generator=generator).int() for most in (2, 4, 60, 60, 60)]
