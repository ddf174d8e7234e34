"""The CUDA backends on a GPU: exact counts, and errors against those of eager PyTorch in the same dtype."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cp_fast.kernels.attention import choose_backend as backends
from cp_fast.kernels.attention import fa2
from cp_fast.kernels.attention.backend_probe import probe, probe_segments
from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, Gradients, LaunchOptions
from cp_fast.kernels.attention.choose_backend import variants
from cp_fast.kernels.attention.cudnn import backward_graph, forward_graph
from cp_fast.kernels.attention.largest_logit import LargestLogit
from cp_fast.kernels.attention.varlen_batch import Cumulative, VarlenBatch
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature
from tests.cp_fast.backends.placed import both_ways

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, F16 = torch.bfloat16, torch.float16
SIZES = (1, 63, 64, 65, 127, 128, 129, 255, 257)  # around the kernels' block sizes


class Case(NamedTuple):
    """One shape class: every one costs FA4 and cuDNN a compilation, so there are few."""

    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    left: int | None
    right: int | None
    dtype: torch.dtype = BF16
    softcap: float = 0.0

    @property
    def heads(self) -> tuple[int, int, int, int]:
        return self.h_q, self.h_kv, self.d_qk, self.d_v

    @property
    def needs(self) -> set[Feature]:
        """What a library has to have."""
        gqa, asymmetric, d = self.h_q > self.h_kv, self.d_qk != self.d_v, max(self.d_qk, self.d_v)
        conditions = {
            Feature.GQA: gqa,
            Feature.ASYMMETRIC_DIMS: asymmetric,
            Feature.GQA_ASYMMETRIC_DIMS: gqa and asymmetric,
            Feature.HEAD_DIM_OVER_128: d > 128,
            Feature.HEAD_DIM_OVER_256: d > 256,
            Feature.HEAD_DIM_ODD: self.d_qk % 8 > 0 or self.d_v % 8 > 0,
            Feature.SOFTCAP: self.softcap > 0,
            Feature(str(self.dtype).removeprefix("torch.")): True,
        }
        return {feature for feature, needed in conditions.items() if needed}

    def segments(self) -> VarlenBatch:
        """Equal lengths, more columns than rows, and more rows than columns as far as every row still sees one."""
        pairs = [(n, n) for n in SIZES]
        pairs += [(1, 257), (1, 64), (63, 128), (64, 65), (127, 129), (129, 255), (257, 300)]
        taller = [(65, 64), (64, 63), (129, 127), (257, 255), (255, 127), (129, 1)]
        pairs += [(lq, lk) for lq, lk in taller if self.right is None or lq - lk <= self.right]
        return VarlenBatch.pack([lq for lq, _ in pairs], [lk for _, lk in pairs], self.left, self.right, "cuda")


CAUSAL = Case(8, 2, 128, 128, None, 0)
FULL = Case(8, 1, 128, 128, None, None)
LOCAL = Case(8, 2, 128, 128, 37, 3)
MLA_GQA = Case(8, 2, 192, 128, 100, 5)
CASES = [
    CAUSAL,
    FULL,
    LOCAL,
    MLA_GQA,
    Case(4, 4, 192, 128, None, 0),
    Case(4, 4, 64, 64, 70, None, F16),
    Case(4, 4, 96, 96, 128, 0, F16),
    Case(4, 4, 80, 80, None, 0),
    Case(4, 2, 75, 75, None, 0),
    Case(4, 1, 256, 256, None, 0),
    Case(8, 2, 128, 128, None, 0, BF16, 5.0),
    Case(4, 2, 64, 64, 70, 5, F16, 2.0),
    Case(4, 2, 320, 300, None, 0),
    Case(4, 2, 64, 64, 70, 0, torch.float32),
]
LIBRARIES: dict[str, Backend] = {
    **{b.name: b for b in backends.BACKENDS if Feature.CUDA in b.features and b is not fa2.BUILT_IN},
    "fa2 built in": fa2.BUILT_IN,
    "fa2 package": fa2.PACKAGE,
}
NAMES = list(LIBRARIES)
DETERMINISTIC = [name for name in NAMES if Feature.DETERMINISTIC in LIBRARIES[name].features]
IN_PLACE = ["fa4", "fa2 built in", "fa2 package", "torch"]
FA2_HEAD_DIMS = os.environ.get("FA2_HEAD_DIMS")  # "64 128" where the flash-attn package was built for these alone


def pairs(cases: list[Case], *more: Feature) -> list[tuple[str, Case]]:
    """Every backend with every case that it takes."""
    return [(name, c) for name in NAMES for c in cases if c.needs | set(more) <= LIBRARIES[name].features]


def get(name: str, case: Case = CAUSAL) -> Backend:
    """The backend, or a skip that says why not."""
    backend = LIBRARIES[name]
    reason = backend.why_not()
    if reason is not None:
        needed = "the flash-attn package" if backend is fa2.PACKAGE else f"the library of backend {name!r}"
        pytest.skip(f"needs {needed}: {reason}")
    if backend is fa2.PACKAGE and FA2_HEAD_DIMS:
        d = next(d for d in (32, 64, 96, 128, 192, 256) if d >= max(case.d_qk, case.d_v))
        if str(d) not in FA2_HEAD_DIMS.split():
            pytest.skip(f"needs a flash-attn package that was built with head dim {d}")
    return backend


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: VarlenBatch, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the definition in `VarlenBatch`, in the dtype of q (lse at least float32), differentiable."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for (q0, q1), (kv0, kv1) in zip(pairwise(segments.cu_q), pairwise(segments.cu_kv), strict=True):
        ks, vs = (x[kv0:kv1].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        s = q[q0:q1].transpose(0, 1) @ ks.mT * scale
        s = softcap * torch.tanh(s / softcap) if softcap > 0 else s
        lq, lk = q1 - q0, kv1 - kv0
        i, j = torch.arange(lq, device=q.device)[:, None] + lk - lq, torch.arange(lk, device=q.device)[None, :]
        seen = torch.ones(lq, lk, dtype=torch.bool, device=q.device)
        seen = seen if segments.left is None else seen & (j >= i - segments.left)
        seen = seen if segments.right is None else seen & (j <= i + segments.right)
        s = s.masked_fill(~seen, -torch.inf)
        outs.append((s.softmax(-1) @ vs).transpose(0, 1))
        lses.append((s if s.dtype == torch.float64 else s.float()).logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


def tensors(
    case: Case, segments: VarlenBatch, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and dout."""
    g = torch.Generator("cuda").manual_seed(seed)
    n, m = segments.cu_q[-1], segments.cu_kv[-1]
    shapes = (n, case.h_q, case.d_qk), (m, case.h_kv, case.d_qk), (m, case.h_kv, case.d_v), (n, case.h_q, case.d_v)
    q, k, v, dout = (torch.randn(s, generator=g, device="cuda").to(case.dtype) for s in shapes)
    return q, k, v, dout


