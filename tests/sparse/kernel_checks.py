"""Random problems for kernels over chosen keys (`SparseKernels`), and what they must give: the definition, dense and in
float64, with PyTorch's own gradients.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch

from cp_fast.kernels.sparse.sparse_kernels import Runs, Visible

__all__ = [
    "CLASSES",
    "LIMITS",
    "KernelProblem",
    "check_attention",
    "check_loss",
    "check_rows",
    "check_select",
    "draw",
    "few_kinds",
    "mistakes",
    "rows_like",
]

LIMITS = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 5e-5, torch.float64: 1e-12}  # ||error|| / ||it||


@dataclass(frozen=True)
class KernelProblem:
    """One drawn problem. exact: whole numbers in the indexer, so that scores are exact and often equal."""

    seed: int
    n: int
    m: int
    intervals: int
    h_q: int
    h_kv: int
    d: int
    d_v: int
    view: bool
    sets: int
    top_k: int
    h_i: int
    d_i: int
    sink: bool
    with_dlse: bool
    exact: bool
    runs: int = 0
    dtype: torch.dtype = torch.bfloat16

    @property
    def extra(self) -> int:
        """Keys behind the m others, which runs alone name."""
        return 45 if self.runs else 0

    def further(self, device: str) -> Runs | None:
        """Runs of the extra keys: of each row `runs` ones, of which some are empty."""
        if not self.runs:
            return None
        rng = random.Random(self.seed + 5)
        table = [sorted(rng.randint(0, self.extra) for _ in range(2 * self.runs)) for _ in range(self.n)]
        found = torch.tensor(table, dtype=torch.int32).reshape(self.n, self.runs, 2) + self.m
        longest = int((found[..., 1] - found[..., 0]).sum(1).max())
        return Runs(*(found[..., i].contiguous().to(device) for i in range(2)), longest=longest)

    def visible(self, device: str) -> Visible:
        """Documents of drawn lengths; a row sees some intervals of its own, or nothing."""
        rng = random.Random(self.seed)
        cuts = sorted({0, self.m, *(rng.randint(0, self.m) for _ in range(rng.randint(0, 3)))})
        table = []
        for _ in range(self.n):
            of = rng.randrange(len(cuts) - 1) if self.m else 0
            low, high = (cuts[of], cuts[of + 1]) if self.m else (0, 0)
            ends = sorted(rng.randint(low, high) for _ in range(2 * self.intervals))
            if self.intervals == 1 and rng.random() < 0.5:
                ends[0] = low
            if rng.random() < 0.1:
                ends = [low] * len(ends)
            table.append([(a, b, a - low) for a, b in zip(ends[::2], ends[1::2], strict=True)])
        found = torch.tensor(table, dtype=torch.int32).reshape(self.n, self.intervals, 3)
        return Visible(*(found[:, :, i].contiguous().to(device) for i in range(3)))

    def numbers(self, device: str) -> dict[str, torch.Tensor]:
        """Tensors of the call, drawn on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        def whole(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high + 1, shape, generator=generator).float()

        k = normal(self.m + self.extra, self.h_kv, self.d)
        made = {
            "q": normal(self.n, self.h_q, self.d),
            "k": k,
            "v": k[..., : self.d_v] if self.view else normal(self.m + self.extra, self.h_kv, self.d_v),
            "dout": normal(self.n, self.h_q, self.d_v),
            "dlse": normal(self.n, self.h_q, dtype=torch.float32),
            "sink": normal(self.h_q, dtype=torch.float32),
            "q_index": normal(self.n, self.h_i, self.d_i),
            "k_index": normal(self.m, self.d_i),
            "weights": normal(self.n, self.h_i, dtype=torch.float32),
            "dloss": normal(self.n, dtype=torch.float32),
        }
        if self.exact:
            made["q_index"] = whole(-1, 1, self.n, self.h_i, self.d_i).to(self.dtype).to(device)
            made["k_index"] = whole(-1, 1, self.m, self.d_i).to(self.dtype).to(device)
            made["weights"] = (whole(-2, 2, self.n, self.h_i) / 2).to(device)
        return made

    def indices(self, device: str) -> torch.Tensor:
        """Positions, of which some come twice, are hidden, or are none."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = self.n, self.sets, self.top_k
        return torch.randint(-3, max(4, self.m), shape, generator=generator, dtype=torch.int32).to(device)


CLASSES = 24  # of problems whose kernels are the same to a compiler


def draw(seed: int, dtype: torch.dtype = torch.bfloat16, small: bool = False) -> KernelProblem:
    """A problem of any kind; `small` for an interpreter. Of CLASSES seeds in a row, each needs other kernels."""
    rng = random.Random(seed % CLASSES + 1000 * small)
    latent = rng.random() < 0.4
    h_kv = 1 if latent else rng.choice([1, 2, 3])
    groups = [1, 3, 16, 20] if small else [4, 16, 20, 64, 128] if h_kv == 1 else [1, 3, 8, 16]
    group = rng.choice(groups)
    if latent:
        d = rng.choice([48, 80] if small else [576, 512, 320, 192])
        d_v = {48: 32, 80: 64, 576: 512, 512: 512, 320: 256, 192: 128}[d]
    else:
        d = rng.choice([24, 64] if small else [24, 64, 128, 192, 256])
        d_v = rng.choice([d, 16, 72] if small else [d, 64, 128])
    kind = {
        "intervals": rng.choice([1, 1, 2, 3]), "h_q": h_kv * group, "h_kv": h_kv, "d": d, "d_v": d_v, "view": latent,
        "sets": rng.choice([1, h_kv]), "top_k": rng.choice([1, 7, 16, 33] if small else [5, 64, 100, 300, 2048]),
        "h_i": rng.choice([1, 3, 16] if small else [1, 3, 16, 32, 64]),
        "d_i": rng.choice([8, 24, 32] if small else [16, 64, 100, 128]),
        "sink": rng.random() < 0.4, "with_dlse": rng.random() < 0.5, "runs": rng.choice([0, 0, 1, 2]),
    }  # fmt: skip
    rng = random.Random(seed)
    n, m = rng.randint(1, 5 if small else 40), rng.choice([1, 30, 70] if small else [1, 100, 700, 3000])
    return KernelProblem(seed=seed, n=n, m=m, exact=rng.random() < 0.5, dtype=dtype, **kind)


def few_kinds() -> list[int]:
    """Some of CLASSES: each value of each field is in one of them."""
    of_class = (
        "intervals",
        "h_q",
        "h_kv",
        "d",
        "d_v",
        "view",
        "sets",
        "top_k",
        "h_i",
        "d_i",
        "sink",
        "with_dlse",
        "runs",
    )
    values = [{(name, getattr(draw(kind), name)) for name in of_class} for kind in range(CLASSES)]
    left, found = set[tuple[str, Any]]().union(*values), list[int]()
    while left:
        found.append(max(range(CLASSES), key=lambda kind: len(values[kind] & left)))
        left -= values[found[-1]]
    return sorted(found)


# ---- what must come out


def rows_like(indices: torch.Tensor, visible: Visible) -> torch.Tensor:
    """Of each row which keys the indices name, bool [n, sets, m + 1]; the last column is for none."""
    starts, stops, positions = (column[:, None, None].long() for column in visible)
    index = indices.long()[..., None]
    inside = (index >= positions) & (index < positions + stops - starts)
    at = torch.where(inside, index - positions + starts, -1).amax(-1)
    named = torch.zeros(*indices.shape[:2], int(at.max()) + 2 if at.numel() else 1, dtype=torch.bool, device=at.device)
    return named.scatter_(2, torch.where(at < 0, named.shape[2] - 1, at), True)


def mistakes(kernels: Any, problem: KernelProblem, device: str, deterministic: bool | None = None) -> list[str]:
    """All of them; those of one way to add gradients, or of both. An exception is one too."""
    found = list[str]()
    for check in (check_rows, check_select):
        try:
            found += check(kernels, problem, device)
        except Exception as error:
            found.append(f"{check.__name__}: {type(error).__name__}: {error}"[:600])
    for check in (check_attention, check_loss):
        for way in (False, True) if deterministic is None else (deterministic,):
            try:
                errors = check(kernels, problem, device, way)
            except Exception as error:
                found.append(f"{check.__name__}: {type(error).__name__}: {error}"[:600])
                continue
            for name, error in errors.items():
                limit = LIMITS[problem.dtype] * (3 if name[0] == "d" else 1)  # differences of rounded numbers
                if not error <= limit:
                    found.append(f"{name}: {error:.1e}, deterministic {way}")
    return found


def check_rows(kernels: Any, problem: KernelProblem, device: str) -> list[str]:
    """Mistakes of `rows_of`."""
    visible, indices = problem.visible(device), problem.indices(device)
    found = kernels.rows_of(indices, visible).long()
    named = rows_like(indices, visible)[..., :-1]
    counts = torch.zeros(*named.shape[:2], problem.m + 1, dtype=torch.long, device=device)
    counts.scatter_add_(2, torch.where(found < 0, problem.m, found), torch.ones_like(found))
    counts = counts[..., : problem.m]
    wanted = torch.zeros_like(counts)
    wanted[..., : named.shape[2]] = named
    return [] if torch.equal(counts, wanted) else ["rows_of: other rows, or one twice"]


def check_select(kernels: Any, problem: KernelProblem, device: str) -> list[str]:
    """Mistakes of `select`. Scores may differ by rounding, and the order where they do, unless they are exact."""
    visible, x = problem.visible(device), problem.numbers(device)
    scale = 0.5
    found = kernels.select(x["q_index"], x["k_index"], x["weights"], visible, problem.top_k, scale)
    if tuple(found.shape) != (problem.n, problem.top_k) or found.dtype != torch.int32:
        return [f"select: {tuple(found.shape)} of {found.dtype}"]
    dots = torch.einsum("nhd,md->nhm", x["q_index"].double(), x["k_index"].double())
    scores = ((scale * dots).relu() * x["weights"].double()[..., None]).sum(1)
    size = ((scale * dots).abs() * x["weights"].double().abs()[..., None]).sum(1).amax() if scores.numel() else 0.0
    loose = 0.0 if problem.exact else 1e-5 * float(size) + 1e-6
    wrong = []
    for row in range(problem.n):
        spans = list(zip(*(column[row].tolist() for column in visible), strict=True))
        position = {start + i: first + i for start, stop, first in spans for i in range(stop - start)}
        keys = sorted(position)
        values = {position[key]: float(scores[row, key]) for key in keys}
        best = sorted(values, key=lambda p: (-values[p], p))[: problem.top_k]
        mine = found[row].tolist()
        chosen = mine[: len(best)]
        if any(p != -1 for p in mine[len(best) :]) or len(set(chosen)) != len(best) or not set(chosen) <= set(values):
            wrong.append(f"select: row {row} names {mine[:8]}..., {len(best)} keys are to be chosen")
        elif loose == 0.0 and chosen != best:
            wrong.append(f"select: row {row} names {chosen[:8]}..., wanted {best[:8]}...")
        elif any(abs(values[a] - values[b]) > loose for a, b in zip(chosen, best, strict=True)):
            wrong.append(f"select: row {row} has other scores")
    return wrong[:3]


def check_workspace(device: str) -> list[str]:
    """Mistakes of a workspace with room for fewer query rows than a tile has: what lies behind it must stay."""
    from cp_fast.kernels.sparse.triton_sparse import (
        select_kernels,  # which asks for the interpreter when it is imported
    )

    n, heads, d, m = 7, 2, 16, 40
    draw = torch.Generator().manual_seed(3)
    q, k = torch.randn(n, heads, d, generator=draw).to(device), torch.randn(m, d, generator=draw).to(device)
    weights = torch.randn(n, heads, generator=draw).to(device)
    stops = torch.full((n, 1), m, dtype=torch.int32, device=device)
    visible = Visible(torch.zeros_like(stops), stops, torch.zeros_like(stops))
    whole = select_kernels.select(q, k, weights, visible, 8, 0.5)
    room = 4 * 2048 + 8 * 128 * 2  # of one row
    found = [select_kernels.select(q, k, weights, visible, 8, 0.5, workspace=rows * room) for rows in (1, 3)]
    wrong = [f"workspace: other keys with {2 * n + 1} rows" for n, some in enumerate(found) if not some.equal(whole)]
    memory = torch.full((20, 2048), -7, dtype=torch.int32, device=device)
    select_kernels.scores(q, k, weights, visible, 0.5, 2, memory[:3])
    if not bool((memory[3:] == -7).all()):
        wrong.append("workspace: scores are written behind it")
    return wrong


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far it is, relative; infinite if a number is not finite where it must be."""
    found, wanted = found.detach().double(), wanted.detach().double()
    same = (found == wanted) | (found - wanted).isfinite()
    if not bool(same.all()):
        return math.inf
    finite = wanted.isfinite()
    difference = torch.where(finite, found - wanted, 0.0).norm()
    size = torch.where(finite, wanted, 0.0).norm()
    return float(difference / size) if size > 0 else float(difference)


