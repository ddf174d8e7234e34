"""The CuTe code of scores and of dropout, compiled for the host: it computes what PyTorch does, without a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cp_fast.kernels.attention.fa4.scores.launch_program import PlaceTables, ScoreProgram
from cp_fast.kernels.attention.fa4.scores.score_tiles import ScoreTile, Values, library
from cp_fast.kernels.attention.fa4.scores.trace_scores import trace_scores
from cp_ref.calls.scores import kept_by_dropout
from tests.cp_fast.backends.test_fa4_scores import FUNCTIONS, places

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
cutlass: Any = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, FlashAttention 4's compiler")
cute: Any = pytest.importorskip("cutlass.cute")
pytestmark = pytest.mark.extras


def host_tensor(x: torch.Tensor) -> Any:
    return library("cutlass.cute.runtime").from_dlpack(x).mark_layout_dynamic()


def program_of(name: str, position: PlaceTables, dropout_p: float = 0.0) -> ScoreProgram:
    return ScoreProgram(trace_scores(*FUNCTIONS[name]), position, dropout_p, guarded=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_one_pair(name: str) -> None:
    """Each pair is a tile of one row and one column, with tables by row."""
    function, captured = FUNCTIONS[name]
    count, generator = 400, torch.Generator().manual_seed(1)
    score, grad = (3 * torch.randn(count, generator=generator) for _ in range(2))
    b, h, i, j, d = at = places(count)
    program = program_of(name, PlaceTables(by_segment=False, aligned=False))
    tensors = [b, i, d, j, *(captured[one] for one in program.traced.captured)]
    tensors = [(x.view(torch.uint8) if x.dtype == torch.bool else x).reshape(-1) for x in tensors]
    seqlen = SimpleNamespace(offset_q=0, offset_k=0, seqlen_q=count, seqlen_k=count)

    def both(n: Any, scores: Any, grads: Any, heads: Any, given: Any) -> tuple[Any, Any]:
        aux = SimpleNamespace(tensors=given, scalars=(0,))
        tile = ScoreTile(program, [(n, heads[n])], [n], 0, seqlen, aux, rows_apart=True)
        modified = Values(program.traced.modified, tile).at(0, 0, score=scores[n])
        return modified, Values(program.traced.pulled_back, tile).at(0, 0, score=scores[n], grad=grads[n])

    @cute.jit
    def run(scores: cute.Tensor, grads: cute.Tensor, heads: cute.Tensor, given: tuple, out: cute.Tensor):  # type: ignore[no-untyped-def, type-arg]
        for n in range(count):
            out[0, n], out[1, n] = both(n, scores, grads, heads, given)

    out = torch.empty(2, count)
    arguments = (*map(host_tensor, (score, grad, h)), tuple(map(host_tensor, tensors)), host_tensor(out))
    cute.compile(run, *arguments)(*arguments)
    leaf = score.clone().requires_grad_()
    expected = function(leaf.clone(), *at, **captured).float()
    torch.testing.assert_close(out[0], expected.detach(), rtol=2e-5, atol=2e-5)
    slope = torch.zeros_like(grad)
    if expected.requires_grad:
        (slope,) = torch.autograd.grad(expected, leaf, grad)
    torch.testing.assert_close(out[1], slope, rtol=2e-5, atol=2e-5)


def test_an_index_outside_gives_nan() -> None:
    captured = {"t": torch.arange(5.0)}
    traced = trace_scores(lambda s, b, h, i, j, d, t: s + t[i], captured)
    program = ScoreProgram(traced, PlaceTables(by_segment=False, aligned=False), 0.0, guarded=True)
    rows = torch.tensor([4, 5, -5, -6, 2**31 - 1, -(2**31)], dtype=torch.int32)
    zeros, out = torch.zeros(6, dtype=torch.int32), torch.empty(6)
    seqlen = SimpleNamespace(offset_q=0, offset_k=0, seqlen_q=6, seqlen_k=6)

    def one(n: Any, given: Any) -> Any:
        aux = SimpleNamespace(tensors=given, scalars=(0,))
        tile = ScoreTile(program, [(n, cutlass.Int32(0))], [n], 0, seqlen, aux, rows_apart=True)
        return Values(traced.modified, tile).at(0, 0, score=cutlass.Float32(0.5))

    @cute.jit
    def run(given: tuple, out: cute.Tensor):  # type: ignore[no-untyped-def, type-arg]
        for n in range(6):
            out[n] = one(n, given)

    arguments = tuple(map(host_tensor, (zeros, rows, rows, zeros, captured["t"]))), host_tensor(out)
    cute.compile(run, *arguments)(*arguments)
    torch.testing.assert_close(out[[0, 2]], torch.tensor([4.5, 0.5]))
    assert out[[1, 3, 4, 5]].isnan().all()


@pytest.mark.parametrize("apart", [True, False], ids=["rows apart", "columns apart"])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_tile_keeps_the_pairs_of_the_definition(*, aligned: bool, apart: bool) -> None:
    """A thread's rows and columns as a tensor core's tile has them, of a segment that begins anywhere."""
    first_q, first_k, size = (64, 160, 32) if aligned else (61, 7, 32)
    program = program_of("unchanged", PlaceTables(by_segment=aligned, aligned=aligned), 0.3)
    seed, lanes = torch.tensor([-(2**40) + 11]), 32
    documents = torch.full((size,), 3, dtype=torch.int32)
    rows = first_q + torch.arange(size, dtype=torch.int32)
    keys = first_k + torch.arange(size, dtype=torch.int32)
    by_segment = torch.tensor([0, 3, 0, first_q, 0, 0, 0, first_k], dtype=torch.int32)  # the second of two segments
    tables = [by_segment] if aligned else [documents, rows, rows, keys]
    tensors = [*tables, seed.view(torch.int32)]
    seqlen = SimpleNamespace(offset_q=0, offset_k=0, seqlen_q=size, seqlen_k=size)

    def write(lane: Any, given: Any, out: Any) -> None:
        far = [lane // 4 + 8 * n for n in range(2)]
        near = [8 * n + lane % 4 * 2 + e for n in range(4) for e in range(2)]
        queries, columns = (far, near) if apart else (near, far)
        aux = SimpleNamespace(tensors=given, scalars=(5,))
        heads = [(one, cutlass.Int32(2)) for one in queries]
        tile = ScoreTile(program, heads, columns, cutlass.Int32(1), seqlen, aux, rows_apart=apart)
        for (r, c), bit in tile.kept_by_dropout().items():
            out[queries[r], columns[c]] = cutlass.Float32(bit)

    @cute.jit
    def run(given: tuple, out: cute.Tensor):  # type: ignore[no-untyped-def, type-arg]
        for lane in range(lanes):
            write(lane, given, out)

    out = torch.full((size, size), 7.0)
    arguments = tuple(map(host_tensor, tensors)), host_tensor(out)
    cute.compile(run, *arguments)(*arguments)
    b, h = torch.tensor([[3]]), torch.tensor([[7]])
    expected = kept_by_dropout(b, h, rows[:, None], keys[None], seed, 0.3).float()
    seen = (slice(16), slice(None)) if apart else (slice(None), slice(16))
    torch.testing.assert_close(out[seen], expected[seen])
    assert 0.2 < 1 - expected.mean() < 0.4
