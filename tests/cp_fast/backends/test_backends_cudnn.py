"""What the cudnn backend hands to its library, without a GPU: a stand-in with the library's semantics."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cp_fast.kernels.attention import cudnn as cudnn
from cp_fast.kernels.attention.backend_probe import probe
from cp_fast.kernels.attention.backend_protocol import BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature

CPU = by_name("cpu")
CUDNN = cudnn.CudnnBackend()


class Descriptor:
    """A tensor of a graph."""

    def __init__(self, **given: Any) -> None:
        self.uid: Any = given.get("uid")
        self.dim: Any = given.get("dim")
        self.stride: Any = given.get("stride")
        self.data_type: Any = given.get("data_type")
        self.ragged_offset: Any = given.get("ragged_offset")
        self.is_output = False

    def set_output(self, value: bool) -> Descriptor:
        self.is_output = value
        return self

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def keep(value: Any) -> Descriptor:
            setattr(self, name.removeprefix("set_"), value)
            return self

        return keep


class FakeGraph:
    """cudnn.pygraph on the cpu backend, segment by segment: ragged offsets in elements, bounds as cuDNN counts them."""

    built: int = 0

    def __init__(self, **given: Any) -> None:
        self.io_data_type = given["io_data_type"]
        self.barred: list[str] = []

    def tensor(self, **given: Any) -> Descriptor:
        return Descriptor(**given)

    def sdpa(self, **given: Any) -> tuple[Descriptor, Descriptor]:
        self.given, self.made = given, (Descriptor(), Descriptor())
        assert given["generate_stats"]
        return self.made

    def sdpa_backward(self, **given: Any) -> tuple[Descriptor, ...]:
        self.given, self.made = given, (Descriptor(), Descriptor(), Descriptor())
        return self.made

    def deselect_engines(self, names: list[str]) -> None:
        self.barred += names

    def build_plans(self) -> None:
        assert self.barred
        assert all(x.is_output for x in self.made)
        FakeGraph.built += 1

    def get_workspace_size(self) -> int:
        return 0

    def validate(self) -> None: ...
    def build_operation_graph(self) -> None: ...
    def check_support(self) -> None: ...
    def create_execution_plans(self, modes: list[str]) -> None: ...

    def execute(self, buffers: list[torch.Tensor], workspace: Any, *, handle: Any, tensor_uids: list[int]) -> None:
        self.buffers = dict(zip(tensor_uids, buffers, strict=True))
        g, forward = self.given, "stats" not in self.given
        used_q = used_kv = 0
        for s in range(g["q"].dim[0]):
            lq, lk = (int(self.buffers[g[name].uid][s]) for name in ("seq_len_q", "seq_len_kv"))
            used_q, used_kv = used_q + lq, used_kv + lk
            if lq == 0 or lk == 0:
                assert lq == lk == 0
                continue
            q, k, v = (self.rows(g[name], s, length) for name, length in (("q", lq), ("k", lk), ("v", lk)))
            segments = self.segment(lq, lk)
            scale = g["attn_scale"]
            if forward:
                part = CPU.forward(q, k, v, segments, LaunchOptions(ScoreSpec(scale)))
                for made, x in zip(self.made, (part.out, part.lse.T[:, :, None]), strict=True):
                    self.rows(made, s, lq).copy_(x)
                continue
            out, dout, stats = (self.rows(g[name], s, lq) for name in ("o", "dO", "stats"))
            args = BackwardOperands(dout, q, k, v, out, stats[:, :, 0].T, None)
            gradients = CPU.backward([args], segments, LaunchOptions(ScoreSpec(scale)))
            for made, x, length in zip(self.made, gradients, (lq, lk, lk), strict=True):
                self.rows(made, s, length).copy_(x)
        assert forward or (used_q <= g["max_total_seq_len_q"] and used_kv <= g["max_total_seq_len_kv"])

    def segment(self, lq: int, lk: int) -> VarlenBatch:
        g = self.given
        left, right, shift = g["diagonal_band_left_bound"], g["diagonal_band_right_bound"], lk - lq
        assert left is None or left > 0, "Left bound should be greater than zero when set."
        assert right is None or right >= 0
        left = None if left is None else left - 1
        if g["diagonal_alignment"] == "top left":
            left, right = None if left is None else left + shift, None if right is None else right - shift
        return VarlenBatch.pack([lq], [lk], left, right)

    def rows(self, tensor: Descriptor, s: int, length: int) -> torch.Tensor:
        """A segment of a packed tensor [rows, heads, d], as the graph finds it."""
        _, heads, longest, d = tensor.dim
        assert length <= longest
        assert d in (1, 256) or d % 16 == 0
        start = int(self.buffers[tensor.ragged_offset.uid][s])
        strides = (tensor.stride[2], tensor.stride[1], tensor.stride[3])
        buffer = self.buffers[tensor.uid]
        assert self.buffers[tensor.ragged_offset.uid].dtype == torch.int64
        assert str(buffer.dtype) == tensor.data_type or buffer.dtype == torch.float64
        return torch.as_strided(buffer, (length, heads, d), strides, buffer.storage_offset() + start)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in in the library's place, and no graph kept from before or for later."""
    types = ("HALF float16", "BFLOAT16 bfloat16", "FLOAT float32", "INT32 int32", "INT64 int64")
    fake = SimpleNamespace(
        pygraph=FakeGraph,
        data_type=SimpleNamespace(**{name: f"torch.{dtype}" for name, dtype in map(str.split, types)}),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="top left", BOTTOM_RIGHT="bottom right"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
    )
    monkeypatch.setattr(cudnn, "library", lambda: fake)
    monkeypatch.setattr(cudnn, "_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    for graphs in (cudnn.forward_graph, cudnn.backward_graph):
        graphs.cache_clear()
    yield
    for graphs in (cudnn.forward_graph, cudnn.backward_graph):
        graphs.cache_clear()


def inputs(segments: VarlenBatch, h_q: int, d_qk: int, d_v: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, dout in float32, one kv head."""
    g = torch.Generator().manual_seed(1)
    n, m = segments.cu_q[-1], segments.cu_kv[-1]
    shapes = (n, h_q, d_qk), (m, 1, d_qk), (m, 1, d_v), (n, h_q, d_v)
    return tuple(torch.randn(shape, generator=g) for shape in shapes)


@pytest.mark.usefixtures("library")
def test_the_probe_finds_nothing() -> None:
    assert probe(CUDNN, "cpu") is None


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("h_q", "d_qk", "d_v"), [(1, 32, 32), (4, 192, 128), (2, 20, 13), (4, 256, 256)])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_kv", "left", "right"),
    [
        ([11, 3], [15, 3], 6, 0),  # two shifts: bottom right
        ([11, 3], [15, 7], 6, 0),  # one shift: top left
        ([11, 3], [15, 7], 2, 0),  # one shift, but the left side would be negative
        ([15], [11], None, 5),
        ([5, 6, 7, 8, 9, 10, 11, 12, 1], [5, 6, 7, 8, 9, 10, 11, 12, 1], None, 0),  # a surplus segment
        ([130], [200], None, None),
    ],
)
def test_every_band_and_head_dim(
    h_q: int, d_qk: int, d_v: int, lengths_q: list[int], lengths_kv: list[int], left: int | None, right: int | None
) -> None:
    segments = VarlenBatch.pack(lengths_q, lengths_kv, left, right)
    q, k, v, dout = inputs(segments, h_q, d_qk, d_v)
    want, got = (b.forward(q, k, v, segments, LaunchOptions(ScoreSpec(0.1))) for b in (CPU, CUDNN))
    torch.testing.assert_close((got.out, got.lse), (want.out, want.lse), rtol=1e-5, atol=1e-5)
    assert got.out.is_contiguous()
    assert got.lse.is_contiguous()
    for dlse in (None, torch.randn(h_q, q.shape[0])):
        args, options = BackwardOperands(dout, q, k, v, want.out, want.lse, dlse), LaunchOptions(ScoreSpec(0.1))
        right_ones, computed = (b.backward([args], segments, options) for b in (CPU, CUDNN))
        torch.testing.assert_close(computed, right_ones, rtol=1e-4, atol=1e-5)
        assert all(x.is_contiguous() for x in computed)


@pytest.mark.usefixtures("library")
def test_a_graph_serves_a_shape_class() -> None:
    def launch(segments: VarlenBatch) -> int:
        before = FakeGraph.built
        q, k, v, _ = inputs(segments, 2, 32, 32)
        CUDNN.forward(q, k, v, segments, LaunchOptions(ScoreSpec(0.1)))
        return FakeGraph.built - before

    def causal(*lengths: int) -> VarlenBatch:
        return VarlenBatch.pack(lengths, lengths, None, 0)

    assert launch(causal(100, 120, 90, 80)) == 1
    assert launch(causal(128, 70, 90, 100)) == 0
    assert launch(causal(129, 70, 90, 100)) == 1  # a longer class
    assert launch(VarlenBatch.pack([100, 120, 90, 80], [100, 120, 90, 80], None, None)) == 1  # another diagonal band


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ((9, 0), 91900, None),
        ((9, 0), 92600, None),
        ((9, 0), 91801, "it is checked with cuDNN 9.19 and later, and this is 9.18"),
        (
            (10, 0),
            91900,
            "it is checked on Hopper (compute capability 9.0) only, and this GPU has 10.0",
        ),
    ],
)
def test_where_it_works(
    capability: tuple[int, int], version: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(cudnn, "library", lambda: SimpleNamespace(backend_version=lambda: version))
    assert cudnn._why_not.__wrapped__() == reason


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "cudnn", None)
    cudnn.library.cache_clear()
    assert "pip install nvidia-cudnn-frontend" in str(cudnn._why_not.__wrapped__())


@pytest.mark.usefixtures("library")
def test_what_its_features_exclude_is_refused() -> None:
    assert not {Feature.SOFTCAP, Feature.DETERMINISTIC, Feature.HEAD_DIM_OVER_256} & CUDNN.features
    segments = VarlenBatch.pack([4], [4], None, 0)
    q, k, v, dout = inputs(segments, 1, 32, 32)
    options = LaunchOptions(ScoreSpec(1.0))
    args = BackwardOperands(dout, q, k, v, dout, torch.zeros(1, 4), None)
    with pytest.raises(ValueError, match="softcap"):
        CUDNN.forward(q, k, v, segments, LaunchOptions(ScoreSpec(1.0, softcap=2.0)))
    with pytest.raises(ValueError, match="softcap"):
        CUDNN.backward([args], segments, options._replace(scores=ScoreSpec(1.0, softcap=2.0)))
    with pytest.raises(ValueError, match="DETERMINISTIC"):
        CUDNN.backward([args], segments, options._replace(deterministic=True))
    wide = torch.zeros(4, 1, 260)
    with pytest.raises(ValueError, match="up to 256, got d_qk=272"):
        CUDNN.forward(wide, wide, v, segments, LaunchOptions(ScoreSpec(1.0)))
    for left, right in ((-1, None), (None, -2)):
        with pytest.raises(ValueError, match="crop the tile"):
            CUDNN.forward(q, k, v, VarlenBatch.pack([4], [9], left, right), LaunchOptions(ScoreSpec(1.0)))
