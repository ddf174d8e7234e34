"""What conformance's helpers do not draw: strides, gradients, tuples, unsigned tokens, moved starts, mixed dtypes."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_fast.movers.select_movers import use
from cp_ref import SimGroup, dense_attention
from tests.marks import needs_cxx

INF = float("inf")
PACKAGES = pytest.mark.parametrize("package", [cp_ref, cp_fast], ids=["cp_ref", "cp_fast"])
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [
    *FLOATS,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.fixture(params=["cp_ref", "torch", pytest.param("native", marks=needs_cxx)])
def thd(request: pytest.FixtureRequest) -> Any:
    """The reference's helpers, and the fast ones by each implementation."""
    with nullcontext() if request.param == "cp_ref" else use(request.param):
        yield cp_ref.thd if request.param == "cp_ref" else cp_fast.thd


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_moves_with_odd_strides(dtype: torch.dtype, thd: Any) -> None:
    """Every second head of a larger tensor."""
    x = torch.randint(0, 7, (14, 4, 8)).to(dtype)[:, ::2]
    cu = cumulative([8, 4])
    there = thd.thd_sequence_order_to_cp_rank_order(x, cu, 2)
    assert there.dtype == dtype
    assert torch.equal(there.double(), x.double()[[0, 1, 6, 7, 8, 11, 12, 2, 3, 4, 5, 9, 10, 13]])
    assert torch.equal(thd.thd_cp_rank_order_to_sequence_order(there, cu, 2).double(), x.double())
    assert torch.equal(thd.thd_read_half_tensor(x, cu, 1).double(), x.double()[[4, 5, 6, 7, 10, 11, 13]])
    out = torch.zeros(14, 4, 8).to(dtype)[:, ::2]
    thd.thd_copy_valid_tokens_from_per_split_to_rank_local(out, x, cu, cumulative([3, 4]))
    real = [0, 1, 2, 8, 9, 10, 11]
    assert torch.equal(out.double()[real], x.double()[real])
    assert out.double()[[3, 4, 5, 6, 7, 12, 13]].eq(0).all()


@PACKAGES
def test_reorders_are_differentiable(package: Any) -> None:
    cu, weights = cumulative([8, 4]), torch.randn(14, 2, dtype=torch.float64)
    moves = package.thd.thd_sequence_order_to_cp_rank_order, package.thd.thd_cp_rank_order_to_sequence_order
    for move, back in (moves, moves[::-1]):
        x = torch.randn(14, 2, dtype=torch.float64, requires_grad=True)
        (move(x, cu, 2) * weights).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, back(weights, cu, 2))


