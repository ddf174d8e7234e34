"""A call of every operator that `cp_fast` registers with torch.library, for `opcheck`."""

from __future__ import annotations

from typing import Any

import torch

import cp_fast.thd  # noqa: F401  # registers them

__all__ = ["operator_calls", "tensors"]

CU = [0, 8, 8, 12]
REAL = [0, 5, 5, 9]
LOCAL = [0, 4, 4, 6]  # cp_size 2, a tail of 2 rows behind them


def tensors(device: str, requires_grad: bool = False) -> dict[str, torch.Tensor]:
    """Operands: x, y global; the rest local."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    return {
        "cu": torch.tensor(CU, device=device),
        "real": torch.tensor(REAL, device=device),
        "local": torch.tensor(LOCAL, device=device),
        "held": torch.tensor([0, 3, 3, 5], device=device),
        "x": random(16, 2, 4).requires_grad_(requires_grad),
        "y": random(16, 3).requires_grad_(requires_grad),
        "kv": random(2, 8, 2, 4).requires_grad_(requires_grad),
        "out": random(8, 2, 4),
        "step": random(8, 2, 4).bfloat16(),
        "half_step": random(4, 2, 4).bfloat16(),
        "lse": random(2, 8),
        "lse_step": random(2, 8),
        "half_lse": random(2, 4),
        "padded_lse": random(3, 2, 5),
        "padded_half_lse": random(3, 2, 2),
        "ids": torch.arange(9, device=device),
        "rows": torch.tensor([6, 0, 3, 2], device=device),
    }


def operator_calls(device: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """(operator, arguments)."""
    t, ops = tensors(device, requires_grad=True), torch.ops.cp_attention
    return {
        "partition_indices": (ops.partition_indices.default, (t["cu"], 16, 2, 1)),
        "rank_lengths": (ops.rank_lengths.default, (t["real"], t["cu"], 2, 0, True, False)),
        "partition": (ops.partition.default, ([t["x"], t["y"]], t["cu"], 2, 1)),
        "reorder": (ops.reorder.default, ([t["x"], t["y"]], t["cu"], 2, True)),
        "reorder back": (ops.reorder.default, ([t["x"]], t["cu"], 2, False)),
        "read_half": (ops.read_half.default, ([t["x"], t["y"]], t["cu"], 1)),
        "read_half of kv": (ops.read_half.default, ([t["kv"]], t["local"], 0)),
        "read_second_half_lse": (ops.read_second_half_lse.default, (t["lse"], t["local"], True, 4)),
        "copy_valid_": (ops.copy_valid_.default, (t["out"], t["step"], t["local"], t["held"])),
        "pad_sequences": (ops.pad_sequences.default, (t["ids"], t["real"], t["cu"], 16, -100)),
        "lse_correction_": (ops.lse_correction_.default, (t["lse"], t["half_lse"], t["local"], True)),
        "out_correction_": (
            ops.out_correction_.default,
            (t["out"], t["half_step"], t["lse"], t["half_lse"], t["local"], True, True),
        ),
        "grad_correction_": (ops.grad_correction_.default, (t["out"], t["half_step"], t["local"], "none", "add")),
    }
