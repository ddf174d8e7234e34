"""Calls of every registered operator, for `opcheck`, and of every helper, for `torch.compile` and captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cp_fast import thd
from cp_fast.kernels import kernels

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


def other_values(t: dict[str, torch.Tensor]) -> None:
    """Other numbers, lengths and rows into the same memory."""
    integers = {
        "cu": [0, 4, 8, 16],
        "real": [0, 3, 7, 9],
        "local": [0, 2, 4, 8],
        "held": [0, 1, 3, 5],
        "rows": [1, 7, 5, 0],
    }
    for name, values in integers.items():
        t[name].copy_(torch.tensor(values))
    for x in t.values():
        if x.is_floating_point():
            x.copy_(x.flip(0))


Helper = Callable[[dict[str, torch.Tensor]], Any]


def in_place(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Helper:
    """The helper's effect as a result."""

    def call(t: dict[str, torch.Tensor]) -> torch.Tensor:
        t = t | {name: t[name].clone()}
        change(t)
        return t[name]

    return call


HELPERS: dict[str, Helper] = {
    "indices": lambda t: thd.thd_get_partitioned_indices(t["cu"], 16, 2, 1),
    "real": lambda t: thd.get_cu_seqlens_on_cp_rank(t["real"], t["cu"], 2, 1, True, True),
    "rank order": lambda t: thd.thd_sequence_order_to_cp_rank_order((t["x"], t["y"]), t["cu"], 2),
    "sequence order": lambda t: thd.thd_cp_rank_order_to_sequence_order(t["x"], t["cu"], 2),
    "half": lambda t: thd.thd_read_half_tensor((t["x"], t["y"]), t["cu"], 1),
    "half of kv": lambda t: thd.thd_read_half_tensor(t["kv"], t["local"], 0),
    "half lse": lambda t: thd.thd_read_second_half_lse(t["lse"], t["local"], True, 4),
    "half padded lse": lambda t: thd.thd_read_second_half_lse(t["padded_lse"], t["local"], False, 2),
    "copy": in_place(
        "out",
        lambda t: thd.thd_copy_valid_tokens_from_per_split_to_rank_local(t["out"], t["step"], t["local"], t["held"]),
    ),
    "lse": in_place("lse", lambda t: thd.thd_second_half_lse_correction(t["lse"], t["half_lse"], t["local"], True)),
    "padded lse": in_place(
        "padded_lse",
        lambda t: thd.thd_second_half_lse_correction(t["padded_lse"], t["padded_half_lse"], t["local"], False),
    ),
    "out": in_place(
        "out",
        lambda t: thd.thd_out_correction(t["out"], t["step"], t["lse"], t["lse_step"], t["local"], False, True),
    ),
    "half out": in_place(
        "out",
        lambda t: thd.thd_out_correction(
            t["out"], t["half_step"], t["padded_lse"], t["padded_half_lse"], t["local"], True, False
        ),
    ),
    "grad": in_place("out", lambda t: thd.thd_grad_correction(t["out"], t["step"], t["local"], "add", "copy")),
    "half grad": in_place(
        "out", lambda t: thd.thd_grad_correction(t["out"], t["half_step"], t["local"], "none", "add")
    ),
    "pad": lambda t: thd.pad_thd_sequences_for_cp(t["ids"], t["ids"], t["real"], 4, padded_tokens=20),
}


def _merge(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    out, lse = t["out"].clone(), t["lse"].clone()
    kernels(out.device.type).merge_(out, lse, t["half_step"], t["half_lse"], t["rows"])
    return out, lse


def _merge_halves(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    out, lse = t["out"].clone(), t["lse"].clone()
    kernels(out.device.type).merge_halves_(out, lse, t["half_step"], t["half_lse"], t["local"], True)
    return out, lse


def _put(t: dict[str, torch.Tensor]) -> torch.Tensor:
    out = t["out"].clone()
    kernels(out.device.type).put_rows_([out], [t["half_step"].float()], t["rows"])
    return out


def _add(t: dict[str, torch.Tensor]) -> torch.Tensor:
    out = t["out"].clone()
    kernels(out.device.type).add_rows_([out], [t["half_step"]], t["rows"])
    return out


def _back(t: dict[str, torch.Tensor]) -> torch.Tensor:
    out = t["out"].clone()
    use = kernels(out.device.type)
    use.heads_to_back_(out, t["half_step"][None], t["rows"], [0], True)
    use.heads_to_back_(out, t["half_step"].float()[None, :, :1], slice(0, 4), [1], False)
    return out


KERNELS: dict[str, Helper] = {  # what no helper is made of
    "take": lambda t: tuple(kernels(t["x"].device.type).take_rows([t["x"], t["y"]], t["rows"])),
    "partition": lambda t: tuple(kernels(t["x"].device.type).partition([t["x"], t["y"]], t["cu"], 2, 1)),
    "heads to front": lambda t: kernels(t["x"].device.type).heads_to_front(t["out"], t["rows"], [0, 1, 1], 1),
    "heads to back": _back,
    "put": _put,
    "add": _add,
    "merge": _merge,
    "merge halves": _merge_halves,
}


def flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]