def _named(problem: KernelProblem, rows: torch.Tensor) -> torch.Tensor:
    """bool [n, sets, m]: which keys a row names."""
    named = torch.zeros(problem.n, rows.shape[1], problem.m + 1, dtype=torch.bool, device=rows.device)
    named.scatter_(2, torch.where(rows < 0, problem.m, rows).long(), True)
    return named[..., : problem.m]


def _rows(problem: KernelProblem, device: str) -> torch.Tensor:
    """Rows of keys in a drawn order, none of them twice, -1 between them."""
    named = rows_like(problem.indices(device), problem.visible(device))[..., :-1]
    generator = torch.Generator().manual_seed(problem.seed + 2)
    found = torch.full((problem.n, problem.sets, problem.top_k), -1, dtype=torch.int32)
    for row in range(problem.n):
        for which in range(problem.sets):
            keys = named[row, which].nonzero()[:, 0].int().cpu()
            places = torch.randperm(problem.top_k, generator=generator)[: len(keys)]
            found[row, which, places] = keys
    return found.to(device)


def check_attention(kernels: Any, problem: KernelProblem, device: str, deterministic: bool = False) -> dict[str, float]:
    """Relative errors of `forward` and `backward`. `deterministic`: also that gradients come again bit by bit."""
    x, rows, scale = problem.numbers(device), _rows(problem, device), problem.d**-0.5
    sink, dlse = x["sink"] if problem.sink else None, x["dlse"] if problem.with_dlse else None
    named, runs = _named(problem, rows), problem.further(device)
    if runs is not None:
        key = torch.arange(problem.m, problem.m + problem.extra, device=device)
        of_runs = ((key >= runs.starts[..., None]) & (key < runs.stops[..., None])).any(1)
        named = torch.cat([named, of_runs[:, None].expand(-1, named.shape[1], -1)], dim=-1)
    named = named.expand(-1, problem.h_kv, -1)
    group = problem.h_q // problem.h_kv
    q, k, v = (x[name].double().detach().requires_grad_() for name in "qkv")
    scores = torch.einsum("nhgd,mhd->nhgm", q.unflatten(1, (problem.h_kv, group)), k) * scale
    scores = scores.masked_fill(~named[:, :, None], -math.inf)
    if sink is not None:
        logits = sink.double().view(1, problem.h_kv, group, 1).expand(problem.n, -1, -1, -1)
        scores = torch.cat([scores, logits], -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()[..., : problem.m + problem.extra]
    out = torch.einsum("nhgm,mhd->nhgd", weights, v).flatten(1, 2)
    lse = lse.flatten(1, 2)
    total = (out * x["dout"].double()).sum()
    if dlse is not None:
        total = total + (lse.masked_fill(lse.isinf(), 0.0) * dlse.double()).sum()
        dlse = dlse.masked_fill(lse.detach().isinf(), math.nan)
    blind = ~named.any(-1).repeat_interleave(group, 1)  # what comes to these reaches nothing
    dout = x["dout"].masked_fill(blind[..., None], math.nan)
    dq, dk, dv = torch.autograd.grad(total, (q, k, v))
    got_out, got_lse = kernels.forward(x["q"], x["k"], x["v"], rows, scale, sink, runs=runs)
    results = {"out": _error(got_out, out), "lse": _error(got_lse, lse)}
    arguments = x["q"], x["k"], x["v"], rows, got_out, got_lse, dout, dlse, scale, deterministic
    options: dict[str, Any] = {"one_sum": problem.view and problem.seed % 2 == 1, "runs": runs}
    got_dq, got_dk, got_dv = kernels.backward(*arguments, **options)
    if deterministic:
        again = kernels.backward(*arguments, **options)[1]
        results["again"] = 0.0 if torch.equal(got_dk, again) else math.inf
    if got_dv is None:
        dk = dk.clone()
        dk[..., : problem.d_v] += dv
    else:
        results["dv"] = _error(got_dv, dv)
    return results | {"dq": _error(got_dq, dq), "dk": _error(got_dk, dk)}


def check_loss(kernels: Any, problem: KernelProblem, device: str, deterministic: bool = False) -> dict[str, float]:
    """Relative errors of `loss` and `loss_backward`."""
    x, scale, softmax_scale = problem.numbers(device), problem.d_i**-0.5, problem.d**-0.5
    rows = _rows(problem, device)[:, :1].contiguous()
    named = _named(problem, rows)[:, 0]
    group = problem.h_q // problem.h_kv
    attention = torch.einsum(
        "nhgd,mhd->nhgm", x["q"].double().unflatten(1, (problem.h_kv, group)), x["k"][: problem.m].double()
    ).flatten(1, 2)
    attention = (attention * softmax_scale).masked_fill(~named[:, None], -math.inf)
    lse = attention.logsumexp(-1)
    mass = (attention - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp().sum(1)
    mass = mass / mass.sum(-1, keepdim=True).clamp_min(1e-300)
    names = "q_index", "k_index", "weights"
    q_index, k_index, weights = (x[name].double().detach().requires_grad_() for name in names)
    marks = (torch.einsum("nhd,md->nhm", q_index, k_index) * scale).relu() * weights[..., None]
    logs = marks.sum(1).masked_fill(~named, -math.inf).logsumexp(-1, keepdim=True)
    logs = marks.sum(1) - logs.masked_fill(logs.isinf(), 0.0)
    loss = torch.where(mass > 0, mass * (mass.clamp_min(1e-300).log() - logs), 0.0).sum(-1)
    grads = torch.autograd.grad((loss * x["dloss"].double()).sum(), (q_index, k_index, weights))
    arguments = *(x[name] for name in names), x["q"], x["k"][: problem.m], lse.float(), rows, scale, softmax_scale
    found = {"loss": _error(kernels.loss(*arguments), loss)}
    dloss = x["dloss"].masked_fill(~named.any(-1), math.nan)
    got = kernels.loss_backward(*arguments, dloss, deterministic)
    return found | {f"d{name}": _error(a, b) for name, a, b in zip(names, got, grads, strict=True)}
