"""The THD helpers compose to attention: the classical p2p ring, forward and backward, built from them alone.

Causal, layout dual_chunk, packed sequences with padding and a tail. Rank r, at step i, has the keys of rank r - i:

    i == 0         diagonal       all its queries       x  all keys         causal
    0 < i <= r     lower tile     all its queries       x  first halves     no mask
    i > r          upper tile     second halves         x  all keys         no mask
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from cp_ref import dense_attention
from cp_ref.thd import (
    get_cu_seqlens_on_cp_rank,
    thd_cp_rank_order_to_sequence_order,
    thd_get_partitioned_indices,
    thd_grad_correction,
    thd_out_correction,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
)

INF = float("inf")
HEADS, D_QK, D_V = 2, 6, 4
SCALE = D_QK**-0.5
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v, dout


def same_real_sequence(cu_q: list[int], real_q: list[int], n: int, cu_k: list[int], real_k: list[int], m: int):
    """Which pairs of a tile belong to one sequence and are real tokens; bool [n, m]."""
    of_q, of_k = torch.full((n,), -1), torch.full((m,), -2)
    for s, (start_q, start_k) in enumerate(zip(cu_q[:-1], cu_k[:-1], strict=True)):
        of_q[start_q : start_q + real_q[s]] = s
        of_k[start_k : start_k + real_k[s]] = s
    return of_q[:, None] == of_k[None, :]


def scores_of(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """[h, n, m]"""
    return (SCALE * torch.einsum("nhd,mhd->hnm", q, k)).masked_fill(~visible, -INF)


def probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return torch.exp(scores - lse[..., None]).masked_fill(scores == -INF, 0.0)


def to_padded(lse: torch.Tensor, cu: list[int]) -> torch.Tensor:
    """[h, t] -> [b, h, s]"""
    lengths = [b - a for a, b in pairwise(cu)]
    result = lse.new_zeros(len(lengths), lse.shape[0], max(lengths))
    for s, length in enumerate(lengths):
        result[s, :, :length] = lse[:, cu[s] : cu[s] + length]
    return result


def to_packed(lse: torch.Tensor, cu: list[int], tokens: int) -> torch.Tensor:
    """[b, h, s] -> [h, t], a tail of -inf"""
    result = lse.new_full((lse.shape[1], tokens), -INF)
    for s, (a, b) in enumerate(pairwise(cu)):
        result[:, a:b] = lse[s, :, : b - a]
    return result


class Ring:
    """All ranks of a ring, one after the other."""

    def __init__(self, cp_size: int, real: list[int], slots: list[int], tail: int, lse_packed: bool) -> None:
        self.cp_size, self.lse_packed = cp_size, lse_packed
        self.real = torch.tensor([0, *accumulate(real)], dtype=torch.int32)
        self.slots = torch.tensor([0, *accumulate(slots)], dtype=torch.int32)
        self.total = sum(slots) + tail
        self.local = self.slots // cp_size  # LOCAL lengths, the same on every rank
        self.cu = {"all": self.local.tolist(), "half": (self.local // 2).tolist()}

    def slices(self, x: torch.Tensor) -> list[torch.Tensor]:
        rows = [thd_get_partitioned_indices(self.slots, self.total, self.cp_size, rank) for rank in range(self.cp_size)]
        return [x[of_rank] for of_rank in rows]

    def real_lengths(self, rank: int, first: bool, second: bool) -> list[int]:
        return get_cu_seqlens_on_cp_rank(self.real, self.slots, self.cp_size, rank, first, second).diff().tolist()

    def kind(self, rank: int, step: int) -> str:
        return "diagonal" if step == 0 else "lower" if step <= rank else "upper"

    def visible(self, rank: int, step: int) -> torch.Tensor:
        """The tile's mask: real tokens of one sequence; on the diagonal, causal too."""
        kind, source, tokens = self.kind(rank, step), (rank - step) % self.cp_size, self.total // self.cp_size
        q_part, k_part = "half" if kind == "upper" else "all", "half" if kind == "lower" else "all"
        n, m = (tokens // 2 if part == "half" else tokens for part in (q_part, k_part))
        real_q = self.real_lengths(rank, kind != "upper", True)
        real_k = self.real_lengths(source, True, kind != "lower")
        visible = same_real_sequence(self.cu[q_part], real_q, n, self.cu[k_part], real_k, m)
        return visible.tril() if kind == "diagonal" else visible  # a rank's two chunks are in the order of positions

    def operands(self, rank: int, step: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        kind = self.kind(rank, step)
        if kind == "upper":
            q = thd_read_half_tensor(q, self.local, 1)
        if kind == "lower":
            k, v = thd_read_half_tensor(k, self.local, 0), thd_read_half_tensor(v, self.local, 0)
        return q, k, v

    def shaped(self, lse: torch.Tensor, part: str) -> torch.Tensor:
        return lse if self.lse_packed else to_padded(lse, self.cu[part])

    def forward(self, rank: int, q: list[torch.Tensor], k: list[torch.Tensor], v: list[torch.Tensor]):
        """out [t, h, d_v] float32, lse in the ring's shape."""
        steps: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        lse = torch.empty(0)
        for step in range(self.cp_size):
            source = (rank - step) % self.cp_size
            of_q, of_k, of_v = self.operands(rank, step, q[rank], k[source], v[source])
            scores = scores_of(of_q, of_k, self.visible(rank, step))
            packed = torch.logsumexp(scores, dim=-1)
            out_step = torch.einsum("hnm,mhd->nhd", probabilities(scores, packed), of_v)
            out_step[packed.t() == -INF] = float("nan")  # what an unseen row holds must not matter
            kind = self.kind(rank, step)
            lse_step = self.shaped(packed, "half" if kind == "upper" else "all")
            if kind == "diagonal":
                lse = lse_step.clone()
            elif kind == "lower":
                lse = torch.logaddexp(lse, lse_step)
            else:
                thd_second_half_lse_correction(lse, lse_step, self.local, self.lse_packed)
            steps.append((kind, out_step, lse_step))
        out = torch.zeros(self.total // self.cp_size, HEADS, D_V)
        for kind, out_step, lse_step in steps:
            thd_out_correction(out, out_step, lse, lse_step, self.local, kind == "upper", self.lse_packed)
        return out, lse

    def backward(self, rank: int, batch: list[Batch], out: torch.Tensor, lse: torch.Tensor, seen: list[set[int]], dkv):
        """dq of this rank; dK and dV go into `dkv` (by the rank that owns the keys), which starts as NaN."""
        q, _, _, dout = batch[rank]
        dq, touched = torch.full_like(q, float("nan")), set[int]()
        for step in reversed(range(self.cp_size)):  # the diagonal last, as in TransformerEngine
            kind, source = self.kind(rank, step), (rank - step) % self.cp_size
            of_q, of_k, of_v = self.operands(rank, step, q, batch[source][1], batch[source][2])
            of_out, of_dout, of_lse, part = out, dout, lse, "all"
            if kind == "upper":
                of_out, of_dout = (thd_read_half_tensor(x, self.local, 1) for x in (out, dout))
                size = lse.shape[-1] // 2
                of_lse, part = thd_read_second_half_lse(lse, self.local, self.lse_packed, size), "half"
            if not self.lse_packed:
                of_lse = to_packed(of_lse, self.cu[part], len(of_q))
            p = probabilities(scores_of(of_q, of_k, self.visible(rank, step)), of_lse)
            delta = (of_dout * of_out).sum(-1).t()[..., None]
            ds = SCALE * p * (torch.einsum("nhd,mhd->hnm", of_dout, of_v) - delta)
            # halves that this tile works on; the first tile to touch one copies, later ones add
            q_halves, k_halves = (
                {0, 1} - ({0} if kind == "upper" else set()),
                {0, 1} - ({1} if kind == "lower" else set()),
            )
            dk, dv = torch.einsum("hnm,nhd->mhd", ds, of_q), torch.einsum("hnm,nhd->mhd", p, of_dout)
            for grad, grad_step, halves, before in (
                (dq, torch.einsum("hnm,mhd->nhd", ds, of_k), q_halves, touched),
                (dkv[source][0], dk, k_halves, seen[source]),
                (dkv[source][1], dv, k_halves, seen[source]),
            ):
                first, second = ("none" if h not in halves else "add" if h in before else "copy" for h in (0, 1))
                thd_grad_correction(grad, grad_step, self.local, first, second)
            touched |= q_halves
            seen[source] |= k_halves
        return dq


@pytest.mark.parametrize("lse_packed", [True, False])
@pytest.mark.parametrize(
    ("cp_size", "real", "slots", "tail"),
    [
        (2, [8], [8], 0),
        (2, [5, 0, 12, 1], [8, 0, 12, 4], 8),
        (3, [12, 0, 7, 18, 2], [12, 6, 12, 18, 6], 12),
        (4, [16, 30, 3, 0], [16, 32, 8, 0], 8),
    ],
)
def test_a_ring(cp_size: int, real: list[int], slots: list[int], tail: int, lse_packed: bool) -> None:
    torch.manual_seed(cp_size)
    ring = Ring(cp_size, real, slots, tail, lse_packed)
    whole = [torch.randn(ring.total, HEADS, d) for d in (D_QK, D_QK, D_V, D_V)]
    q, k, v, dout = whole
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    lengths = {"cu_seqlens_q": ring.real, "cu_seqlens_q_padded": ring.slots}
    want, want_lse, _ = dense_attention(*leaves, qkv_format="thd", **lengths)
    want.backward(dout.double())

    cut = [ring.slices(x) for x in whole]
    batch: list[Batch] = list(zip(*cut, strict=True))
    ranks = range(cp_size)
    forward = [ring.forward(rank, cut[0], cut[1], cut[2]) for rank in ranks]
    seen: list[set[int]] = [set() for _ in ranks]
    dkv = [[torch.full_like(cut[1][rank], float("nan")), torch.full_like(cut[2][rank], float("nan"))] for rank in ranks]
    dq = [ring.backward(rank, batch, *forward[rank], seen, dkv) for rank in ranks]

    def whole_again(slices: list[torch.Tensor]) -> torch.Tensor:
        return thd_cp_rank_order_to_sequence_order(torch.cat(slices), ring.slots, cp_size)[: sum(slots)]

    local = ring.total // cp_size
    lse = [x if lse_packed else to_packed(x, ring.cu["all"], local) for _, x in forward]
    dk, dv = ([of_rank[i] for of_rank in dkv] for i in (0, 1))
    results = {
        "out": (whole_again([out for out, _ in forward]), want),
        "lse": (whole_again([x.t() for x in lse]).t(), want_lse[:, : sum(slots)]),
        **{
            name: (whole_again(got), leaf.grad)
            for name, got, leaf in zip(("dq", "dk", "dv"), (dq, dk, dv), leaves, strict=True)
        },
    }
    for name, (got, exact) in results.items():
        exact = exact[: sum(slots)] if name != "lse" else exact  # type: ignore[index]
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
