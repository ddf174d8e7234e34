"""The blockwise backend against a dense float64 computation, and the registry of backends."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from cp_fast.kernels.attention import choose_backend as backends
from cp_fast.kernels.attention.backend_probe import probe
from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, Gradients, LaunchOptions, Partial
from cp_fast.kernels.attention.blockwise import BlockwiseBackend
from cp_fast.kernels.attention.largest_logit import LargestLogit, largest_logit
from cp_fast.kernels.attention.score_blocks import ScoreBlockSize, score_blocks_on_device
from cp_fast.kernels.attention.varlen_batch import Cumulative, VarlenBatch
from cp_fast.kernels.this_gpu import NotInstalled
from cp_fast.log import log_once
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature, Unsupported
from tests.cp_fast.backends.placed import both_ways
from tests.marks import examples, seeds

CPU = backends.by_name("cpu")
TINY = BlockwiseBackend("tiny blocks", Feature.CPU, ScoreBlockSize(scores=256, columns=7, rows=10))
F64 = torch.float64


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: VarlenBatch, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, max_logit) in float64 by the definition in `VarlenBatch`, differentiable."""
    group = q.shape[1] // k.shape[1]
    outs, lses, logits = [], [], []
    for (q0, q1), (kv0, kv1) in zip(pairwise(segments.cu_q), pairwise(segments.cu_kv), strict=True):
        ks, vs = (x[kv0:kv1].repeat_interleave(group, 1) for x in (k, v))
        s = torch.einsum("ihd,jhd->hij", q[q0:q1], ks) * scale
        s = softcap * torch.tanh(s / softcap) if softcap > 0 else s
        lq, lk = q1 - q0, kv1 - kv0
        i, j = torch.arange(lq)[:, None] + lk - lq, torch.arange(lk)[None, :]
        seen = torch.ones(lq, lk, dtype=torch.bool)
        seen = seen if segments.left is None else seen & (j >= i - segments.left)
        seen = seen if segments.right is None else seen & (j <= i + segments.right)
        some = seen.any(1)[:, None]
        s = s.masked_fill(~seen, -torch.inf)
        logits.append(s.detach().amax((1, 2)))
        s = torch.where(some, s, 0)  # rows that see nothing: no NaN in either direction
        outs.append(torch.where(some[:, :, None], torch.einsum("hij,jhd->ihd", s.softmax(-1), vs), 0))
        lses.append(torch.where(some[:, 0], s.logsumexp(-1), -torch.inf))
    return torch.cat(outs), torch.cat(lses, 1), torch.stack(logits).amax(0)


def random_case(seed: int) -> tuple[VarlenBatch, tuple[int, int, int, int]]:
    """Segments and (h_q, h_kv, d_qk, d_v)."""
    r, longest = random.Random(seed), 40
    lengths_q = [r.choice([1, r.randint(1, longest)]) for _ in range(r.randint(1, 4))]
    lengths_kv = [r.choice([1, n, r.randint(1, longest)]) for n in lengths_q]
    left = r.choice([None, 0, r.randint(1, longest), -r.randint(1, 4)])
    right = r.choice([None, 0, r.randint(1, longest), -r.randint(1, 4)])
    h_kv = r.choice([1, 2, 3])
    dims = r.choice([(8, 8), (12, 5), (5, 12), (1, 1)])
    return VarlenBatch.pack(lengths_q, lengths_kv, left, right), (h_kv * r.choice([1, 2, 4]), h_kv, *dims)


