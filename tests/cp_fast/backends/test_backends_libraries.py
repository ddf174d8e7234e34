"""What the fa4 backend hands to its library, without a GPU: a stand-in with the library's semantics."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from cp_fast.kernels.attention import kernel_operands as dims
from cp_fast.kernels.attention.backend_probe import probe
from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, Gradients, LaunchOptions, Partial
from cp_fast.kernels.attention.choose_backend import by_name
from cp_fast.kernels.attention.fa4 import fa4_backend as fa4
from cp_fast.kernels.attention.kernel_operands import lse_launch
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature
from tests.cp_fast.backends.placed import both_ways

CPU = by_name("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_holds_the_gradient_of_lse(dtype: torch.dtype) -> None:
    magnitudes = torch.logspace(-9, 7, 400, dtype=torch.float64).float()
    dlse = torch.stack([magnitudes, -magnitudes * 1.2345678])
    dout, out = lse_launch(dlse, dtype, 8)
    held = (dout.double() * out.double()).sum(-1).T
    assert dout.dtype == out.dtype == dtype
    assert bool(((held + dlse).abs() <= 2**-20 * dlse.abs() + 2**-34).all())


def test_operands_are_copied_only_where_they_are_not_aligned() -> None:
    x = torch.zeros(5, 2, 16, dtype=torch.float16)
    assert dims.copied_if_unaligned(x) is x
    assert dims.copied_if_unaligned(x[1:, :, :8]).data_ptr() == x[1:, :, :8].data_ptr()
    for odd in (x[..., 1:9], x[..., ::2], torch.zeros(5, 2, 12, dtype=torch.float16)[..., :8]):
        assert dims.copied_if_unaligned(odd).is_contiguous()
        assert dims.copied_if_unaligned(odd).data_ptr() % 16 == 0


def fake_interface(dims: list[tuple[int, int]]) -> ModuleType:
    """flash_attn.cute.interface on the cpu backend, with its refusals; notes the head dims of every call."""

    def band(o: dict[str, Any]) -> VarlenBatch:
        cu_q, cu_k, left, right = (
            o[x] for x in ("cu_seqlens_q", "cu_seqlens_k", "window_size_left", "window_size_right")
        )
        return VarlenBatch(tuple(cu_q.tolist()), tuple(cu_k.tolist()), left, right, cu_q, cu_k)

    def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **o: Any) -> tuple[Any, ...]:
        dims.append((q.shape[2], v.shape[2]))
        part = CPU.forward(q, k, v, band(o), LaunchOptions(ScoreSpec(o["softmax_scale"], softcap=o["softcap"] or 0.0)))
        return part.out, part.lse, None, None, None

    def bwd(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse: Any, **o: Any
    ) -> Gradients:
        dims.append((q.shape[2], v.shape[2]))
        assert q.shape[1] == k.shape[1] or q.shape[2] == v.shape[2], "GQA backward requires head_dim == head_dim_v"
        assert min(o["max_seqlen_q"], o["max_seqlen_k"]) > 256  # one class of kernels, for few rows too
        options = LaunchOptions(ScoreSpec(o["softmax_scale"], o["softcap"]), deterministic=True)
        return CPU.backward([BackwardOperands(dout, q, k, v, out, lse, o["dlse"])], band(o), options)

    library = ModuleType("flash_attn.cute.interface")
    vars(library).update(_flash_attn_fwd=fwd, _flash_attn_bwd=bwd)
    return library


@pytest.mark.parametrize(
    ("h_q", "d_qk", "d_v", "forward_dims", "backward_dims"),
    [
        (1, 192, 128, (192, 128), (192, 128)),
        (4, 192, 128, (192, 128), (192, 192)),
        (2, 128, 64, (128, 128), (128, 128)),
        (2, 64, 128, (128, 128), (128, 128)),
        (2, 80, 80, (80, 80), (96, 96)),
        (1, 160, 160, (160, 160), (160, 160)),
        (2, 75, 20, (80, 80), (96, 96)),
        (2, 190, 126, (192, 192), (192, 192)),
        (2, 13, 13, (16, 16), (32, 32)),
    ],
)
def test_fa4_pads_head_dims_exactly(
    h_q: int,
    d_qk: int,
    d_v: int,
    forward_dims: tuple[int, int],
    backward_dims: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dims: list[tuple[int, int]] = []
    monkeypatch.setattr(fa4, "_interface", lambda: fake_interface(dims))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    backend, segments = fa4.Fa4Backend(), VarlenBatch.pack([11, 3], [15, 3], 6, 0)
    q, k, v, dout = (
        torch.randn(rows, heads, d, dtype=torch.float64)
        for rows, heads, d in ((14, h_q, d_qk), (18, 1, d_qk), (18, 1, d_v), (14, h_q, d_v))
    )
    want, got = (b.forward(q, k, v, segments, LaunchOptions(ScoreSpec(0.1, softcap=4.0))) for b in (CPU, backend))
    torch.testing.assert_close((got.out, got.lse), (want.out, want.lse))
    args = BackwardOperands(dout, q, k, v, want.out, want.lse, torch.randn(h_q, 14))
    options = LaunchOptions(ScoreSpec(0.1, softcap=4.0), deterministic=True)
    right, computed = (b.backward([args], segments, options) for b in (CPU, backend))
    torch.testing.assert_close(computed, right)
    assert all(x.is_contiguous() for x in computed)
    assert dims == [forward_dims, backward_dims]


def test_fa4_is_told_where_segments_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """By first rows and lengths, in the library's arguments for them."""
    given: list[dict[str, Any]] = []

    def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **o: Any) -> tuple[Any, ...]:
        given.append(o)
        return q, torch.zeros(q.shape[1], q.shape[0]), None, None, None

    library = ModuleType("flash_attn.cute.interface")
    vars(library).update(_flash_attn_fwd=fwd)
    monkeypatch.setattr(fa4, "_interface", lambda: library)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    x = torch.randn(6, 2, 32)
    both_ways(fa4.Fa4Backend(), [4, 2], [6, 3], (None, None), (x, x, x), LaunchOptions(ScoreSpec(1.0)))
    names = ("cu_seqlens_q", "seqused_q", "cu_seqlens_k", "seqused_k")
    here, there = ([None if o[name] is None else o[name].tolist() for name in names] for o in given)
    assert here == [[4, 0, 0], [2, 4], [0, 0, 0], [3, 6]]
    assert there == [[0, 4, 6], None, [0, 6, 9], None]