def autograd(
    dtype: torch.dtype,
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    dlse: Any,
    segments: VarlenBatch,
    scale: float,
    softcap: float,
) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv of the dense computation in a dtype."""
    q, k, v = leaves = tuple(x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    out, lse = dense(q, k, v, segments, scale, softcap)
    loss = (out * dout.to(dtype)).sum() if dlse is None else (out * dout.to(dtype)).sum() + (lse * dlse).sum()
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *torch.autograd.grad(loss, leaves)), strict=True))


def check(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], eager: dict[str, torch.Tensor]) -> None:
    """Largest error at most twice eager's plus a rounding, mean error at most 1.2 times eager's plus 1/100 of one.

    1.3 times in float32, where the lse that the backward is given is rounded as coarsely as everything else.
    """
    factor = 1.3 if eager["out"].dtype == torch.float32 else 1.2
    for name, want in exact.items():
        want = want.detach()
        assert got[name].shape == want.shape, name
        eps = torch.finfo(eager["out"].dtype).eps if name != "lse" else torch.finfo(torch.float32).eps
        error, allowed = (got[name].double() - want).abs(), (eager[name].detach().double() - want).abs()
        size = want.abs()
        assert bool(error.isfinite().all()), f"{name} is not finite"
        largest, limit = float(error.max()), 2 * float(allowed.max()) + eps * float(size.max())
        assert largest <= limit, f"{name}: largest error {largest:.3g} > {limit:.3g}"
        mean, limit = float(error.mean()), factor * float(allowed.mean()) + 0.01 * eps * float(size.mean())
        assert mean <= limit, f"{name}: mean error {mean:.3g} > {limit:.3g}"


def as_dict(out: torch.Tensor, lse: torch.Tensor, g: Gradients) -> dict[str, torch.Tensor]:
    return {"out": out, "lse": lse, "dq": g.dq, "dk": g.dk, "dv": g.dv}


def run(
    backend: Backend,
    case: Case,
    segments: VarlenBatch,
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    dlse: Any = None,
    *,
    deterministic: bool = False,
) -> dict[str, torch.Tensor]:
    """Forward and backward of one launch."""
    options = LaunchOptions(ScoreSpec(case.d_qk**-0.5, case.softcap), deterministic)
    part = backend.forward(q, k, v, segments, options)
    assert part.lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert part.lse.is_contiguous()
    assert part.out.is_contiguous()
    gradients = backend.backward(
        [BackwardOperands(dout, q, k, v, part.out.to(q.dtype), part.lse, dlse)], segments, options
    )
    assert all(x.is_contiguous() for x in gradients)
    return as_dict(part.out, part.lse, gradients)


@pytest.mark.parametrize("name", NAMES)
def test_the_probe_finds_nothing(name: str) -> None:
    assert probe(get(name), "cuda") is None


@pytest.mark.parametrize(("name", "case"), pairs(CASES))
def test_counts_are_exact(name: str, case: Case) -> None:
    backend, s = get(name, case), case.segments()
    lq, lk = ([b - a for a, b in pairwise(cu)] for cu in (s.cu_q, s.cu_kv))
    assert probe_segments(backend, lq, lk, case.left, case.right, "cuda", case.dtype, case.heads) is None


@pytest.mark.parametrize(("name", "case"), pairs(CASES))
def test_errors_are_those_of_the_dtype(name: str, case: Case) -> None:
    backend, segments = get(name, case), case.segments()
    inputs = tensors(case, segments)
    exact, eager = (
        autograd(t, *inputs, None, segments, case.d_qk**-0.5, case.softcap) for t in (torch.float64, case.dtype)
    )
    check(run(backend, case, segments, *inputs), exact, eager)


@pytest.mark.parametrize(
    ("name", "right", "lengths"),
    [*((name, 22, (30, 10)) for name in NAMES if "fa2" in name), *((name, 200, (257, 60)) for name in NAMES)],
)
def test_a_side_longer_than_the_columns_still_hides(name: str, right: int, lengths: tuple[int, int]) -> None:
    """FlashAttention 2 takes right >= max_k for unbounded, though with more rows than columns it is not."""
    for left in (None, 3):
        heads = (4, 2, 64, 64)
        assert probe_segments(get(name), lengths[:1], lengths[1:], left, right, "cuda", BF16, heads) is None


@pytest.mark.parametrize(("name", "case"), pairs([CAUSAL, LOCAL, MLA_GQA]))
def test_one_shift_for_all_segments(name: str, case: Case) -> None:
    """cuDNN is then told the diagonal band from the other corner."""
    backend, lengths = get(name, case), (64, 129, 255, 1)
    longer = [n + 30 for n in lengths]
    assert probe_segments(backend, lengths, longer, case.left, case.right, "cuda", case.dtype, case.heads) is None
    segments = VarlenBatch.pack(lengths, longer, case.left, case.right, "cuda")
    inputs = tensors(case, segments)
    exact, eager = (autograd(t, *inputs, None, segments, case.d_qk**-0.5, 0.0) for t in (torch.float64, case.dtype))
    check(run(backend, case, segments, *inputs), exact, eager)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [([1], [1]), ([1], [300]), ([5, 1], [5, 1])])
def test_launches_of_few_rows(name: str, lengths: tuple[list[int], list[int]]) -> None:
    backend, segments = get(name), VarlenBatch.pack(*lengths, None, 0, "cuda")
    inputs = tensors(CAUSAL, segments)
    exact, eager = (autograd(t, *inputs, None, segments, 128**-0.5, 0.0) for t in (torch.float64, BF16))
    got = run(backend, CAUSAL, segments, *inputs)
    for x in ("out", "lse", "dv"):  # dq and dk are zero but for roundings where a row sees one column
        torch.testing.assert_close(got[x].double(), exact[x].detach(), rtol=2e-2, atol=2e-2)
    for x in ("dq", "dk"):
        limit = 4 * float((eager[x].double() - exact[x]).abs().max()) + 2e-2
        assert float((got[x].double() - exact[x]).abs().max()) <= limit


@pytest.mark.parametrize("name", NAMES)
def test_hundreds_of_short_segments(name: str) -> None:
    """Beyond 256 segments FA4 takes another way to find a block's segment."""
    lengths = [1 + i % 9 for i in range(300)]
    segments = VarlenBatch.pack(lengths, [n + 2 for n in lengths], None, 0, "cuda")
    backend, inputs = get(name), tensors(CAUSAL, segments)
    exact, eager = (autograd(t, *inputs, None, segments, 128**-0.5, 0.0) for t in (torch.float64, BF16))
    check(run(backend, CAUSAL, segments, *inputs), exact, eager)