def test_copying_both_splits_fills_the_slice(thd: Any) -> None:
    """The two steps of all_gather: the late one's starts are moved by a chunk, its end is not."""
    slots, real = cumulative([8, 0, 16]), cumulative([5, 0, 16])
    for rank in (0, 1):
        local, chunk = slots // 2, torch.tensor([2, 0, 4, 0], dtype=torch.int32)
        inp, out = torch.arange(12.0), torch.full((12,), -1.0)
        for first, moved in ((True, local), (False, local + chunk)):
            held = thd.get_cu_seqlens_on_cp_rank(real, slots, 2, rank, first, not first)
            thd.thd_copy_valid_tokens_from_per_split_to_rank_local(out, inp, moved, held)
        both = thd.get_cu_seqlens_on_cp_rank(real, slots, 2, rank, True, True).diff().tolist()
        assert out.tolist() == [float(i) if i < both[0] or i >= 4 else -1.0 for i in range(12)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("step_dtype", FLOATS)
def test_one_rounding(dtype: torch.dtype, step_dtype: torch.dtype, thd: Any) -> None:
    """Computed in float32 or wider, whatever the operands; rounded once."""
    lengths, wide = cumulative([6, 4]), torch.float64
    out, step = torch.randn(10, 2, 4).to(dtype), torch.randn(10, 2, 4).to(step_dtype)
    lse_step = torch.randn(2, 10)
    lse = torch.logaddexp(lse_step, torch.randn(2, 10))
    exact = out.to(wide) + step.to(wide) * (lse_step.to(wide) - lse.to(wide)).exp().t()[..., None]
    grad_exact = out.to(wide) + step.to(wide)
    grad = out.clone()
    thd.thd_out_correction(out, step, lse, lse_step, lengths, False, True)
    thd.thd_grad_correction(grad, step, lengths, "add", "add")
    assert out.dtype == grad.dtype == dtype
    half_an_ulp = 0.5001 * torch.finfo(dtype).eps
    arithmetic = 1e-14 if wide in (dtype, step_dtype) else 2e-6
    torch.testing.assert_close(out.to(wide), exact, rtol=half_an_ulp, atol=arithmetic)
    torch.testing.assert_close(grad.to(wide), grad_exact, rtol=half_an_ulp, atol=arithmetic)


def test_nothing_of_nothing_is_nothing(thd: Any) -> None:
    """Two empty results: LSE -inf, output 0; and -inf with a number is the number."""
    lse, lengths = torch.tensor([[-INF, -INF, -INF, 2.0]]), cumulative([4])
    thd.thd_second_half_lse_correction(lse, torch.tensor([[-INF, -INF]]), lengths, True)
    assert lse.tolist() == [[-INF, -INF, -INF, 2.0]]
    thd.thd_second_half_lse_correction(lse, torch.tensor([[1.5, -INF]]), lengths, True)
    assert lse.tolist() == [[-INF, -INF, 1.5, 2.0]]
    out = torch.zeros(4, 1, 2)
    thd.thd_out_correction(out, torch.full((4, 1, 2), INF), lse, torch.full((1, 4), -INF), lengths, False, True)
    assert out.eq(0).all()


@pytest.mark.parametrize("only_second_half", [False, True])
def test_a_padded_lse_without_room_changes_nothing(thd: Any, only_second_half: bool) -> None:
    """No token of any sequence, in buffers that are all tail."""
    out, step = torch.arange(24.0).reshape(4, 2, 3), torch.full((2 if only_second_half else 4, 2, 3), torch.nan)
    lse, before, cu = torch.empty(2, 2, 0), out.clone(), cumulative([0, 0])
    thd.thd_second_half_lse_correction(lse, lse.clone(), cu, lse_packed=False)
    thd.thd_out_correction(out, step, lse, lse.clone(), cu, only_second_half, lse_packed=False)
    assert thd.thd_read_second_half_lse(lse, cu, False, 0).shape == (2, 2, 0)
    assert torch.equal(out, before)


@PACKAGES
def test_tuples_are_their_elements(package: Any) -> None:
    cu, x, y = cumulative([8, 4]), torch.randn(14, 2, 3), torch.arange(14)
    for move, options in (
        (package.thd.thd_sequence_order_to_cp_rank_order, {"cp_size": 2}),
        (package.thd.thd_cp_rank_order_to_sequence_order, {"cp_size": 2}),
        (package.thd.thd_read_half_tensor, {"half": 1}),
    ):
        both = move((x, y), cu, **options)
        assert isinstance(both, tuple)
        assert torch.equal(both[0], move(x, cu, **options))
        assert torch.equal(both[1], move(y, cu, **options))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_tokens(dtype: torch.dtype, thd: Any) -> None:
    """Files of tokens are uint16: they move as int64 does."""
    package, cu, given = cp_ref if thd is cp_ref.thd else cp_fast, cumulative([8, 4]), torch.arange(14)
    given[3] = torch.iinfo(dtype).max if dtype != torch.uint64 else 2**62

    def moved(ids: torch.Tensor) -> list[torch.Tensor]:
        out = ids.flip(0).clone() if ids.dtype == torch.int64 else given.flip(0).to(ids.dtype)
        thd.thd_copy_valid_tokens_from_per_split_to_rank_local(out, ids, cu, cumulative([5, 4]))
        parts = SimGroup(2).run(
            lambda member: thd.get_batch_on_this_cp_rank(
                {"ids": ids}, cp=package.ContextParallel(member), qkv_format="thd", cu_seqlens_padded=cu
            )["ids"]
        )
        return [
            thd.thd_sequence_order_to_cp_rank_order(ids, cu, 2),
            thd.thd_cp_rank_order_to_sequence_order(ids, cu, 2),
            thd.thd_read_half_tensor(ids, cu, 1),
            *thd.pad_thd_sequences_for_cp(ids, ids, cumulative([8, 3]), 4, 1, 200)[:2],
            *(out, *parts),
        ]

    for got, want in zip(moved(given.to(dtype)), moved(given), strict=True):
        assert got.dtype == dtype
        assert got.tolist() == want.tolist()


def test_one_rank_holds_sequences_of_any_length(thd: Any) -> None:
    """A baseline on one rank runs the code of many: lengths of 7, 0, 1 and 6, and a tail of 3."""
    package, cu, rows = cp_ref if thd is cp_ref.thd else cp_fast, cumulative([7, 0, 1, 6]), torch.arange(17)
    assert torch.equal(thd.thd_get_partitioned_indices(cu, 17, 1, 0), rows.int())
    for move in (thd.thd_sequence_order_to_cp_rank_order, thd.thd_cp_rank_order_to_sequence_order):
        x = torch.randn(17, 2, 3, requires_grad=True)
        there, ids = move(x, cu, 1), move((rows, rows.to(torch.uint16)), cu, 1)
        there.square().sum().backward()
        assert torch.equal(there, x)
        assert there.data_ptr() != x.data_ptr()
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * x)
        assert [one.tolist() for one in ids] == [rows.tolist()] * 2
        with pytest.raises(ValueError, match=r"x.shape\[0\] is 13 and cu_seqlens_padded ends at 14"):
            move(rows[:13], cu, 1)
    real = cumulative([4, 0, 1, 5])
    assert torch.equal(thd.get_cu_seqlens_on_cp_rank(real, cu, 1, 0, True, True), real)
    assert not thd.get_cu_seqlens_on_cp_rank(real, cu, 1, 0, False, False).any()
    assert thd.get_cu_seqlens_on_cp_rank(cumulative([5]), cumulative([8]), 1, 0, False, True).tolist() == [0, 1]
    for halves in ((True, False), (False, True)):
        with pytest.raises(ValueError, match="sequence 0 the length 7, padding included, but a half needs a multiple"):
            thd.get_cu_seqlens_on_cp_rank(real, cu, 1, 0, *halves)
    with pytest.raises(ValueError, match="sequence 0 7 slots, but it has 8 tokens"):
        thd.get_cu_seqlens_on_cp_rank(cumulative([8, 0, 0, 0]), cu, 1, 0, True, True)
    for layout in ("dual_chunk", "contiguous"):
        cp = package.ContextParallel(SimGroup(1).run(lambda member: member)[0], layout=layout)
        leaf = torch.randn(17, 3, requires_grad=True)
        batch = {"hidden": leaf, "ids": rows}
        got = thd.get_batch_on_this_cp_rank(batch, cp=cp, qkv_format="thd", cu_seqlens_padded=cu)
        got["hidden"].sum().backward()
        assert torch.equal(got["hidden"], leaf)
        assert torch.equal(got["ids"], rows)
        assert leaf.grad is not None
        assert leaf.grad.eq(1).all()