def test_fa4_refuses_the_window_that_its_library_misreads() -> None:
    with pytest.raises(ValueError, match="unbounded"):
        fa4._band(-1, -1)


def test_fa4_holds_no_operand_that_its_launch_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is given away in a list; `Launches` lets each go when its kernels have read it."""
    segments, options = VarlenBatch.pack([11], [11], None, 0), LaunchOptions(ScoreSpec(0.1))
    x = [torch.randn(11, 2, 32) for _ in range(5)]
    given = [BackwardOperands(*x, lse=torch.randn(2, 11), dlse=None)]
    there = [weakref.ref(one.untyped_storage()) for one in x]
    x.clear()

    def launch(name: str, tensors: list[torch.Tensor | None], *_: Any) -> tuple[torch.Tensor, ...]:
        assert all(one() is not None for one in there)
        tensors.clear()
        assert all(one() is None for one in there)
        return (torch.zeros(11, 2, 32),) * 3

    monkeypatch.setattr(fa4, "_launch", launch)
    assert fa4.Fa4Backend().backward(given, segments, options).dq.shape == (11, 2, 32)


ON_CPU = by_name("cpu")


class Mutant(Backend):
    """The cpu backend behind changed segments or results."""

    name: str = "mutant"
    features: frozenset[Feature] = ON_CPU.features

    def __init__(
        self,
        segments: Callable[[VarlenBatch], VarlenBatch] = lambda s: s,
        partial: Callable[[Partial], Partial] = lambda p: p,
        gradients: Callable[[Gradients], Gradients] = lambda g: g,
    ) -> None:
        self._segments, self._partial, self._gradients = segments, partial, gradients

    def why_not(self) -> str | None:
        return None

    def forward(self, q: Any, k: Any, v: Any, segments: VarlenBatch, options: LaunchOptions) -> Partial:
        return self._partial(ON_CPU.forward(q, k, v, self._segments(segments), options))

    def backward(self, given: list[BackwardOperands], segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        return self._gradients(ON_CPU.backward(given, self._segments(segments), options))


def top_left(s: VarlenBatch) -> VarlenBatch:
    """The same window from the top-left corner, for launches of one alignment."""
    shift = (s.cu_kv[1] - s.cu_kv[0]) - (s.cu_q[1] - s.cu_q[0])
    return replace_window(
        s, s.left if s.left is None else s.left + shift, s.right if s.right is None else s.right - shift
    )


def replace_window(s: VarlenBatch, left: int | None, right: int | None) -> VarlenBatch:
    return replace(s, left=left, right=right)


def more(side: int | None, by: int) -> int | None:
    return None if side is None else side + by


def test_the_probe_passes_the_cpu_backend() -> None:
    assert probe(ON_CPU, "cpu") is None


@pytest.mark.parametrize(
    ("mutant", "word"),
    [
        (Mutant(lambda s: replace_window(s, more(s.left, 1), s.right)), "columns"),
        (Mutant(lambda s: replace_window(s, s.left, more(s.right, -1))), "columns"),
        (Mutant(lambda s: replace_window(s, s.left, None if s.right == 0 else s.right)), "columns"),
        (Mutant(top_left), "columns"),
        (Mutant(partial=lambda p: p._replace(lse=p.lse / torch.tensor(2.0).log())), "columns"),
        (Mutant(partial=lambda p: p._replace(lse=p.lse.T.contiguous())), "lse is"),
        (Mutant(partial=lambda p: p._replace(out=p.out.roll(1, 1))), "out"),
        (Mutant(gradients=lambda g: g._replace(dv=g.dv * 0.98)), "dv"),
        (Mutant(gradients=lambda g: g._replace(dv=g.dv.roll(1, 0))), "dv"),
        (Mutant(gradients=lambda g: g._replace(dk=g.dk + 1)), "dk"),
        (Mutant(gradients=lambda g: g._replace(dq=g.dq * torch.nan)), "dq"),
    ],
)
def test_the_probe_kills_mutants(mutant: Mutant, word: str) -> None:
    problem = probe(mutant, "cpu")
    assert problem is not None
    assert word in problem
    assert "mutant" in problem
