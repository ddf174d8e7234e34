"""cuDNN graphs for packed segments: building, running. The facts are at the head of `cudnn`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache, lru_cache
from threading import Lock, local
from types import ModuleType
from typing import Any, NamedTuple

import torch

from cp_fast.backends.backend_protocol import VarlenBatch
from cp_fast.backends.cudnn.cudnn_shapes import ShapeClass

__all__ = ["Id", "backward_graph", "forward_graph", "library", "run"]

_build_lock = Lock()
_own = local()  # .handles: this thread's, by device
_NOT_CUDNN = ["sdpa_fwd_prefill", "sdpa_bwd_sm"]  # the front end's own kernels


class Id(IntEnum):
    """The tensors' numbers in a graph."""

    Q = 1
    K = 2
    V = 3
    OUT = 4
    STATS = 5
    DOUT = 6
    DQ = 7
    DK = 8
    DV = 9
    LENGTHS_Q = 10
    LENGTHS_KV = 11
    OFFSETS_Q = 12
    OFFSETS_K = 13
    OFFSETS_V = 14
    OFFSETS_OUT = 15
    OFFSETS_STATS = 16


class Graph(NamedTuple):
    """A built graph."""

    graph: Any  # cudnn.pygraph
    workspace: int  # bytes


@cache
def library() -> ModuleType:
    """The library, imported on first use: it loads cuDNN."""
    return importlib.import_module("cudnn")


def run(
    graph_of: Callable[[ShapeClass, int], Graph],
    shape: ShapeClass,
    tensors: dict[Id, torch.Tensor],
    segments: VarlenBatch,
) -> None:
    """Launch the graph of a shape class on the current stream."""
    handle, device = _handle(), tensors[Id.Q].device
    with _build_lock:
        built = graph_of(shape, device.index)
    buffers = tensors | _tables(segments, shape)
    workspace = torch.empty(max(built.workspace, 1), dtype=torch.uint8, device=device)
    built.graph.execute(list(buffers.values()), workspace, handle=handle, tensor_uids=[int(x) for x in buffers])


def _tables(segments: VarlenBatch, shape: ShapeClass) -> dict[Id, torch.Tensor]:
    """Lengths and offsets, from the device's own numbers. Surplus segments have no rows."""
    lengths_q, starts_q = _split(segments.device_cu_q, shape.segments)
    lengths_kv, starts_kv = _split(segments.device_cu_kv, shape.segments)
    of_q, of_k = starts_q * (shape.h_q * shape.d_qk), starts_kv * (shape.h_kv * shape.d_qk)
    equal = shape.d_qk == shape.d_v
    return {
        Id.LENGTHS_Q: lengths_q,
        Id.LENGTHS_KV: lengths_kv,
        Id.OFFSETS_Q: of_q,
        Id.OFFSETS_K: of_k,
        Id.OFFSETS_V: of_k if equal else starts_kv * (shape.h_kv * shape.d_v),
        Id.OFFSETS_OUT: of_q if equal else starts_q * (shape.h_q * shape.d_v),
        Id.OFFSETS_STATS: starts_q * shape.h_q,
    }


