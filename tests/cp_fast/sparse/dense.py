"""Random problems of sparse attention, slices full of NaN where no token is, and who sees whom."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

import cp_fast
from cp_ref.batches.tensors import lse_from_packed, lse_to_packed, to_format, to_packed
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.ownership import Fragments
from cp_ref.schedules.problem import Problem, row_positions, slice_rows

Tensors = dict[str, torch.Tensor]


class Drawn(NamedTuple):
    """The arguments of `make_plan`, and those of `ContextParallel`."""

    arguments: dict[str, Any]
    context: dict[str, Any]
    size: int

    def made(self, member: SimMember) -> tuple[cp_fast.ContextParallel, cp_fast.Plan]:
        cp = cp_fast.ContextParallel(member, **self.context)
        return cp, cp_fast.make_plan(cp=cp, **self.arguments)


def drawn(seed: int) -> Drawn:
    """A random problem in float64."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 2, 3, 4]))
    comm = str(rng.choice(["all_gather", "a2a"]))
    fmt = str(rng.choice(["thd", "bshd", "sbhd"]))
    heads_kv = int(rng.choice([1, 2])) * (1 if comm == "all_gather" or rng.random() < 0.5 else size)
    if comm == "a2a" and heads_kv % size and size % heads_kv:
        heads_kv = 1
    share = size if comm == "a2a" else 1
    heads_q = int(np.lcm(heads_kv, share)) * int(rng.choice([1, 2]))
    masks = ["causal", "causal_bottom_right", "no_mask"]
    mask = str(rng.choice(masks, p=[0.6, 0.2, 0.2]))
    window = (
        (-1, -1)
        if rng.random() < 0.6
        else (int(rng.integers(0, 6)), 0 if "causal" in mask else int(rng.integers(0, 4)))
    )
    cross = rng.random() < 0.3
    given: dict[str, Any] = {"qkv_format": fmt, "window_size": window}
    layouts = ["dual_chunk", "contiguous"] + ([] if cross else ["balanced"])
    layout = str(rng.choice(layouts if fmt == "thd" else layouts[:2]))
    if fmt == "thd":
        count = int(rng.integers(1, 5))
        for side in ("q", "kv"):
            if side == "kv" and not cross:
                break
            lengths = rng.integers(0, 14, count)
            padded = lengths + rng.integers(0, 3, count)
            given[f"cu_seqlens_{side}"] = torch.tensor([0, *np.cumsum(lengths)])
            given[f"cu_seqlens_{side}_padded"] = torch.tensor([0, *np.cumsum(padded)])
        mask = f"padding_{mask}" if mask != "no_mask" else "padding"
    else:
        given["batch_size"] = int(rng.integers(1, 3))
        given["seqlen_q"] = 2 * size * int(rng.integers(1, 4))
        given["seqlen_kv"] = 2 * size * int(rng.integers(1, 4)) if cross else given["seqlen_q"]
    given["attn_mask_type"] = mask
    if fmt == "thd" and not cross and rng.random() < 0.4:
        given["layout"] = _table(rng, np.diff(given["cu_seqlens_q_padded"].numpy()), size)
    d_qk = int(rng.choice([4, 5]))
    sizes: dict[str, Any] = {"heads_q": heads_q, "heads_kv": heads_kv, "d_qk": d_qk, "d_v": int(rng.choice([3, d_qk]))}
    sizes["softmax_type"] = "learnable" if rng.random() < 0.4 else "vanilla"
    context = {"cp_comm_type": comm, "layout": layout}
    return Drawn({**given, **sizes, "dtype": torch.float64, "device": "cpu"}, context, size)


def _table(rng: np.random.Generator, slots: np.ndarray, size: int) -> list[tuple[int, int, int, int]]:
    """A layout of any cuts, owners and order."""
    rows: list[tuple[int, int, int, int]] = []
    for number, count in enumerate(slots.tolist()):
        cuts = sorted({0, count, *rng.integers(0, count + 1, 3).tolist()})
        rows += [(int(rng.integers(0, size)), number, a, b) for a, b in pairwise(cuts)]
    return sorted((rows[n] for n in rng.permutation(len(rows))), key=lambda row: row[0])


def slices(problem: Problem, side: str, rank: int, x: torch.Tensor, tail: int = 0) -> torch.Tensor:
    """A rank's slice of global rows [t, ...], NaN (or a wild number) where it has no token. tail: rows more, in thd."""
    fmt, batch = problem.qkv_format, len(problem.sequences)
    rows = slice_rows(problem, side) + tail if fmt == "thd" else slice_rows(problem, side) * batch
    wild = float("nan") if x.dtype.is_floating_point else 2**30
    found = torch.full((rows, *x.shape[1:]), wild, dtype=x.dtype)
    for start, stop, row in _own(problem, side, rank):
        found[row : row + stop - start] = x[start:stop]
    return to_format(found, fmt, batch)


def lse_slice(problem: Problem, rank: int, lse: torch.Tensor, tail: int = 0) -> torch.Tensor:
    """The same of an lse [t, h]."""
    fmt, batch = problem.qkv_format, len(problem.sequences)
    return lse_from_packed(to_packed(slices(problem, "q", rank, lse, tail), fmt), fmt, batch)


def whole(
    problem: Problem, side: str, parts: list[torch.Tensor], empty: float = 0, *, lse: bool = False
) -> torch.Tensor:
    """The global rows of all ranks' slices; `empty` in rows of no token, which all slices have there."""
    packed = [(lse_to_packed if lse else to_packed)(x, problem.qkv_format) for x in parts]
    found = packed[0].new_full((problem.starts(side)[-1], *packed[0].shape[1:]), empty)
    for rank, x in enumerate(packed):
        rest = torch.ones(len(x), dtype=torch.bool)
        for start, stop, row in _own(problem, side, rank):
            found[start:stop] = x[row : row + stop - start]
            rest[row : row + stop - start] = False
        assert bool((x[rest] == empty).all())
    return found


def _own(problem: Problem, side: str, rank: int) -> list[tuple[int, int, int]]:
    own: Fragments = problem.workload.ownership.side(side).of(rank)
    return [(start, stop, row) for _, start, stop, row in own.rows()]


def seen(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The visible pairs, bool [t_q, t_kv], and the position of each key in its document."""
    q, k = (torch.arange(problem.starts(side)[-1]) for side in ("q", "kv"))
    mask = torch.zeros(len(q), len(k), dtype=torch.bool)
    for q0, q1, k0, k1, lo, hi in problem.workload.areas.rows():
        band = (k - q[:, None] >= lo) & (k - q[:, None] <= hi)
        mask |= band & (q[:, None] >= q0) & (q[:, None] < q1) & (k >= k0) & (k < k1)
    positions = row_positions(problem, "kv", k.numpy())[1] if len(k) else k.numpy()
    return mask, torch.from_numpy(positions)