@PACKAGES
def test_padded_tokens(package: Any) -> None:
    """What is left behind the sequences holds the tail, cut or filled up."""
    ids, pad = torch.tensor([1, 1, 1, 2, 2, 8, 9]), package.thd.pad_thd_sequences_for_cp
    cut = {n: pad(ids, ids, cumulative([3, 2]), 4, 0, -1, n) for n in (8, 9, 12)}
    assert cut[8][0].tolist() == [1, 1, 1, 0, 2, 2, 0, 0]
    assert cut[9][0].tolist() == [1, 1, 1, 0, 2, 2, 0, 0, 8]
    assert cut[12][1].tolist() == [1, 1, 1, -1, 2, 2, -1, -1, 8, 9, -1, -1]
    ids, labels, _ = pad(ids[:3], ids[:3], cumulative([3]), 4)
    assert (ids.tolist(), labels.tolist()) == ([1, 1, 1, 0], [1, 1, 1, -100])


@PACKAGES
def test_padding_v_changes_nothing(package: Any) -> None:
    """Output, LSE and all gradients are those without."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, 5, 2, d, dtype=torch.float64, requires_grad=True) for d in (6, 6, 4)]
    dout, results = torch.randn(1, 5, 2, 4, dtype=torch.float64), list[list[torch.Tensor]]()
    for pad in (False, True):
        q, k, v = leaves
        out, lse, _ = dense_attention(q, k, package.thd.pad_v(v, 6) if pad else v)
        out = package.thd.trim_out(out, 4) if pad else out
        results.append([out, lse, *torch.autograd.grad(out, leaves, dout)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
    assert package.thd.pad_v(leaves[2], 4) is leaves[2]
