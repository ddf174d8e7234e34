"""Backend "cudnn": cuDNN's fused attention, through nvidia-cudnn-frontend's graphs.

Facts about cuDNN 9.19 with front end 1.32 on Hopper that this file rests on:

- A packed batch is "ragged": a tensor is declared as [segments, heads, longest, d] and finds a segment by its offset in
  elements. Offsets are int64, so that rows * heads * d may pass 2**31.
- A graph is a shape class, and building one takes far longer than running it. So the number of segments, the longest
  segment and the rows of a launch are rounded up before they enter it: surplus segments have no rows, and lengths are
  read on the device.
- The left bound counts the diagonal: bound = left + 1, j > i - bound. The right bound is j <= i + right. With bottom-
  right alignment and a padding mask both count from each segment's own corner. None means unbounded. No bound may be
  negative: tiles must be cropped.
- With bottom-right alignment the backward computes every block of the rectangle, hidden or not (a causal square takes
  twice the time). So a diagonal band is expressed from the top-left corner if that is equivalent in all segments. The
  host's lengths decide this.
- The lse ("stats") is natural and float32, written and read here as [n, h_q]; as [h_q, n] its strides, and so the
  graph, would contain the number of rows.
- The backward forms delta from dout and out itself, and has no gradient through lse: a second launch adds it
  (`with_lse_gradient`). Its accumulators are sized by the rows of the launch only for head dims that are multiples of
  16.
- In GQA the backward rounds each query head's share of dk and dv before they are summed, in a buffer of h_q heads.
- Its deterministic mode on Hopper keeps all of dP, quadratic in the lengths: it is not used, and not declared.
- It has no softcap together with a mask, so that is not declared.
- The front end also ranks its own kernels, which are not cuDNN's, so they are excluded by name.
- A handle belongs to one thread and one device, and carries the stream.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache, lru_cache, partial
from threading import Lock, local
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from cp_fast.kernels.attention.backend_protocol import (
    FUSED_KERNELS,
    Backend,
    BackwardOperands,
    Gradients,
    LaunchOptions,
    Partial,
    check_scores,
)
from cp_fast.kernels.attention.kernel_operands import copied_if_unaligned, round_up, trim, widen, with_lse_gradient
from cp_fast.kernels.attention.varlen_batch import Cumulative, VarlenBatch
from cp_fast.kernels.this_gpu import NotInstalled, hopper_why_not
from cp_ref.schedules.words import Feature

__all__ = [
    "CornerBand",
    "CudnnBackend",
    "Id",
    "ShapeClass",
    "backward_graph",
    "forward_graph",
    "library",
    "run",
    "shape_class_of",
]

# ---- shapes and strides
#
# Shape classes of cuDNN's graphs: the numbers built into a graph, rounded up so that few graphs are built.


class CornerBand(NamedTuple):
    """Which columns a row sees, from one corner of every segment: i - left <= j <= i + right."""

    top_left: bool
    left: int | None
    right: int | None


class ShapeClass(NamedTuple):
    """A shape class: every number that is built into a graph."""

    dtype: torch.dtype
    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    segments: int
    max_q: int
    max_kv: int
    rows_q: int
    rows_kv: int
    band: CornerBand
    scale: float


def _class_of(n: int, least: int) -> int:
    """n rounded up by at most a quarter, so that few different numbers come out.

    >>> [_class_of(n, 128) for n in (1, 129, 1000, 1025, 65536, 65537)]
    [128, 256, 1024, 1280, 65536, 81920]
    """
    return round_up(n, max(least, 1 << max(n.bit_length() - 3, 0)))


def shape_class_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: VarlenBatch, scale: float
) -> ShapeClass:
    """The shape class of a launch."""
    if max(q.shape[2], v.shape[2]) > 256:
        raise ValueError(f"backend 'cudnn' needs head dims up to 256, got d_qk={q.shape[2]} and d_v={v.shape[2]}")
    return ShapeClass(
        q.dtype,
        q.shape[1],
        k.shape[1],
        q.shape[2],
        v.shape[2],
        _class_of(len(segments.cu_q) - 1, 1),
        _class_of(segments.max_q, 128),
        _class_of(segments.max_kv, 128),
        _class_of(q.shape[0], 128),
        _class_of(k.shape[0], 128),
        _band(segments),
        scale,
    )


def _band(segments: VarlenBatch) -> CornerBand:
    """The segments' diagonal band from the top-left corner, if that is one diagonal band with no negative side, else
    unchanged.

    >>> _band(VarlenBatch.pack([4, 6], [9, 11], 7, 0)), _band(VarlenBatch.pack([4, 6], [4, 9], None, 0))
    (CornerBand(top_left=True, left=2, right=5), CornerBand(top_left=False, left=None, right=0))
    """
    left, right = segments.left, segments.right
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(f"backend 'cudnn' takes window sides of None or >= 0, got ({left}, {right}): crop the tile")
    if left is None and right is None:
        return CornerBand(True, None, None)
    shifts = np.diff(_array(segments.cu_kv)) - np.diff(_array(segments.cu_q))
    shift = int(shifts[0])
    if (shifts != shift).any():
        return CornerBand(False, left, right)
    from_top = CornerBand(True, None if left is None else left - shift, None if right is None else right + shift)
    fits = all(side is None or side >= 0 for side in from_top[1:])
    return from_top if fits else CornerBand(False, left, right)


def _array(cu: Sequence[int]) -> np.ndarray:
    """Cumulative lengths as the array that some are."""
    return cu.values if isinstance(cu, Cumulative) else np.array(cu)


# ---- graphs
#
# cuDNN graphs for packed segments: building, running. The facts are at the head of this file.


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


# ---- the kernel library


_STEP = 16  # of head dims


class CudnnBackend(Backend):
    """cuDNN on Hopper; float16 and bfloat16, head dims up to 256, not deterministic."""

    name: str = "cudnn"
    features: frozenset[Feature] = FUSED_KERNELS
    key_block = 128
    bits_of = ("out", "lse")  # Its backward pass is not deterministic.

    def why_not(self) -> str | None:
        """None where the library is installed and the GPU is a Hopper, else the reason."""
        return _why_not()

    @torch.no_grad()
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: VarlenBatch, options: LaunchOptions
    ) -> Partial:
        """See `Backend.forward`; out has q's dtype."""
        check_scores(self, options)
        d_v = v.shape[2]
        q, k, v = (_operand(x) for x in (q, k, v))
        out = q.new_empty(*q.shape[:2], v.shape[2])
        stats = q.new_empty(q.shape[:2], dtype=torch.float32)
        with torch.cuda.device(q.device):
            shape = shape_class_of(q, k, v, segments, options.scores.scale)._replace(
                rows_q=0, rows_kv=0
            )  # of no concern here
            tensors = {Id.Q: q, Id.K: k, Id.V: v, Id.OUT: out, Id.STATS: stats}
            run(forward_graph, shape, tensors, segments)
        return Partial(trim(out, d_v), stats.T.contiguous(), None)

    @torch.no_grad()
    def backward(self, given: list[BackwardOperands], segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """See `Backend.backward`; the gradients have q's dtype, float32 where dlse is given."""
        check_scores(self, options)
        if options.deterministic:
            raise ValueError("backend 'cudnn' has no deterministic backward: choose by Feature.DETERMINISTIC")
        operands = given.pop()
        d_qk, d_v = operands.q.shape[2], operands.v.shape[2]
        dout, q, k, v, out = map(_operand, operands[:5])
        aligned = BackwardOperands(dout, q, k, v, out, operands.lse, None)
        stats = operands.lse.T.contiguous()
        with torch.cuda.device(q.device):
            launch = partial(_gradients, stats=stats, segments=segments, scale=options.scores.scale)
            dq, dk, dv = with_lse_gradient(launch, aligned, operands.dlse, _STEP)
        return Gradients(trim(dq, d_qk), trim(dk, d_qk), trim(dv, d_v))


def _gradients(operands: BackwardOperands, stats: torch.Tensor, segments: VarlenBatch, scale: float) -> Gradients:
    """One backward launch on operands already in the library's form; stats [n, h_q] is their lse."""
    dout, q, k, v, out, *_ = operands
    made = Gradients(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    tensors = {Id.Q: q, Id.K: k, Id.V: v, Id.OUT: out, Id.STATS: stats, Id.DOUT: dout}
    tensors |= {Id.DQ: made.dq, Id.DK: made.dk, Id.DV: made.dv}
    run(backward_graph, shape_class_of(q, k, v, segments, scale), tensors, segments)
    return made


@cache
def _why_not() -> str | None:
    """The reason why the library does not run here, found once."""
    if (reason := hopper_why_not()) is not None:
        return reason
    try:
        version = library().backend_version()
    except Exception as error:  # a broken installation fails in many ways, and all of them mean "not here"
        return NotInstalled(
            f"importing cudnn (pip install nvidia-cudnn-frontend) failed: {type(error).__name__}: {error}"
        )
    if version < 91900:
        return f"it is checked with cuDNN 9.19 and later, and this is {version // 10000}.{version // 100 % 100}"
    return None


def _operand(x: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, d] contiguous and aligned, with zero columns up to a multiple of 16."""
    return copied_if_unaligned(widen(x, round_up(x.shape[2], _STEP)).contiguous())
