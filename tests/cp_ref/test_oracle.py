"""The oracle against an independent definition (PyTorch's SDPA with a boolean mask), and numbers done by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_ref import dense_attention
from cp_ref.schedules.words import MASKS, AttnMaskType, SoftmaxType


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """bshd -> bshd; visible [b, s_q, s_kv]."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], scale=scale)
    return out.transpose(1, 2)


def visible_by_words(mask: str, window: tuple[int, int], len_q: int, len_kv: int, s_q: int, s_kv: int) -> torch.Tensor:
    """The mask, pair by pair, by the sentences of the design; bool [s_q, s_kv]."""
    shift = len_kv - len_q if mask.endswith("bottom_right") else 0
    left, right = window
    if "causal" in mask:
        right = 0
    return torch.tensor(
        [
            [
                i < len_q
                and j < len_kv
                and (left < 0 or j >= i + shift - left)
                and (right < 0 or j <= i + shift + right)
                for j in range(s_kv)
            ]
            for i in range(s_q)
        ],
        dtype=torch.bool,
    ).reshape(s_q, s_kv)


@given(
    st.sampled_from(MASKS),
    st.tuples(st.integers(-1, 6), st.integers(-1, 6)),
    st.tuples(st.integers(1, 7), st.integers(1, 7)),
    st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    st.sampled_from([(4, 4), (4, 2), (2, 6)]),
    st.integers(0, 1000),
)
def test_against_sdpa(
    mask: AttnMaskType,
    window: tuple[int, int],
    sizes: tuple[int, int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    (s_q, s_kv), (h_q, h_kv), (d_qk, d_v), batch = sizes, heads, dims, 2

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = leaf(batch, s_q, h_q, d_qk), leaf(batch, s_kv, h_kv, d_qk), leaf(batch, s_kv, h_kv, d_v)
    padded = mask.startswith("padding")
    lens = [((seed + 3 * n) % (s_q + 1), (seed + 5 * n) % (s_kv + 1)) if padded else (s_q, s_kv) for n in range(batch)]
    arguments = {}
    if padded:
        for side, name in ((0, "cu_seqlens_q"), (1, "cu_seqlens_kv")):
            total = [0, lens[0][side], lens[0][side] + lens[1][side]]
            arguments[name] = torch.tensor(total, dtype=torch.int32)
    out, lse, _ = dense_attention(q, k, v, attn_mask_type=mask, window_size=window, **arguments)
    visible = torch.stack([visible_by_words(mask, window, *lens[n], s_q, s_kv) for n in range(batch)])
    empty = ~visible.any(dim=-1)
    expected = sdpa(q, k, v, visible | empty[..., None], d_qk**-0.5)  # SDPA has NaN for rows that see nothing
    expected = expected.masked_fill(empty[..., None, None], 0.0)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(lse == float("-inf"), empty[:, None, :].expand_as(lse))
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    got = torch.autograd.grad(out, (q, k, v), dout)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11)


def one_query(scores: list[float], values: list[float], **arguments: object) -> tuple[float, float, float]:
    """Attention of one query over keys with these scores and values: (out, lse, max_logit)."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor(scores, dtype=torch.float64).reshape(1, -1, 1, 1)
    v = torch.tensor(values, dtype=torch.float64).reshape(1, -1, 1, 1)
    out, lse, top = dense_attention(q, k, v, attn_mask_type="no_mask", softmax_scale=1.0, **arguments)  # type: ignore[arg-type]
    return out.item(), lse.item(), top.item()


def test_by_hand_two_keys() -> None:
    """Weights 3 and 1: out = (3 * 8 + 1 * 4) / 4 = 7, denominator 4."""
    out, lse, top = one_query([math.log(3), 0.0], [8.0, 4.0])
    assert (out, math.exp(lse), top) == pytest.approx((7.0, 4.0, math.log(3)))


def test_by_hand_sinks() -> None:
    """off-by-one: the denominator 4 gains 1; learnable with log(4): it gains 4, and out is half."""
    out, lse, _ = one_query([math.log(3), 0.0], [8.0, 4.0], softmax_type="off-by-one")
    assert (out, math.exp(lse)) == pytest.approx((28 / 5, 5.0))
    sink = torch.tensor([math.log(4)])
    out, lse, _ = one_query([math.log(3), 0.0], [8.0, 4.0], softmax_type="learnable", softmax_offset=sink)
    assert (out, math.exp(lse)) == pytest.approx((3.5, 8.0))


def test_by_hand_softcap() -> None:
    """softcap 2: the score 2 * atanh(0.5) becomes 1; max_logit is taken after it."""
    out, lse, top = one_query([2 * math.atanh(0.5), 0.0], [1.0, 0.0], softcap=2.0)
    assert (out, math.exp(lse), top) == pytest.approx((math.e / (math.e + 1), math.e + 1, 1.0))


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_rows_that_see_nothing(softmax_type: SoftmaxType) -> None:
    """Bottom-right causal with 3 queries and 1 key: only the last query sees it."""
    offset = torch.tensor([0.5], dtype=torch.float64, requires_grad=True) if softmax_type == "learnable" else None
    q = torch.randn(1, 3, 1, 2, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 1, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out, lse, _ = dense_attention(
        q, k, v, attn_mask_type="causal_bottom_right", softmax_type=softmax_type, softmax_offset=offset
    )
    nothing = {"vanilla": float("-inf"), "off-by-one": 0.0, "learnable": 0.5}[softmax_type]
    assert lse[0, 0, :2].tolist() == [nothing, nothing]
    assert out[0, :2].abs().max() == 0
    out.sum().backward()
    assert q.grad is not None
    assert q.grad[0, :2].abs().max() == 0
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_padding_and_tail_never_reach_anything() -> None:
    """thd, 2 sequences of 3 of 4 and 2 of 4 slots, 2 slots of tail, NaN wherever there is no token."""
    cu, padded = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8])
    real = [0, 1, 2, 4, 5]
    q, k, v = (torch.full((10, 1, 2), float("nan"), dtype=torch.float64) for _ in range(3))
    for x in (q, k, v):
        x[real] = torch.randn(5, 1, 2, dtype=torch.float64)
        x.requires_grad_()
    out, lse, _ = dense_attention(q, k, v, qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_q_padded=padded)
    rest = [n for n in range(10) if n not in real]
    assert out[rest].abs().max() == 0
    assert (lse[:, rest] == float("-inf")).all()
    assert out.isfinite().all()
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert x.grad[rest].abs().max() == 0
