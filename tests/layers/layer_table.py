"""The public functions of layers as one table: what each takes and gives, on one batch of three documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

import cp_fast
import cp_ref
from cp_ref.batches.tensors import lse_from_packed, lse_to_packed, to_format, to_packed

__all__ = [
    "BATCH",
    "COMMS",
    "CU",
    "DOCUMENTS",
    "LAYERS",
    "PACKAGES",
    "PADDED",
    "ROWS",
    "SIZES",
    "Layer",
    "Tensors",
    "context",
    "local",
    "made",
    "whole",
]

PACKAGES = {"cp_ref": cp_ref, "cp_fast": cp_fast}
CU, PADDED, ROWS = torch.tensor([0, 7, 7, 16]), torch.tensor([0, 8, 10, 20]), 20
DOCUMENTS = {0: (0, 7), 2: (10, 19)}  # number: rows of its tokens
BATCH: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": CU, "cu_seqlens_q_padded": PADDED}
SIZES: dict[str, Any] = {"heads_q": 8, "heads_kv": 2, "d_qk": 6, "d_v": 4, "device": "cpu", "linear": True}
COMMS = ("p2p", "all_gather", "a2a", "a2a+p2p")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """One function, or one kind of it.

    Attributes:
        rows: its tensors that have a row for each token, with their other sizes.
        call: of it, in a module, with all tensors and `cp`, `plan` and options. Its results.
        results: of each result with a row for each token: what padding has, and its dtype under autocast to bfloat16.
        constant: the tensors that have no gradient.
        alike: the tensors that all ranks have, with their sizes; states have a document in each row.
        cast: the tensors that autocast casts.
        other: an option that makes it another kind of call.
        agreements: how often the ranks agree on a planned call of a new kind.
        comms: the schedules that it takes.
    """

    rows: Mapping[str, tuple[int, ...]]
    call: Callable[..., tuple[torch.Tensor, ...]]
    results: tuple[tuple[float, torch.dtype], ...]
    constant: tuple[str, ...] = ()
    alike: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cast: tuple[str, ...] = ()
    other: Mapping[str, Any] = field(default_factory=dict)
    agreements: int = 1
    comms: tuple[str, ...] = COMMS

    @property
    def differentiable(self) -> list[str]:
        """The tensors with a gradient."""
        return [name for name in (*self.rows, *self.alike) if name not in self.constant]

    @property
    def has_states(self) -> bool:
        """Whether the last result has a state for each document."""
        return "initial_state" in self.alike

    def inputs(self, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Tensors:
        """The global tensors, the same ones every time."""
        draw = torch.Generator().manual_seed(1)
        found: Tensors = {}
        for name, size in (*self.rows.items(), *self.alike.items()):
            lead = () if name in self.alike else (ROWS,)
            x = torch.randn(*lead, *size, generator=draw, dtype=torch.float64)
            found[name] = (_VALUES.get(name, torch.Tensor.double)(x)[: None if name in self.alike else rows]).to(dtype)
        if "indices" in found:
            found["indices"] = torch.arange(3, dtype=torch.int32).repeat(rows, 1)
        return found


# what makes values of those that are drawn
_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "g": lambda x: -x.abs(),
    "beta": torch.sigmoid,
    "A": torch.abs,  # g is below zero, and A * g
    "k": partial(torch.nn.functional.normalize, dim=-1),
}


# ---- calls: lse has a row for each token here


def _attention(module: Any, q: Any, k: Any, v: Any, *, cp: Any, plan: Any, **how: Any) -> tuple[torch.Tensor, ...]:
    out, lse, *_ = module.attention(q, k, v, cp=cp, plan=plan, return_lse=True, **how)
    return out, _by_row(lse, plan)


def _linear(module: Any, *, kind: str, **given: Any) -> tuple[torch.Tensor, ...]:
    return module.linear_attention(**given, kind=kind, output_final_state=True)


def _convolution(module: Any, **given: Any) -> tuple[torch.Tensor, ...]:
    return (module.causal_conv1d(**given),)


def _selection(module: Any, *, top_k: int = 3, **given: Any) -> tuple[torch.Tensor, ...]:
    return (module.select_keys(**given, top_k=top_k),)


def _sparse(module: Any, *, plan: Any, **given: Any) -> tuple[torch.Tensor, ...]:
    out, lse = module.sparse_attention(**given, plan=plan, return_lse=True)
    return out, _by_row(lse, plan)


def _compressed(
    module: Any, *, values: Any, gates: Any, cp: Any, plan: Any, rate: int = 3, **given: Any
) -> tuple[torch.Tensor, ...]:
    how: dict[str, Any] = {"cp": cp, "plan": plan, "rate": rate}
    of_keys, of_values = module.compress_keys(values, gates, **how).to(given["q"].dtype).split([12, 8], -1)
    entries = {"k_entries": of_keys.unflatten(-1, (2, 6)), "v_entries": of_values.unflatten(-1, (2, 4))}
    out, lse = module.compressed_attention(**given, **entries, **how, return_lse=True)
    return out, _by_row(lse, plan)


def _index_loss(module: Any, *, lse: Any, plan: Any, **given: Any) -> tuple[torch.Tensor, ...]:
    fmt, batch = plan.problem.qkv_format, len(plan.problem.sequences)
    return (module.index_loss(**given, lse=lse_from_packed(to_packed(lse, fmt), fmt, batch), plan=plan),)


def _by_row(lse: torch.Tensor, plan: Any) -> torch.Tensor:
    fmt = plan.problem.qkv_format
    return to_format(lse_to_packed(lse, fmt), fmt, len(plan.problem.sequences))


# ---- the table

_LOW, _WIDE, _NONE = torch.bfloat16, torch.float32, float("-inf")
_QKV = {"q": (8, 6), "k": (2, 6), "v": (2, 4)}
_INDEXER = {"q_index": (3, 5), "k_index": (5,), "weights": (3,)}
_MAMBA2 = {"q": (1, 4), "k": (1, 4), "v": (2, 3), "g": (2,)}
_STATE = {"initial_state": (3, 2, 4, 3)}
_CHOSEN = ("all_gather", "a2a")


def _kind(
    name: str, rows: Mapping[str, tuple[int, ...]], alike: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> Layer:
    call, other = partial(_linear, kind=name), {"scale": 2.0}
    return Layer(rows, call, ((0.0, _LOW),), alike={**_STATE, **alike}, cast=("q", "k", "v"), other=other)


LAYERS: dict[str, Layer] = {
    "attention": Layer(
        _QKV, _attention, ((0.0, _LOW), (_NONE, _WIDE)), cast=("q", "k", "v"), other={"return_max_logit": True},
        agreements=0,
    ),
    "gated_delta_rule": _kind("gated_delta_rule", _MAMBA2 | {"beta": (2,)}),
    "kda": _kind("kda", _MAMBA2 | {"g": (2, 4), "beta": (2,)}),
    "mamba2": _kind("mamba2", _MAMBA2),
    "mamba": _kind("mamba", _MAMBA2 | {"g": (2, 3)}, {"A": (2, 4, 3)}),
    "causal_conv1d": Layer(
        {"x": (6,)}, _convolution, ((0.0, _LOW),), alike={"weight": (6, 4), "bias": (6,)}, cast=("x",),
        other={"activation": "silu"},
    ),
    "select_keys": Layer(
        _INDEXER, _selection, ((-1, torch.int32),), tuple(_INDEXER), other={"top_k": 4}, comms=_CHOSEN
    ),
    "sparse_attention": Layer(
        _QKV | {"indices": (3,)}, _sparse, ((0.0, _LOW), (_NONE, _WIDE)), ("indices",), cast=("q", "k", "v"),
        other={"softmax_scale": 0.5}, comms=_CHOSEN,
    ),
    "compressed_attention": Layer(
        _QKV | {"values": (20,), "gates": (20,)}, _compressed, ((0.0, _LOW), (_NONE, _WIDE)), cast=("q", "k", "v"),
        other={"rate": 2}, agreements=2, comms=_CHOSEN,
    ),
    "index_loss": Layer(
        _INDEXER | {"lse": (8,), "q": (8, 6), "k": (2, 6), "indices": (3,)}, _index_loss, ((0.0, _WIDE),),
        ("lse", "q", "k", "indices"), cast=("q", "k"), other={"scale": 0.5}, comms=_CHOSEN,
    ),
}  # fmt: skip


# ---- slices of it


def context(package: str, member: Any, comm: str = "all_gather", layout: str = "dual_chunk") -> tuple[Any, Any]:
    """A package, and its context of a group."""
    module = PACKAGES[package]
    return module, module.ContextParallel(member, comm, layout=layout)


def made(
    package: str, member: Any, comm: str = "all_gather", layout: str = "dual_chunk", **more: Any
) -> tuple[Any, Any, Any]:
    """A package, its context of a group, and its plan of the batch."""
    module, cp = context(package, member, comm, layout)
    return module, cp, module.make_plan(cp=cp, **(BATCH | SIZES | {"dtype": torch.float32} | more))


def local(module: Any, layer: Layer, given: Tensors, cp: Any, plan: Any) -> Tensors:
    """This rank's part of global tensors: leaves, where they have gradients."""
    found = {n: x.clone() if n in layer.alike else module.shard(x, cp=cp, plan=plan) for n, x in given.items()}
    return {name: x.requires_grad_(name in layer.differentiable) for name, x in found.items()}


def whole(module: Any, layer: Layer, results: Tensors, cp: Any, plan: Any) -> Tensors:
    """The global tensors of all ranks' results, gradients and inputs: shares of what all ranks have are added up."""
    found: Tensors = {}
    for name, x in results.items():
        if name == "final_state":
            found[name] = x
        elif name in layer.alike:
            found[name] = torch.stack(cp.comm.all_gather_object(x)).sum(0)
        else:
            found[name] = module.unshard(x, cp=cp, plan=plan)
    return found