def tensors(
    seed: int, segments: VarlenBatch, heads: tuple[int, int, int, int], dtype: torch.dtype = F64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v, dout of the dtype, and dlse in the compute dtype, for (h_q, h_kv, d_qk, d_v)."""
    h_q, h_kv, d_qk, d_v = heads
    g = torch.Generator().manual_seed(seed)
    n, m = segments.cu_q[-1], segments.cu_kv[-1]
    q, k, v, dout = (
        torch.randn(rows, h, d, generator=g, dtype=F64).to(dtype)
        for rows, h, d in ((n, h_q, d_qk), (m, h_kv, d_qk), (m, h_kv, d_v), (n, h_q, d_v))
    )
    return 2 * q, k, v, dout, torch.randn(h_q, n, generator=g, dtype=F64).to(F64 if dtype == F64 else torch.float32)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    segments: VarlenBatch,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Gradients]:
    """out, lse, max_logit and the gradients, all in float64."""
    q, k, v = leaves = tuple(x.detach().to(F64).requires_grad_() for x in (q, k, v))
    out, lse, max_logit = dense(q, k, v, segments, scale, softcap)
    loss = (out * dout.to(F64)).sum()
    if dlse is not None:
        loss = loss + (lse * dlse.to(F64)).masked_fill(lse == -torch.inf, 0).sum()
    return out.detach(), lse.detach(), max_logit, Gradients(*torch.autograd.grad(loss, leaves))


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Equal within the tolerance, relative to the largest finite value expected; infinities where they belong."""
    finite = expected.abs()[expected.isfinite()]
    size = max(1.0, float(finite.max()) if finite.numel() else 1.0)
    torch.testing.assert_close(got.to(F64), expected, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("backend", [CPU, TINY], ids=lambda b: b.name)
@pytest.mark.parametrize("seed", seeds(60))
def test_blocks_equal_dense_in_float64(seed: int, backend: Backend) -> None:
    segments, heads = random_case(seed)
    softcap, scale = (0.0, 0.7) if seed % 3 else (1.5, 0.3)
    q, k, v, dout, dlse = tensors(seed, segments, heads)
    given = dlse if seed % 2 else None
    out, lse, max_logit, gradients = reference(q, k, v, dout, given, segments, scale, softcap)
    got = backend.forward(q, k, v, segments, LaunchOptions(ScoreSpec(scale, softcap=softcap)))
    assert got.max_logit is not None
    for a, b in ((got.out, out), (got.lse, lse), (got.max_logit, max_logit)):
        close(a, b, 1e-10)
    computed = backend.backward(
        [BackwardOperands(dout, q, k, v, got.out, got.lse, given)],
        segments,
        LaunchOptions(ScoreSpec(scale, softcap=softcap)),
    )
    for a, b in zip(computed, gradients, strict=True):
        assert a.is_contiguous()
        close(a, b, 1e-10)


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 0.0), (torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)]
)
def test_cpu_computes_in_float32(dtype: torch.dtype, rounding: float) -> None:
    segments = VarlenBatch.pack([300, 1, 65], [520, 3, 64], 200, 30)
    q, k, v, dout, dlse = tensors(1, segments, (4, 2, 24, 16), dtype)
    out, lse, max_logit, gradients = reference(q, k, v, dout, dlse, segments, 0.2, 0.0)
    got = CPU.forward(q, k, v, segments, LaunchOptions(ScoreSpec(0.2)))
    assert got.max_logit is not None
    assert {got.out.dtype, got.lse.dtype, got.max_logit.dtype} == {torch.float32}
    for a, b in ((got.out, out), (got.lse, lse), (got.max_logit, max_logit)):
        close(a, b, 3e-6)
    computed = CPU.backward(
        [BackwardOperands(dout, q, k, v, got.out.to(dtype), got.lse, dlse)],
        segments,
        LaunchOptions(ScoreSpec(0.2), deterministic=True),
    )
    for a, b in zip(computed, gradients, strict=True):  # out was rounded, and with it delta
        close(a, b, 1e-5 + 2 * rounding)


def test_a_launch_over_part_of_the_columns_adds_up() -> None:
    """The backward takes the whole problem's out and lse: two launches over half of the columns each give the whole."""
    segments = VarlenBatch.pack([50], [80], None, None)
    q, k, v, dout, dlse = tensors(2, segments, (2, 1, 8, 8))
    out, lse, _, gradients = reference(q, k, v, dout, dlse, segments, 0.5, 0.0)
    parts, total = [], torch.zeros_like(lse)
    for a, b in ((0, 30), (30, 80)):
        half = VarlenBatch.pack([50], [b - a], None, None)
        part = CPU.forward(q, k[a:b], v[a:b], half, LaunchOptions(ScoreSpec(0.5)))
        total += part.lse.exp()
        parts.append(
            CPU.backward(
                [BackwardOperands(dout, q, k[a:b], v[a:b], out, lse, dlse)], half, LaunchOptions(ScoreSpec(0.5))
            )
        )
    close(total.log(), lse, 1e-10)
    close(parts[0].dq + parts[1].dq, gradients.dq, 1e-10)
    close(torch.cat([p.dk for p in parts]), gradients.dk, 1e-10)
    close(torch.cat([p.dv for p in parts]), gradients.dv, 1e-10)