@pytest.mark.parametrize("window", [(None, None), (None, 0)])
@pytest.mark.parametrize("count", [9, 300])
def test_segments_with_common_keys(count: int, window: tuple[int | None, int | None]) -> None:
    """They have the same bits as if each had a copy of its keys; beyond 256 too."""
    lengths = [SIZES[n % len(SIZES)] if count == 9 else 1 + n % 9 for n in range(count)]
    keys = [n + 40 * (i % 7) for i, n in enumerate(lengths)]
    case = VarlenBatch.pack(lengths, keys, *window, "cuda")
    q, k, v, _ = tensors(CAUSAL, case)
    options = LaunchOptions(ScoreSpec(128**-0.5))
    here, there = both_ways(get("fa4"), lengths, keys, window, (q, k[: max(keys)], v[: max(keys)]), options)
    assert torch.equal(here.out, there.out)
    assert torch.equal(here.lse, there.lse)


@pytest.mark.parametrize(("name", "case"), [(name, c) for name in DETERMINISTIC for c in (CAUSAL, LOCAL, MLA_GQA)])
def test_deterministic_repeats_and_ignores_other_segments(name: str, case: Case) -> None:
    backend, both, one = get(name, case), case.segments(), VarlenBatch.pack([600], [700], case.left, case.right, "cuda")
    n, m = both.cu_q[-1], both.cu_kv[-1]
    lengths_q, lengths_kv = ([b - a for a, b in pairwise(cu)] for cu in (both.cu_q, both.cu_kv))
    more = VarlenBatch.pack([*lengths_q, 600], [*lengths_kv, 700], case.left, case.right, "cuda")
    q, k, v, dout = tensors(case, more)
    first, again = (run(backend, case, more, q, k, v, dout, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[x], again[x]) for x in first)
    alone = run(backend, case, one, q[n:], k[m:], v[m:], dout[n:], deterministic=True)
    assert torch.equal(first["lse"][:, n:], alone["lse"])
    assert torch.equal(first["out"][n:], alone["out"])
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(first["dq"][n:], alone["dq"])
    for x in ("dk", "dv"):
        assert torch.equal(first[x][m:], alone[x]), x


