"""What the fa2 and fa4 backends hand to their libraries, without a GPU: stand-ins with the libraries' semantics."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cp_fast.backends import by_name, dims, fa2, fa4
from cp_fast.backends.base import Gradients, Segments
from cp_fast.backends.lse_gradient import lse_launch
from cp_fast.backends.probe import probe

CPU = by_name("cpu")


def fake_aten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """aten's flash operators on the cpu backend, window rules included; the deterministic flag of every backward."""

    def band(cu_q: torch.Tensor, cu_k: torch.Tensor, max_k: int, left: int, right: int) -> Segments:
        left, right = -1 if left >= max_k else left, -1 if right >= max_k else right
        if left < 0 <= right:
            left = max_k if right > 0 else -1
        elif right < 0 <= left:
            right = max_k
        cu = tuple(cu_q.tolist()), tuple(cu_k.tolist())
        return Segments(*cu, None if left < 0 else left, None if right < 0 else right, cu_q, cu_k)

    def forward(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *_: Any, **o: Any
    ) -> tuple[Any, ...]:
        assert max_q > 1
        assert o.get("num_splits", 1) == 1
        segments = band(cu_q, cu_k, max_k, o["window_size_left"], o["window_size_right"])
        part = CPU.forward(q, k, v, segments, scale=o["scale"], softcap=0.0)
        return part.out.to(q.dtype), part.lse, None, None, None

    def backward(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        *_: Any,
        **o: Any,
    ) -> tuple[Any, ...]:
        segments = band(cu_q, cu_k, max_k, o["window_size_left"], o["window_size_right"])
        strict.append(torch.are_deterministic_algorithms_enabled())
        options: dict[str, Any] = {"scale": o["scale"], "softcap": 0.0, "deterministic": True}
        return tuple(x.to(q.dtype) for x in CPU.backward(dout, q, k, v, out, lse, None, segments, **options))

    strict: list[bool] = []
    fa2._forward_extras()  # reads the real schema, once
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    return strict


