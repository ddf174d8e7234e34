"""DeepSeek-V3.2's shape: tensors, operations, kernels' results compared with PyTorch on rows of a large problem, and
variants of the kernels with other constants.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cp_fast.kernels.sparse.sparse_kernels import Visible
from cp_fast.kernels.sparse.triton_sparse import attention_kernels, gradient_kernels, select_kernels
from cp_fast.kernels.sparse.triton_sparse.attention_kernels import Tiling
from cp_fast.kernels.sparse.triton_sparse.gradient_kernels import BackwardTilings
from cp_fast.kernels.sparse.triton_sparse.select_kernels import Best, ScoresTiling

__all__ = ["Shape", "dense_tensors", "milliseconds", "sample_mistakes", "variants"]


@dataclass(frozen=True)
class Shape:
    """One causal document of `keys` tokens, of which the last `rows` are query rows."""

    rows: int = 65_536
    keys: int = 65_536
    heads: int = 128
    d: int = 576
    d_v: int = 512
    top_k: int = 2_048
    h_i: int = 64
    d_i: int = 128

    @property
    def scale(self) -> float:
        """Of attention's scores: that of heads of 192."""
        return 192**-0.5

    @property
    def index_scale(self) -> float:
        return self.d_i**-0.5

    @property
    def pairs(self) -> float:
        """Chosen (query row, key)."""
        first = self.keys - self.rows
        return float(sum(min(i + 1, self.top_k) for i in range(first, self.keys)))

    @property
    def flops(self) -> dict[str, float]:
        """Multiplications and additions, two a pair, head and column; a backward pass as its five products."""
        first = self.keys - self.rows
        scored = (self.keys * (self.keys + 1) - first * (first + 1)) / 2
        indexed = 2 * self.h_i * self.d_i
        return {
            "select": scored * indexed,
            "forward": self.pairs * self.heads * 2 * (self.d + self.d_v),
            "backward": self.pairs * self.heads * 2 * (3 * self.d + 2 * self.d_v),
            "loss": self.pairs * (self.heads * 2 * self.d + indexed),
            "loss_backward": self.pairs * (self.heads * 2 * self.d + 3 * indexed),
        }

    def visible(self) -> Visible:
        stops = torch.arange(self.keys - self.rows + 1, self.keys + 1, dtype=torch.int32, device="cuda")[:, None]
        return Visible(torch.zeros_like(stops), stops, torch.zeros_like(stops))

    def index_tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_index, k_index, weights."""
        draw = torch.Generator("cuda").manual_seed(1)
        q = torch.randn(self.rows, self.h_i, self.d_i, generator=draw, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(self.keys, self.d_i, generator=draw, device="cuda", dtype=torch.bfloat16)
        return q, k, torch.randn(self.rows, self.h_i, generator=draw, device="cuda")

    def tensors(self) -> dict[str, torch.Tensor]:
        """q, k, v as a view of k, dout."""
        draw = torch.Generator("cuda").manual_seed(2)

        def some(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device="cuda", dtype=torch.bfloat16)

        k = some(self.keys, 1, self.d)
        q, dout = some(self.rows, self.heads, self.d), some(self.rows, self.heads, self.d_v)
        return {"q": q, "k": k, "v": k[..., : self.d_v], "dout": dout}


def dense_tensors(rows: int, keys: int, heads: int, dims: tuple[int, int]) -> dict[str, torch.Tensor]:
    """q, k, v, dout of attention over all heads, whose keys are not latent."""
    draw = torch.Generator("cuda").manual_seed(3)
    sizes = {"q": (rows, dims[0]), "k": (keys, dims[0]), "v": (keys, dims[1]), "dout": (rows, dims[1])}
    return {
        name: torch.randn(n, heads, d, generator=draw, device="cuda", dtype=torch.bfloat16)
        for name, (n, d) in sizes.items()
    }


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    error = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
    return error if math.isfinite(error) else math.inf


def sample_mistakes(
    kernels: Any, shape: Shape, index: Any, x: dict[str, torch.Tensor], results: Any
) -> dict[str, float]:
    """Errors of some rows: of the selection (`order`: how far scores are from the best ones, over the largest; `cut`:
    the same with fewer keys gathered and other rows beside it; `ties`: keys against a stable sort of the same numbers)
    and relative ones of attention. results: indices, rows, out, lse, dq.
    """
    indices, rows, out, lse, dq = results
    places = (0, 1, shape.rows // 50, shape.rows // 3, shape.rows // 2 + 1, shape.rows - 2, shape.rows - 1)
    some = torch.tensor(places, device="cuda")
    found, visible = dict[str, float](), shape.visible()
    q_index, k_index, weights = index
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    worst = 0.0
    for row in some.tolist():
        stop = int(visible.stops[row, 0])
        dots = q_index[row].float() @ k_index[:stop].float().T
        scores = ((dots * shape.index_scale).relu() * weights[row][:, None]).sum(0)
        count = min(stop, shape.top_k)
        chosen = indices[row, :count].long()
        legal = bool((indices[row, count:] == -1).all()) and len(chosen.unique()) == count and int(chosen.max()) < stop
        best = scores.topk(count).values
        worst = max(worst, float((scores[chosen] - best).abs().max() / scores.abs().max()) if legal else math.inf)
    found["order"] = worst
    least = shape.keys - shape.rows + 16 if shape.rows < shape.keys else 0
    part = slice(max(0, shape.rows // 2 - 5), shape.rows // 2 + 6)
    cut = max(least, int(visible.stops[part].max()))
    again = kernels.select(
        q_index[part], k_index[:cut].contiguous(), weights[part], Visible(*(t[part] for t in visible)), shape.top_k,
        shape.index_scale,
    )  # fmt: skip
    found["cut"] = 0.0 if torch.equal(again, indices[part]) else math.inf
    numbers = torch.zeros(min(32, shape.rows), shape.keys, dtype=torch.int32, device="cuda")
    first = max(0, shape.rows - 32)
    select_kernels.scores(q_index, k_index, weights, visible, shape.index_scale, first, numbers)
    unsigned = numbers.long() & 0xFFFFFFFF
    wanted = unsigned.sort(dim=1, descending=True, stable=True).indices[:, : shape.top_k]
    unsigned = torch.gather(unsigned, 1, wanted)
    found["ties"] = float((torch.where(unsigned > 0, wanted, -1) != indices[first:]).sum())
    errors: dict[str, float] = dict.fromkeys(("out", "lse", "dq", "rows"), 0.0)
    for row in some.tolist():
        chosen = rows[row, 0]
        chosen = chosen[chosen >= 0].long()
        wanted_rows = indices[row][indices[row] >= 0].long().sort().values
        errors["rows"] = max(errors["rows"], 0.0 if torch.equal(chosen.sort().values, wanted_rows) else math.inf)
        keys = x["k"][chosen, 0].float()
        q = x["q"][row].float().requires_grad_()
        scores = q @ keys.T * shape.scale
        mine = scores.softmax(-1) @ keys[:, : shape.d_v]
        (grad,) = torch.autograd.grad(mine, q, x["dout"][row].float())
        pairs = {
            "out": (out[row], mine.detach()),
            "lse": (lse[row], scores.detach().logsumexp(-1)),
            "dq": (dq[row], grad),
        }
        for name, (a, b) in pairs.items():
            if name != "dq" or len(chosen) > 1:
                errors[name] = max(errors[name], _error(a, b))
    found |= errors
    part = slice(max(0, shape.rows - 192), shape.rows)
    q, dout, chosen = x["q"][part], x["dout"][part], rows[part]
    for way in (False, True):
        _, dk, dv = kernels.backward(
            q, x["k"], x["v"], chosen, out[part], lse[part], dout, None, shape.scale, way, one_sum=True
        )  # fmt: skip
        if not way:
            wanted = torch.zeros_like(dk[:, 0])
            for i in range(len(q)):
                places = chosen[i, 0][chosen[i, 0] >= 0].long()
                keys = x["k"][places, 0].float()
                weight = (q[i].float() @ keys.T * shape.scale).softmax(-1)
                grad = dout[i].float() @ keys[:, : shape.d_v].T
                grad = weight * (grad - (weight * grad).sum(-1, keepdim=True)) * shape.scale
                added = grad.T @ q[i].float()
                added[:, : shape.d_v] += weight.T @ dout[i].float()
                wanted.index_add_(0, places, added)
        found["dk in order" if way else "dk"] = math.inf if dv is not None else _error(dk[:, 0], wanted)
    torch.backends.cuda.matmul.allow_tf32 = before
    return found


# ---- constants of the kernels, one kernel at a time


SCORES = (
    ScoresTiling(256, 64, 16, 4, 3), ScoresTiling(256, 64, 16, 4, 2), ScoresTiling(256, 64, 64, 4, 3),
    ScoresTiling(256, 128, 16, 8, 3),
    ScoresTiling(128, 128, 16, 4, 2), ScoresTiling(128, 128, 32, 4, 3),
)  # fmt: skip
BEST = (Best(2048, 2, 8, 16), Best(2048, 2, 4, 8), Best(4096, 2, 16, 32), Best(2048, 1, 8, 8), Best(1024, 2, 4, 16))
FORWARD = (
    Tiling(64, 64, 512, 8, 2), Tiling(64, 64, 256, 8, 2), Tiling(64, 32, 512, 8, 2), Tiling(64, 32, 512, 8, 3),
    Tiling(64, 64, 128, 8, 2), Tiling(64, 64, 512, 8, 1),
)  # fmt: skip
PAIRS = (Tiling(64, 32, 512, 4, 2), Tiling(64, 64, 512, 4, 1), Tiling(64, 32, 512, 8, 2), Tiling(64, 64, 512, 8, 1))
QUERIES = (Tiling(64, 64, 512, 8, 2), Tiling(64, 32, 512, 8, 3), Tiling(64, 64, 256, 8, 2), Tiling(64, 32, 512, 8, 2))
KEYS = (
    Tiling(128, 64, 128, 4, 2), Tiling(128, 64, 128, 8, 2), Tiling(128, 64, 128, 4, 1), Tiling(128, 64, 128, 8, 1),
    Tiling(128, 64, 256, 8, 1), Tiling(128, 64, 64, 4, 2), Tiling(128, 128, 128, 8, 1),
)  # fmt: skip


def milliseconds(fn: Callable[[], Any], calls: int) -> float:
    """The median of some calls, after one."""
    fn()
    found = []
    for _ in range(calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def variants(shape: Shape) -> Iterator[tuple[str, Any, Callable[[], Any], float]]:
    """Kernel, constants, a call of it alone, and its operations (0: none are counted)."""
    visible = shape.visible()
    index, x, flops = shape.index_tensors(), shape.tensors(), shape.flops
    places = -(-shape.keys // 4096) * 4096
    numbers = torch.zeros(shape.rows, places, dtype=torch.int32, device="cuda")
    for on in SCORES:
        yield "scores", on, lambda on=on: select_kernels.scores(
            *index, visible, shape.index_scale, 0, numbers, on
        ), flops["select"]  # fmt: skip
    found = torch.empty(shape.rows, shape.top_k, dtype=torch.int32, device="cuda")
    for on in BEST:
        gathered = torch.empty(shape.rows, max(128, shape.top_k) * on.room, dtype=torch.int64, device="cuda")
        yield "best", on, lambda on=on, gathered=gathered: select_kernels.best(
            numbers, visible, 0, shape.rows, found, gathered, on
        ), 0.0  # fmt: skip
    draw = torch.Generator("cuda").manual_seed(5)
    rows = torch.randint(0, shape.keys, (shape.rows, shape.top_k), generator=draw, device="cuda", dtype=torch.int32)
    rows = rows.sort(1).values[:, None].contiguous()
    yield "rows_of", None, lambda: select_kernels.rows_of(rows, visible), 0.0
    for on in FORWARD:
        yield "forward", on, lambda on=on: attention_kernels.forward(
            x["q"], x["k"], x["v"], rows, shape.scale, None, tile=on
        ), flops["forward"]  # fmt: skip
    out = torch.randn_like(x["dout"])
    lse = torch.full((shape.rows, shape.heads), 12.0, device="cuda")
    dk, dq = torch.zeros(shape.keys, 1, shape.d, device="cuda"), torch.empty_like(x["q"])
    dv = torch.zeros(shape.keys, 1, shape.d_v, device="cuda")
    weights, grads = x["q"].new_zeros(2, shape.rows, shape.heads, -(-shape.top_k // 128) * 128)
    weights.normal_()
    grads.normal_()
    ops = shape.pairs * shape.heads * 2
    for on in PAIRS:
        of = gradient_kernels.BackwardInputs(
            x["q"], x["k"], x["v"], rows, x["dout"], weights, grads, BackwardTilings(on, QUERIES[0], KEYS[0])
        )  # fmt: skip
        yield "pairs", on, lambda of=of: of.write_pairs(out, lse, None, shape.scale, 0, shape.rows), ops * (
            shape.d + shape.d_v
        )  # fmt: skip
    for on in QUERIES:
        of = gradient_kernels.BackwardInputs(
            x["q"], x["k"], x["v"], rows, x["dout"], weights, grads, BackwardTilings(PAIRS[0], on, KEYS[0])
        )  # fmt: skip
        yield "queries", on, lambda of=of: of.add_queries(dq, 0, shape.rows), ops * shape.d
    for on in KEYS:
        of = gradient_kernels.BackwardInputs(
            x["q"], x["k"], x["v"], rows, x["dout"], weights, grads, BackwardTilings(PAIRS[0], QUERIES[0], on)
        )  # fmt: skip
        yield "keys", on, lambda of=of: of.add_keys(dk, 0, shape.rows, False, False, shape.d_v), ops * (
            shape.d + shape.d_v
        )  # fmt: skip
        yield "keys, two sums", on, lambda of=of: (
            of.add_keys(dk, 0, shape.rows, False, False, 0), of.add_keys(dv, 0, shape.rows, False, True, 0)
        ), ops * (shape.d + shape.d_v)  # fmt: skip
    parts = torch.empty(1, shape.rows, 1, shape.top_k, shape.d, device="cuda")
    of = gradient_kernels.BackwardInputs(
        x["q"], x["k"], x["v"], rows, x["dout"], weights, grads, BackwardTilings(PAIRS[0], QUERIES[0], KEYS[0])
    )  # fmt: skip
    yield "keys as parts", KEYS[0], lambda: of.add_keys(parts, 0, shape.rows, True, False, shape.d_v), ops * (
        shape.d + shape.d_v
    )  # fmt: skip
    yield "add_parts", None, lambda: gradient_kernels.add_parts(parts, rows, dk), 0.0