def _split(cu: torch.Tensor, segments: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(lengths int32 [segments], starts int64 [segments + 1]) of cu int32 [up to segments + 1].

    >>> _split(torch.tensor([0, 2, 5], dtype=torch.int32), 3)
    (tensor([2, 3, 0], dtype=torch.int32), tensor([0, 2, 5, 5]))
    """
    surplus = segments + 1 - cu.shape[0]
    whole = torch.cat([cu, cu[-1:].expand(surplus)]) if surplus else cu
    return whole[1:] - whole[:-1], whole.long()


def _handle() -> Any:
    """This thread's handle on the current device, set to the current stream."""
    handles: dict[int, Any] = _own.__dict__.setdefault("handles", {})
    device = torch.cuda.current_device()
    if device not in handles:
        handles[device] = library().create_handle()
    library().set_stream(handle=handles[device], stream=torch.cuda.current_stream().cuda_stream)
    return handles[device]


@lru_cache(maxsize=1024)
def forward_graph(shape: ShapeClass, device: int) -> Graph:
    """Build the forward of a shape class on the current device, which is `device`."""
    graph = _Builder(shape)
    q, k, v = graph.operands()
    out, stats = graph.graph.sdpa(q=q, k=k, v=v, generate_stats=True, name="forward", **graph.options())
    graph.output(out, Id.OUT, shape.h_q, shape.max_q, shape.d_v, Id.OFFSETS_OUT)
    graph.output(stats, Id.STATS, shape.h_q, shape.max_q, 1, Id.OFFSETS_STATS, torch.float32)
    return graph.build()


@lru_cache(maxsize=1024)
def backward_graph(shape: ShapeClass, device: int) -> Graph:
    """Build the backward of a shape class on the current device, which is `device`."""
    graph = _Builder(shape)
    q, k, v = graph.operands()
    out, dout = (graph.packed(x, shape.h_q, shape.max_q, shape.d_v, Id.OFFSETS_OUT) for x in (Id.OUT, Id.DOUT))
    stats = graph.packed(Id.STATS, shape.h_q, shape.max_q, 1, Id.OFFSETS_STATS, torch.float32)
    dq, dk, dv = graph.graph.sdpa_backward(
        q=q,
        k=k,
        v=v,
        o=out,
        dO=dout,
        stats=stats,
        max_total_seq_len_q=shape.rows_q,
        max_total_seq_len_kv=shape.rows_kv,
        name="backward",
        **graph.options(),
    )
    graph.output(dq, Id.DQ, shape.h_q, shape.max_q, shape.d_qk, Id.OFFSETS_Q)
    graph.output(dk, Id.DK, shape.h_kv, shape.max_kv, shape.d_qk, Id.OFFSETS_K)
    graph.output(dv, Id.DV, shape.h_kv, shape.max_kv, shape.d_v, Id.OFFSETS_V)
    return graph.build()


class _Builder:
    """A graph in the making."""

    def __init__(self, shape: ShapeClass) -> None:
        """Start a graph of the shape class."""
        self.shape = shape
        self.cudnn = library()
        types = self.cudnn.data_type
        self.types = {
            torch.float16: types.HALF,
            torch.bfloat16: types.BFLOAT16,
            torch.float32: types.FLOAT,
            torch.int32: types.INT32,
            torch.int64: types.INT64,
        }
        self.graph = self.cudnn.pygraph(
            handle=_handle(),
            io_data_type=self.types[shape.dtype],
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
        )
        self.tables: dict[Id, Any] = {}

    def table(self, name: Id, rows: int, dtype: torch.dtype) -> Any:
        """A table [rows] on the device, the same for all tensors that ask for it."""
        if name not in self.tables:
            self.tables[name] = self.graph.tensor(
                dim=[rows, 1, 1, 1], stride=[1, 1, 1, 1], data_type=self.types[dtype], uid=int(name), name=name.name
            )
        return self.tables[name]

    def offsets(self, name: Id) -> Any:
        """Where each segment starts, in elements."""
        return self.table(name, self.shape.segments + 1, torch.int64)

    def packed(self, name: Id, heads: int, longest: int, d: int, offsets: Id, dtype: torch.dtype | None = None) -> Any:
        """An input [rows, heads, d] of packed segments."""
        return self.graph.tensor(
            dim=[self.shape.segments, heads, longest, d],
            stride=_strides(heads, longest, d),
            data_type=self.types[dtype or self.shape.dtype],
            ragged_offset=self.offsets(offsets),
            uid=int(name),
            name=name.name,
        )

    def operands(self) -> tuple[Any, Any, Any]:
        """q, k and v."""
        s = self.shape
        return (
            self.packed(Id.Q, s.h_q, s.max_q, s.d_qk, Id.OFFSETS_Q),
            self.packed(Id.K, s.h_kv, s.max_kv, s.d_qk, Id.OFFSETS_K),
            self.packed(Id.V, s.h_kv, s.max_kv, s.d_v, Id.OFFSETS_V),
        )

    def options(self) -> dict[str, Any]:
        """The options of both forward and backward: the scale, the lengths, the diagonal band."""
        s, corner = self.shape, self.cudnn.diagonal_alignment
        return {
            "attn_scale": s.scale,
            "use_padding_mask": True,
            "seq_len_q": self.table(Id.LENGTHS_Q, s.segments, torch.int32),
            "seq_len_kv": self.table(Id.LENGTHS_KV, s.segments, torch.int32),
            "diagonal_alignment": corner.TOP_LEFT if s.band.top_left else corner.BOTTOM_RIGHT,
            "diagonal_band_left_bound": None if s.band.left is None else s.band.left + 1,
            "diagonal_band_right_bound": s.band.right,
        }

    def output(
        self, tensor: Any, name: Id, heads: int, longest: int, d: int, offsets: Id, dtype: torch.dtype | None = None
    ) -> None:
        """Declare a node's result as an output [rows, heads, d] of packed segments."""
        tensor.set_output(True).set_uid(int(name)).set_dim([self.shape.segments, heads, longest, d])
        tensor.set_stride(_strides(heads, longest, d)).set_data_type(self.types[dtype or self.shape.dtype])
        tensor.set_ragged_offset(self.offsets(offsets))

    def build(self) -> Graph:
        """Compile: some tenths of a second."""
        modes = self.cudnn.heur_mode
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.deselect_engines(_NOT_CUDNN)
        self.graph.create_execution_plans([modes.A, modes.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        return Graph(self.graph, self.graph.get_workspace_size())


def _strides(heads: int, longest: int, d: int) -> Sequence[int]:
    """Of [segments, heads, longest, d] in [rows, heads, d]; the first is never used, offsets take its place."""
    return [longest * heads * d, d, heads * d, 1]