@pytest.mark.parametrize("name", NAMES)
def test_a_launch_over_part_of_the_columns_adds_up(name: str) -> None:
    """The backward is given the whole problem's out and lse: launches over parts of the columns add up to the whole."""
    backend, whole = get(name), VarlenBatch.pack([257], [513], None, None, "cuda")
    q, k, v, dout = tensors(FULL, whole)
    scale = FULL.d_qk**-0.5
    exact, eager = (autograd(t, q, k, v, dout, None, whole, scale, 0.0) for t in (torch.float64, BF16))
    out, lse = exact["out"].detach().to(BF16), exact["lse"].detach().float()
    cuts = [(0, 129), (129, 513)]
    parts = [VarlenBatch.pack([257], [b - a], None, None, "cuda") for a, b in cuts]
    options = LaunchOptions(ScoreSpec(scale))
    seen = [backend.forward(q, k[a:b], v[a:b], s, options) for (a, b), s in zip(cuts, parts, strict=True)]
    merged_lse = torch.logaddexp(seen[0].lse, seen[1].lse)
    merged = sum(p.out.float() * (p.lse - merged_lse).exp().T[:, :, None] for p in seen)
    assert isinstance(merged, torch.Tensor)
    got = [
        backend.backward([BackwardOperands(dout, q, k[a:b], v[a:b], out, lse, None)], s, options)
        for (a, b), s in zip(cuts, parts, strict=True)
    ]
    gradients = Gradients(
        got[0].dq.float() + got[1].dq.float(), torch.cat([g.dk for g in got]), torch.cat([g.dv for g in got])
    )
    check(as_dict(merged.to(BF16), merged_lse, gradients), exact, eager)