def test_fa2_says_every_window_in_atens_words(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_aten(monkeypatch)
    assert probe(fa2.Fa2Backend(), "cpu") is None

    def naive(s: Segments) -> tuple[int, int, int, int]:
        return -1 if s.left is None else s.left, -1 if s.right is None else s.right, max(2, s.max_q), s.max_kv

    monkeypatch.setattr(fa2, "_window", naive)
    problem = probe(fa2.Fa2Backend(), "cpu")
    assert problem is not None
    assert "window (None, 22)" in problem


@pytest.mark.parametrize(("left", "right"), [(-1, None), (None, -2), (3, -1)])
def test_fa2_refuses_negative_sides(left: int | None, right: int | None) -> None:
    segments = Segments.pack([4], [9], left, right)
    x = torch.zeros(9, 1, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"'fa2'.*crop"):
        fa2.Fa2Backend().forward(x[:4], x, x, segments, scale=1.0, softcap=0.0)


def test_fa2_refuses_what_its_features_exclude() -> None:
    segments = Segments.pack([4], [4], None, 0)
    x = torch.zeros(4, 1, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="softcap"):
        fa2.Fa2Backend().forward(x, x, x, segments, scale=1.0, softcap=2.0)
    wide = torch.zeros(4, 1, 264, dtype=torch.float16)
    with pytest.raises(ValueError, match="up to 256, got d_qk=264"):
        fa2.Fa2Backend().forward(wide, wide, x, segments, scale=1.0, softcap=0.0)


@pytest.mark.parametrize(("d_qk", "d_v"), [(24, 24), (13, 13), (24, 8), (8, 24)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_fa2_pads_head_dims_and_adds_the_gradient_of_lse(
    d_qk: int, d_v: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = fake_aten(monkeypatch)
    backend, segments = fa2.Fa2Backend(), Segments.pack([11, 3], [15, 3], 6, 0)
    q, k, v, dout = (
        torch.randn(rows, heads, d) for rows, heads, d in ((14, 4, d_qk), (18, 1, d_qk), (18, 1, d_v), (14, 4, d_v))
    )
    want, got = (b.forward(q, k, v, segments, scale=0.1, softcap=0.0) for b in (CPU, backend))
    torch.testing.assert_close((got.out, got.lse), (want.out, want.lse), rtol=1e-5, atol=1e-5)
    args, options = (dout, q, k, v, want.out, want.lse), {"scale": 0.1, "softcap": 0.0, "deterministic": deterministic}
    for dlse in (None, torch.randn(4, 14)):
        right, computed = (b.backward(*args, dlse, segments, **options) for b in (CPU, backend))
        torch.testing.assert_close(computed, right, rtol=1e-5, atol=1e-5)
        assert all(x.is_contiguous() for x in computed)
    assert strict == ([True] * 6 if deterministic else [False] * 3)  # one launch each, then two with the lse's


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_holds_the_gradient_of_lse(dtype: torch.dtype) -> None:
    magnitudes = torch.logspace(-9, 7, 400, dtype=torch.float64).float()
    dlse = torch.stack([magnitudes, -magnitudes * 1.2345678])
    dout, out = lse_launch(dlse, dtype, 8)
    held = (dout.double() * out.double()).sum(-1).T
    assert dout.dtype == out.dtype == dtype
    assert bool(((held + dlse).abs() <= 2**-20 * dlse.abs() + 2**-34).all())


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_fa2_asks_for_determinism_and_puts_the_flag_back(
    before: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = fake_aten(monkeypatch)
    segments = Segments.pack([4], [4], None, 0)
    x = torch.zeros(4, 1, 8, dtype=torch.float16)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        args = (x, x, x, x, x, torch.zeros(1, 4), None)
        fa2.Fa2Backend().backward(*args, segments, scale=1.0, softcap=0.0, deterministic=True)
        assert strict == [True]
        flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        assert flags == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_operands_are_copied_only_where_they_are_not_aligned() -> None:
    x = torch.zeros(5, 2, 16, dtype=torch.float16)
    assert dims.aligned(x) is x
    assert dims.aligned(x[1:, :, :8]).data_ptr() == x[1:, :, :8].data_ptr()
    for odd in (x[..., 1:9], x[..., ::2], torch.zeros(5, 2, 12, dtype=torch.float16)[..., :8]):
        assert dims.aligned(odd).is_contiguous()
        assert dims.aligned(odd).data_ptr() % 16 == 0


def fake_interface(dims: list[tuple[int, int]]) -> SimpleNamespace:
    """flash_attn.cute.interface on the cpu backend, with its refusals; notes the head dims of every call."""

    def band(o: dict[str, Any]) -> Segments:
        cu_q, cu_k, left, right = (
            o[x] for x in ("cu_seqlens_q", "cu_seqlens_k", "window_size_left", "window_size_right")
        )
        return Segments(tuple(cu_q.tolist()), tuple(cu_k.tolist()), left, right, cu_q, cu_k)

    def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **o: Any) -> tuple[Any, ...]:
        dims.append((q.shape[2], v.shape[2]))
        part = CPU.forward(q, k, v, band(o), scale=o["softmax_scale"], softcap=o["softcap"] or 0.0)
        return part.out, part.lse, None, None, None

    def bwd(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse: Any, **o: Any
    ) -> Gradients:
        dims.append((q.shape[2], v.shape[2]))
        assert q.shape[1] == k.shape[1] or q.shape[2] == v.shape[2], "GQA backward requires head_dim == head_dim_v"
        assert o["deterministic"] == ("max_seqlen_q" in o)
        options: dict[str, Any] = {"scale": o["softmax_scale"], "softcap": o["softcap"], "deterministic": True}
        return CPU.backward(dout, q, k, v, out, lse, o["dlse"], band(o), **options)

    return SimpleNamespace(_flash_attn_fwd=fwd, _flash_attn_bwd=bwd)


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
    backend, segments = fa4.Fa4Backend(), Segments.pack([11, 3], [15, 3], 6, 0)
    q, k, v, dout = (
        torch.randn(rows, heads, d, dtype=torch.float64)
        for rows, heads, d in ((14, h_q, d_qk), (18, 1, d_qk), (18, 1, d_v), (14, h_q, d_v))
    )
    want, got = (b.forward(q, k, v, segments, scale=0.1, softcap=4.0) for b in (CPU, backend))
    torch.testing.assert_close((got.out, got.lse), (want.out, want.lse))
    args, options = (dout, q, k, v, want.out, want.lse, torch.randn(h_q, 14)), {"scale": 0.1, "softcap": 4.0}
    right, computed = (b.backward(*args, segments, **options, deterministic=True) for b in (CPU, backend))
    torch.testing.assert_close(computed, right)
    assert all(x.is_contiguous() for x in computed)
    assert dims == [forward_dims, backward_dims]


def test_fa4_refuses_the_window_that_its_library_misreads() -> None:
    segments = Segments.pack([4], [9], -1, -1)
    with pytest.raises(ValueError, match="unbounded"):
        fa4._band(segments)
