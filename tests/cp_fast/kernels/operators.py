"""Calls of every helper and kernel, for `torch.compile` and captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cp_fast import thd
from cp_fast.movers.mover_protocol import RowRule
from cp_fast.movers.select_movers import movers_for


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
    movers_for(out.device.type).merge_(out, lse, t["half_step"], t["half_lse"], t["rows"])
    return out, lse


def _put(t: dict[str, torch.Tensor]) -> torch.Tensor:
    out = t["out"].clone()
    movers_for(out.device.type).scatter_([out], [t["half_step"].float()], t["rows"])
    return out


def _add(t: dict[str, torch.Tensor]) -> torch.Tensor:
    out = t["out"].clone()
    movers_for(out.device.type).scatter_([out], [t["half_step"]], t["rows"], add=True)
    return out


def _back(t: dict[str, torch.Tensor]) -> torch.Tensor:
    out = t["out"].clone()
    use = movers_for(out.device.type)
    use.scatter_heads_([out], [t["half_step"].float()[None]], t["rows"], [0])
    use.scatter_heads_([out], [t["half_step"].float()[None, :, :1]], slice(0, 4), [1])
    return out


KERNELS: dict[str, Helper] = {  # what no helper is made of
    "take": lambda t: tuple(movers_for(t["x"].device.type).gather([t["x"], t["y"]], t["rows"])),
    "partition": lambda t: tuple(
        movers_for(t["x"].device.type).gather([t["x"], t["y"]], RowRule("partition", "slice", t["cu"], a=2, b=1))
    ),
    "heads to front": lambda t: tuple(
        movers_for(t["x"].device.type).gather_heads([t["out"]] * 2, t["rows"], [0, 1, 1, 1, 0, 0], [1, 1])
    ),
    "heads to back": _back,
    "put": _put,
    "add": _add,
    "merge": _merge,
}


def flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]