@pytest.mark.parametrize(
    ("name", "case"),
    pairs([CAUSAL, MLA_GQA, Case(4, 1, 256, 256, None, 0), CAUSAL._replace(softcap=5.0)], Feature.LSE_GRADIENT),
)
def test_the_gradient_of_lse(name: str, case: Case) -> None:
    backend, segments = get(name, case), case.segments()
    inputs = tensors(case, segments)
    dlse = torch.randn(case.h_q, segments.cu_q[-1], device="cuda")
    exact, eager = (
        autograd(t, *inputs, dlse, segments, case.d_qk**-0.5, case.softcap) for t in (torch.float64, case.dtype)
    )
    check(run(backend, case, segments, *inputs, dlse), exact, eager)


@pytest.mark.parametrize(("name", "case"), pairs([CAUSAL, LOCAL, MLA_GQA]))
def test_what_lies_around_the_tensors_reaches_nothing(name: str, case: Case) -> None:
    """Kernels read whole blocks; rows before the first and after the last segment are not the launch's."""
    backend = get(name, case)
    segments = VarlenBatch.pack([70, 129, 33], [70, 140, 33], case.left, case.right, "cuda")
    inputs = tensors(case, segments)
    want = run(backend, case, segments, *inputs)
    guarded: list[torch.Tensor] = []
    for x in inputs:
        wide = torch.full((300 + x.shape[0] + 300, *x.shape[1:]), torch.nan, dtype=x.dtype, device="cuda")
        wide[300:-300] = x
        guarded.append(wide[300:-300])
    got = run(backend, case, segments, *guarded)
    assert torch.equal(got["out"], want["out"])
    assert torch.equal(got["lse"], want["lse"])
    for x in ("dk", "dv", "dq"):
        torch.testing.assert_close(got[x], want[x], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("name", "case"), pairs([CAUSAL, MLA_GQA]))
def test_launches_wait_for_nothing_and_are_captured(name: str, case: Case) -> None:
    """No host synchronisation; a CUDA graph computes on what its buffers hold when it is replayed."""
    backend, segments = get(name, case), case.segments()
    inputs, others = tensors(case, segments), tensors(case, segments, seed=1)
    want = run(backend, case, segments, *others)
    buffers = [x.clone() for x in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(backend, case, segments, *buffers)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(backend, case, segments, *buffers)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(backend, case, segments, *buffers)
    for buffer, x in zip(buffers, others, strict=True):
        buffer.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got["out"], want["out"])
    assert torch.equal(got["lse"], want["lse"])
    for x in ("dk", "dv", "dq"):
        torch.testing.assert_close(got[x], want[x], rtol=2e-2, atol=2e-2)


def bounded(lengths_q: list[int], lengths_kv: list[int], left: int | None, right: int | None) -> VarlenBatch:
    """Segments of a plan with room for 6 of them, of 700 rows and 800 columns in all."""
    cu_q, cu_kv = (
        np.cumsum([0, *lengths, *[0] * (6 - len(lengths))]).astype(np.int32) for lengths in (lengths_q, lengths_kv)
    )
    tables = torch.from_numpy(cu_q).cuda(), torch.from_numpy(cu_kv).cuda()
    return VarlenBatch(Cumulative(cu_q, 700), Cumulative(cu_kv, 800), left, right, tables[0], tables[1])