@pytest.mark.parametrize("size", [ScoreBlockSize(2**18, 256, 512), TINY.size], ids=["one block", "tiny blocks"])
@pytest.mark.parametrize("seed", seeds(12))
def test_a_library_without_max_logit_is_given_it(seed: int, size: ScoreBlockSize) -> None:
    segments, heads = random_case(seed)
    scale, softcap = (0.7, -0.7)[seed % 2], (0.0, 1.5)[seed // 2 % 2]
    q, k, v, dout, _ = tensors(seed, segments, heads, torch.float32)
    want = CPU.forward(q, k, v, segments, LaunchOptions(ScoreSpec(scale, softcap=softcap)))
    found = largest_logit(q, k, segments, LaunchOptions(ScoreSpec(scale, softcap)), size=size)
    torch.testing.assert_close(found, want.max_logit)
    library = Stub("library", set(CPU.features - {Feature.MAX_LOGIT}))
    backend = LargestLogit(library)
    assert (backend.name, backend.features, backend.why_not()) == ("library", CPU.features, None)
    got = backend.forward(q, k, v, segments, LaunchOptions(ScoreSpec(scale, softcap=softcap)))
    torch.testing.assert_close(got, want)
    operands, options = (
        BackwardOperands(dout, q, k, v, got.out, got.lse, None),
        LaunchOptions(ScoreSpec(scale, softcap), deterministic=True),
    )
    handed_over = [operands]
    part = backend.backward(handed_over, segments, options)
    torch.testing.assert_close(part, library.backward([operands], segments, options))
    assert not handed_over


def test_max_logit_of_a_library_keeps_how_it_rounds_and_lets_go() -> None:
    class Library(Stub):
        rounded_gradients = True
        taken: BackwardOperands | None = None

        def backward(self, given: list[BackwardOperands], *rest: Any) -> Gradients:
            self.taken = given.pop()
            return super().backward([self.taken], *rest)

    segments, heads = random_case(0)
    q, k, v, dout, _ = tensors(0, segments, heads, torch.float32)
    library, options = Library("library", set(CPU.features)), LaunchOptions(ScoreSpec(0.5))
    part = CPU.forward(q, k, v, segments, options)
    operands = BackwardOperands(dout, q, k, v, part.out, part.lse, None)
    backend = LargestLogit(library)
    assert backend.rounded_gradients
    assert not LargestLogit(CPU).rounded_gradients
    backend.backward([operands], segments, options)
    assert library.taken is operands


@pytest.mark.parametrize("size", [CPU.size, TINY.size], ids=["one block", "tiny blocks"])  # type: ignore[attr-defined]
@pytest.mark.parametrize("seed", seeds(24))
def test_blocks_that_follow_the_lengths_on_the_device(
    seed: int, size: ScoreBlockSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU goes through in a plan that is updated in place: other lengths on the host, segments of length zero at
    the end, and more rows behind them.
    """
    segments, heads = random_case(seed)
    case = LaunchOptions(ScoreSpec(0.7, softcap=(0.0, 1.5)[seed % 2]))
    q, k, v, dout, dlse = tensors(seed, segments, heads)
    want = CPU.forward(q, k, v, segments, case)
    wanted = CPU.backward(
        [BackwardOperands(dout, q, k, v, want.out, want.lse, dlse)], segments, case._replace(deterministic=True)
    )
    none = torch.zeros(seed % 3, dtype=torch.int32)
    on_device = [torch.cat([cu, none + cu[-1]]) for cu in (segments.device_cu_q, segments.device_cu_kv)]
    n, m, room = segments.cu_q[-1], segments.cu_kv[-1], 5 * (seed % 4)
    stale_q, stale_kv = (Cumulative(np.array([0, length + room]), bound=length + room) for length in (n, m))
    roomy = VarlenBatch(stale_q, stale_kv, segments.left, segments.right, on_device[0], on_device[1])
    q, k, v, dout = (torch.cat([x, torch.randn(room, *x.shape[1:], dtype=F64)]) for x in (q, k, v, dout))
    dlse = functional.pad(dlse, (0, room))
    monkeypatch.setattr("cp_fast.kernels.attention.blockwise.score_blocks", score_blocks_on_device)
    monkeypatch.setattr("cp_fast.kernels.attention.largest_logit.score_blocks", score_blocks_on_device)
    backend = BlockwiseBackend("by the device", Feature.CPU, size)
    got = backend.forward(q, k, v, roomy, case)
    torch.testing.assert_close(Partial(got.out[:n], got.lse[:, :n], got.max_logit), want)
    largest = largest_logit(q.float(), k.float(), roomy, case, size=size)
    assert want.max_logit is not None
    torch.testing.assert_close(largest, want.max_logit.float())
    gradients = backend.backward(
        [BackwardOperands(dout, q, k, v, got.out, got.lse, dlse)], roomy, case._replace(deterministic=True)
    )
    for x, y in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(x[: len(y)], y)
        assert not x[len(y) :].any()


@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 0)])
@pytest.mark.parametrize("name", ["cpu", "cpu with max_logit"])
def test_segments_with_common_keys(name: str, window: tuple[int | None, int | None]) -> None:
    """They are computed as if each had a copy of its keys."""
    backend = CPU if name == "cpu" else LargestLogit(CPU)
    q, k, v = (torch.randn(n, h, 8, dtype=F64) for n, h in ((12, 4), (20, 2), (20, 2)))
    options = LaunchOptions(ScoreSpec(0.4))
    here, there = both_ways(backend, [5, 1, 6], [7, 4, 20], window, (q, k, v), options)
    torch.testing.assert_close(here, there)


def test_cpu_takes_strides_and_inputs_that_require_grad() -> None:
    segments = VarlenBatch.pack([9, 4], [9, 6], None, 0)
    q, k, v, *_ = tensors(3, segments, (4, 2, 8, 8))
    wide = torch.full((13, 4, 19), torch.nan, dtype=F64)
    wide[:, :, 3:19:2] = q
    strided = wide[:, :, 3:19:2].requires_grad_()
    want = CPU.forward(q, k, v, segments, LaunchOptions(ScoreSpec(1.0)))
    got = CPU.forward(
        strided, k.transpose(0, 1).contiguous().transpose(0, 1), v, segments, LaunchOptions(ScoreSpec(1.0))
    )
    assert not got.out.requires_grad
    torch.testing.assert_close(got.out, want.out)


def test_cpu_ignores_the_default_device() -> None:
    segments = VarlenBatch.pack([9, 4], [9, 6], None, 0)
    q, k, v, dout, _ = tensors(3, segments, (4, 2, 8, 8))
    with torch.device("meta"):
        got = CPU.forward(q, k, v, segments, LaunchOptions(ScoreSpec(1.0, softcap=2.0)))
        args = BackwardOperands(dout, q, k, v, got.out, got.lse, None)
        gradients = CPU.backward([args], segments, LaunchOptions(ScoreSpec(1.0, softcap=2.0)))
        assert probe(CPU, "cpu") is None
    assert {x.device.type for x in (got.out, got.lse, *gradients)} == {"cpu"}


@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_a_segment_has_the_same_bits_whatever_stands_before_and_behind_it(data: st.DataObject) -> None:
    rows, columns = (data.draw(st.integers(1, 140)) for _ in range(2))
    h_kv, g = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    d_qk, d_v = (data.draw(st.sampled_from([5, 8, 17, 33, 64])) for _ in range(2))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    left, right = (data.draw(st.sampled_from([None, 0, 20])) for _ in range(2))
    before, behind = (data.draw(st.lists(st.integers(1, 40), max_size=2)) for _ in range(2))
    first = data.draw(st.integers(0, 3))  # heads before these, as those of another sequence are where a batch is folded
    many = VarlenBatch.pack([*before, rows, *behind], [*before, columns, *behind], left, right)
    heads = ((first + h_kv) * g, first + h_kv, d_qk, d_v)
    q, k, v, dout, dlse = tensors(4, many, heads, dtype)
    rows_q, rows_kv = (slice(sum(before), sum(before) + n) for n in (rows, columns))
    of_q, of_kv = slice(first * g, None), slice(first, None)

    def results(segments: VarlenBatch, rows_q: slice, rows_kv: slice, of_q: slice, of_kv: slice) -> list[torch.Tensor]:
        """out, lse, dq, dk, dv of these rows and heads alone."""
        qs, ks, vs = q[rows_q, of_q], k[rows_kv, of_kv], v[rows_kv, of_kv]
        options = LaunchOptions(ScoreSpec(0.5), deterministic=True)
        part = CPU.forward(qs, ks, vs, segments, options)
        operands = BackwardOperands(dout[rows_q, of_q], qs, ks, vs, part.out, part.lse, dlse[of_q, rows_q])
        return [part.out, part.lse, *CPU.backward([operands], segments, options)]

    whole = results(many, slice(None), slice(None), slice(None), slice(None))
    alone = results(VarlenBatch.pack([rows], [columns], left, right), rows_q, rows_kv, of_q, of_kv)
    out, lse, dq, dk, dv = whole
    mine = [out[rows_q, of_q], lse[of_q, rows_q], dq[rows_q, of_q], dk[rows_kv, of_kv], dv[rows_kv, of_kv]]
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), mine, alone, strict=True):
        assert torch.equal(x, y), name


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.thorough
def test_cpu_memory_is_linear_in_the_tile() -> None:
    rows, h_q, d = 16384, 2, 4
    segments = VarlenBatch.pack([rows], [rows], 3000, 0)
    q, k, v, dout, _ = tensors(5, segments, (h_q, 1, d, d), torch.float32)
    with LargestTensor() as seen:
        got = CPU.forward(q, k, v, segments, LaunchOptions(ScoreSpec(0.5)))
        CPU.backward([BackwardOperands(dout, q, k, v, got.out, got.lse, None)], segments, LaunchOptions(ScoreSpec(0.5)))
    assert seen.elements <= max(rows * h_q * d, 2**18)  # the scores have 2**29


def test_segments_know_their_longest() -> None:
    segments = VarlenBatch.pack([3, 7, 1], [2, 2, 9], None, None)
    assert (segments.max_q, segments.max_kv) == (7, 9)
    assert segments.device_cu_kv.tolist() == [0, 2, 4, 13]
    assert segments.device_cu_q.dtype == torch.int32


def test_backends_come_in_order_of_preference() -> None:
    assert [b.name for b in backends.BACKENDS] == ["fa4", "cudnn", "fa2", "cpu", "torch"]
    assert backends.by_name("cpu") is backends.BACKENDS[3]
    assert {Feature.CUDA, Feature.CPU, Feature.SOFTCAP} <= backends.KERNEL_FEATURES
    assert not {Feature.THD, Feature.LEARNABLE} & backends.KERNEL_FEATURES


@pytest.mark.parametrize("device", [Feature.CPU, Feature.CUDA])
def test_auto_leaves_no_cell_empty(device: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a problem needs of a kernel, something has it: on the processor, and on every GPU."""
    for backend in backends.BACKENDS:
        monkeypatch.setattr(type(backend), "why_not", lambda self: None)
    everything = backends.KERNEL_FEATURES - {Feature.CPU, Feature.CUDA} | {device}
    assert backends.choose(everything, "auto").name == {Feature.CPU: "cpu", Feature.CUDA: "torch"}[device]


@pytest.mark.parametrize(
    ("needs", "name"),
    [
        ({Feature.BFLOAT16, Feature.GQA, Feature.DETERMINISTIC}, "fa4"),
        ({Feature.BFLOAT16, Feature.GQA_ASYMMETRIC_DIMS, Feature.DETERMINISTIC}, "fa4"),
        ({Feature.FLOAT16, Feature.HEAD_DIM_ODD, Feature.SOFTCAP}, "fa4"),
        ({Feature.FLOAT16, Feature.LSE_GRADIENT}, "fa4"),
        ({Feature.BFLOAT16, Feature.MAX_LOGIT}, "fa4"),
        ({Feature.BFLOAT16, Feature.HEAD_DIM_OVER_256}, "torch"),
        ({Feature.FLOAT32}, "torch"),
        ({Feature.FLOAT64}, "torch"),
    ],
)
def test_what_auto_takes_where_every_library_works(
    needs: set[Feature], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in backends.BACKENDS:
        monkeypatch.setattr(type(backend), "why_not", lambda self: None)
    assert backends.choose(frozenset(needs | {Feature.CUDA}), "auto").name == name


@pytest.mark.parametrize("name", ["", "FA4", "flash", "auto "])
def test_an_unknown_name_is_told_the_known_ones(name: str) -> None:
    for ask in (backends.by_name, lambda n: backends.choose(frozenset(), n)):
        with pytest.raises(ValueError, match=r"'auto' or one of 'fa4', 'cudnn', 'fa2', 'cpu', 'torch', got"):
            ask(name)


class Stub(BlockwiseBackend):
    """A backend by name, features and reason."""

    def __init__(self, name: str, features: set[Feature], reason: str | None = None) -> None:
        super().__init__(name, Feature.CPU, TINY.size)
        self.features, self._reason = frozenset(features), reason

    def why_not(self) -> str | None:
        return self._reason


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> tuple[Backend, ...]:
    listed = (
        Stub("one", {Feature.CUDA, Feature.SOFTCAP, Feature.GQA}, "it is not installed"),
        Stub("two", {Feature.CUDA, Feature.GQA}),
        Stub("three", {Feature.CPU, Feature.GQA}),
    )
    monkeypatch.setattr(backends, "BACKENDS", listed)
    return listed


def test_auto_takes_the_first_that_works_and_has_the_features(stubs: tuple[Backend, ...]) -> None:
    assert backends.choose(frozenset({Feature.CUDA, Feature.GQA, Feature.THD}), "auto") is stubs[1]
    assert backends.choose(frozenset({Feature.CPU}), "auto") is stubs[2]
    assert backends.choose(frozenset({Feature.CPU}), "three") is stubs[2]


def test_a_faster_library_that_is_not_installed_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = NotInstalled("importing one failed")
    listed = (Stub("one", {Feature.CUDA}, missing), Stub("two", {Feature.CUDA, Feature.GQA}))
    monkeypatch.setattr(backends, "BACKENDS", listed)
    log_once.cache_clear()
    assert backends.choose(frozenset({Feature.CUDA, Feature.GQA}), "auto") is listed[1]
    backends.choose(frozenset({Feature.CUDA}), "two")
    assert capfd.readouterr().err == ""  # it lacks what the problem needs; the other was asked for
    for _ in range(2):
        assert backends.choose(frozenset({Feature.CUDA}), "auto") is listed[1]
    assert capfd.readouterr().err == (
        "cp-attention: attention runs on two; what this GPU prefers is not installed (one: importing one failed); "
        "ContextParallel(backend='two') takes it without a word\n"
    )


def test_max_logit_is_no_reason_to_pass_a_library_over(stubs: tuple[Backend, ...]) -> None:
    chosen = backends.choose(frozenset({Feature.CUDA, Feature.GQA, Feature.MAX_LOGIT}), "auto")
    assert chosen.name == "two"
    assert Feature.MAX_LOGIT in chosen.features
    assert chosen is backends.choose(frozenset({Feature.CUDA, Feature.MAX_LOGIT}), "two")


def test_a_refusal_names_every_candidate(stubs: tuple[Backend, ...]) -> None:
    with pytest.raises(Unsupported) as error:
        backends.choose(frozenset({Feature.CUDA, Feature.SOFTCAP}), "auto")
    assert error.value.missing == {"two": {Feature.SOFTCAP}, "three": {Feature.CUDA, Feature.SOFTCAP}}
    for text in (
        "two lacks softcap",
        "three lacks softcap, device cuda",
        "one does not work here: it is not installed",
    ):
        assert text in str(error.value)


def test_a_name_never_falls_back(stubs: tuple[Backend, ...]) -> None:
    with pytest.raises(Unsupported, match=r"'one'.*\n  one does not work here: it is not installed"):
        backends.choose(frozenset({Feature.CUDA}), "one")
    with pytest.raises(Unsupported, match="two lacks softcap"):
        backends.choose(frozenset({Feature.CUDA, Feature.SOFTCAP}), "two")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_gpu_backends_say_so() -> None:
    for name in ("fa4", "cudnn", "fa2", "torch"):
        assert backends.by_name(name).why_not() == "PyTorch sees no CUDA device"