@pytest.mark.parametrize("case", [CAUSAL, FULL, LOCAL, MLA_GQA, LOCAL._replace(right=400), CAUSAL._replace(left=650)])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_captured_launch_follows_new_lengths(name: str, case: Case) -> None:
    """Segments of length zero, rows behind the last one, and another batch in the graph's tables."""
    backend = next(v for v in variants(get(name, case)) if Feature.IN_PLACE in v.features)
    batches: list[tuple[list[int], list[int]]] = [
        ([700], [800]),
        ([64, 1, 129], [64, 65, 300]),
        ([], []),
        ([5, 300, 7, 1, 1, 1], [5, 301, 9, 1, 1, 2]),
    ]
    if case.right == 400:
        batches.append(([500, 20], [100, 20]))  # more rows than columns
    first = bounded([700], [800], case.left, case.right)
    buffers = tensors(case, bounded([700], [800], case.left, case.right))
    dlse = torch.randn(case.h_q, 700, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(backend, case, first, *buffers, dlse)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(backend, case, first, *buffers, dlse)
    for seed, (rows, columns) in enumerate([*batches[1:], *batches]):
        segments = bounded(rows, columns, case.left, case.right)
        alone = VarlenBatch.pack(rows, columns, case.left, case.right, "cuda")
        first.device_cu_q.copy_(segments.device_cu_q)
        first.device_cu_kv.copy_(segments.device_cu_kv)
        for buffer, x in zip(buffers, tensors(case, bounded([700], [800], None, None), seed), strict=True):
            buffer.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        n, m = segments.cu_q[-1], segments.cu_kv[-1]
        if n == 0:
            continue
        q, k, v, dout = buffers
        some = (q[:n], k[:m], v[:m], dout[:n], dlse[:, :n].contiguous())
        want = run(backend, case, alone, *some)
        if name == "torch":  # other blocks, other sums
            torch.testing.assert_close(got["out"][:n], want["out"], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got["lse"][:, :n], want["lse"], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(got["out"][:n], want["out"])
            assert torch.equal(got["lse"][:, :n], want["lse"])
        for x, size in (("dq", n), ("dk", m), ("dv", m)):  # dq adds up in any order
            torch.testing.assert_close(got[x][:size], want[x], rtol=2e-2, atol=2e-2)


def test_torch_in_float64_is_exact() -> None:
    case = Case(4, 2, 24, 40, 90, 5, torch.float64, 3.0)
    backend, segments = get("torch"), case.segments()
    inputs = tensors(case, segments)
    dlse = torch.randn(case.h_q, segments.cu_q[-1], device="cuda", dtype=torch.float64)
    exact = autograd(torch.float64, *inputs, dlse, segments, case.d_qk**-0.5, case.softcap)
    for name, x in run(backend, case, segments, *inputs, dlse).items():
        torch.testing.assert_close(x, exact[name].detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("scale", "dtype"), [(1.0, BF16), (-0.5, F16)])
def test_the_largest_logit(name: str, scale: float, dtype: torch.dtype) -> None:
    library = get(name)
    backend = library if Feature.MAX_LOGIT in library.features else LargestLogit(library)
    case = CAUSAL._replace(dtype=dtype)
    segments = case.segments()
    q, k, v, _ = tensors(case, segments)
    found = backend.forward(q, k, v, segments, LaunchOptions(ScoreSpec(scale))).max_logit
    largest = torch.full((8,), -torch.inf, dtype=torch.float64, device="cuda")
    for (q0, q1), (kv0, kv1) in zip(pairwise(segments.cu_q), pairwise(segments.cu_kv), strict=True):
        s = torch.einsum("ihd,jhd->hij", q[q0:q1].double(), k[kv0:kv1].double().repeat_interleave(4, 1)) * scale
        hidden = torch.ones(s.shape[1:], dtype=torch.bool, device="cuda").triu(s.shape[2] - s.shape[1] + 1)
        largest = torch.maximum(largest, s.masked_fill(hidden, -torch.inf).amax((1, 2)))
    assert found is not None
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), largest, rtol=1e-5, atol=1e-5)


def test_cudnn_builds_a_shape_class_once() -> None:
    """Other lengths of about the same size run the graph that is there, with as many segments or a few less."""
    backend = get("cudnn")
    first = VarlenBatch.pack([1000] * 10, [1000] * 10, None, 0, "cuda")
    second = VarlenBatch.pack([990, 980, *[1000] * 7], [990, 980, *[1000] * 7], None, 0, "cuda")
    run(backend, CAUSAL, first, *tensors(CAUSAL, first))
    built = forward_graph.cache_info().misses, backward_graph.cache_info().misses
    run(backend, CAUSAL, second, *tensors(CAUSAL, second))
    assert built == (forward_graph.cache_info().misses, backward_graph.cache_info().misses)


@pytest.mark.parametrize("name", NAMES)
def test_strided_and_misaligned_inputs(name: str) -> None:
    backend, segments = get(name), CAUSAL.segments()
    inputs = tensors(CAUSAL, segments)
    want = run(backend, CAUSAL, segments, *inputs)
    strided: list[torch.Tensor] = []
    for x, (before, after) in zip(inputs, ((3, 2), (8, 8), (0, 1), (1, 0)), strict=True):
        wide = torch.full((*x.shape[:2], before + x.shape[2] + after), torch.nan, dtype=x.dtype, device="cuda")
        wide[..., before : before + x.shape[2]] = x
        strided.append(wide[..., before : before + x.shape[2]])
    got = run(backend, CAUSAL, segments, *strided)
    assert torch.equal(got["out"], want["out"])
    assert torch.equal(got["lse"], want["lse"])
    for x in ("dk", "dv", "dq"):
        torch.testing.assert_close(got[x], want[x], rtol=2e-2, atol=2e-2)
