"""Random problems for Triton's kernels of linear layers, and what these must give: sums chunk by chunk in float64, with
PyTorch's own gradients. Of selective scans, row by row; of convolutions, what plain PyTorch gives.

legend   n = rows, h = heads of q and k, h_v = heads of v
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from cp_fast.kernels.convolution import torch_convolution
from cp_fast.kernels.convolution.torch_convolution import ConvolutionInputs
from cp_fast.kernels.linear.linear_kernels import FragmentRows, LinearInputs, Maps
from cp_fast.layers.linear_plan import LinearTables
from cp_fast.layers.state_tables import scan_table
from cp_ref.calls.linear_calls import LINEAR_KINDS
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.problem import Sequence as Lengths

__all__ = ["CHECKS", "LIMITS", "KernelProblem", "draw", "mistakes"]

LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3}  # ||error|| / ||it||
CHUNK = 64


@dataclass(frozen=True)
class KernelProblem:
    """One drawn problem. lengths: of the fragments, in rows; chosen: those whose maps are made."""

    seed: int
    kind: str
    lengths: tuple[int, ...]
    chosen: tuple[int, ...]
    h: int
    h_v: int
    d_k: int
    d_v: int
    dfinal: bool
    kernel_size: int
    channels: int
    bias: bool
    silu: bool
    numbers: int
    dtype: torch.dtype

    @property
    def cu(self) -> list[int]:
        return [0, *accumulate(self.lengths)]


def draw(seed: int, dtype: torch.dtype) -> KernelProblem:
    """Three seeds in a row have three kinds, and each has a scan of mamba."""
    rng = random.Random(seed)
    kind, h = LINEAR_KINDS[:3][seed % 3], rng.choice([1, 2])
    lengths = tuple(rng.choice([1, 20, 64, 65, 130]) for _ in range(rng.randint(1, 3)))
    chosen = tuple(rng.sample(range(len(lengths)), rng.randint(1, len(lengths))))
    return KernelProblem(
        seed=seed, kind=kind, lengths=lengths, chosen=chosen,
        h=h, h_v=h * (1 if kind == "kda" else rng.choice([1, 2])), d_k=rng.choice([8, 16, 24, 40]),
        d_v=rng.choice([8, 16, 40, 72]), dfinal=rng.random() < 0.5, kernel_size=rng.choice([1, 2, 4]),
        channels=rng.choice([5, 16, 40]), bias=rng.random() < 0.5, silu=rng.random() < 0.5,
        numbers=rng.choice([1, 3, 16]), dtype=dtype,
    )  # fmt: skip


class Rows(NamedTuple):
    """The rows of all fragments, as the kernels take them."""

    q: torch.Tensor  # [n, h, d_k]
    k: torch.Tensor
    w: torch.Tensor | None  # [n, h_v, d_k]
    u: torch.Tensor  # [n, h_v, d_v]
    dout: torch.Tensor  # [n, h_v, d_v]
    dv: torch.Tensor | None  # [n, h_v, d_v]
    g: torch.Tensor | None  # [n, h_v], sums in every chunk, in powers of 2
    gk: torch.Tensor | None  # [n, h_v, d_k]

    def of(self, rows: slice, h_v: int) -> Rows:
        """Some rows in float64, with h_v heads of q and k."""
        q, k, *rest = (None if x is None else x[rows].double() for x in self)
        assert q is not None
        assert k is not None
        return Rows(*(x.repeat_interleave(h_v // x.shape[1], 1) for x in (q, k)), *rest)  # type: ignore[arg-type]


class _Numbers:
    """Tensors of a problem, drawn on the CPU."""

    def __init__(self, problem: KernelProblem, device: str) -> None:
        self._problem, self._device = problem, device
        self._generator = torch.Generator().manual_seed(problem.seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, size: float = 1.0) -> torch.Tensor:
        x = size * torch.randn(*shape, generator=self._generator)
        return x.to(dtype or self._problem.dtype).to(self._device)

    def decays(self, *shape: int) -> torch.Tensor:
        """Sums of what is below zero, which begin in every chunk anew."""
        each = -0.05 * torch.rand(self._problem.cu[-1], *shape, generator=self._generator)
        for rows in _chunks(self._problem.cu):
            each[rows] = each[rows].cumsum(0)
        return each.to(self._device)

    def rows(self) -> Rows:
        p = self._problem
        n, k, v = p.cu[-1], (p.h_v, p.d_k), (p.h_v, p.d_v)
        small, delta = p.d_k**-0.5, p.kind != "mamba2"
        return Rows(
            self.normal(n, p.h, p.d_k), self.normal(n, p.h, p.d_k, size=small),
            self.normal(n, *k, size=small / 4) if delta else None, self.normal(n, *v), self.normal(n, *v),
            self.normal(n, *v) if delta else None,
            None if p.kind == "kda" else self.decays(p.h_v), self.decays(*k) if p.kind == "kda" else None,
        )  # fmt: skip


def _chunks(cu: Sequence[int]) -> Iterator[slice]:
    for start, stop in pairwise(cu):
        yield from (slice(row, min(row + CHUNK, stop)) for row in range(start, stop, CHUNK))


def mistakes(problem: KernelProblem, device: str) -> list[str]:
    """All results that are too far from what they must be."""
    found = list[str]()
    for check in CHECKS:
        for name, mine, wanted in check(problem, device):
            error = _error(mine, wanted)
            if not error <= LIMITS[problem.dtype]:
                found.append(f"{check.__name__}: {name}: {error:.1e}")
    return found


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far it is, relative; infinite for another shape or a number that is not finite."""
    if found.shape != wanted.shape or not bool(found.isfinite().all()):
        return math.inf
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


Checked = Iterator[tuple[str, torch.Tensor, torch.Tensor]]  # the name of a result, what a kernel gave, what it must be


# ---- maps of fragments


def _walk(x: Rows, h_v: int, cu: Sequence[int], state: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A fragment from a state [h_v, d_k, d_v]: the state behind it, and what its rows' gradients make of a loss."""
    loss = state.new_zeros(())
    for rows in _chunks(cu):
        q, k, w, u, dout, dv, g, gk = x.of(rows, h_v)
        new = u if w is None else u - torch.einsum("thk,hkv->thv", w, state)
        if dv is not None:
            loss = loss + (dv * new).sum()
        if g is not None:
            q, new = q * g.exp2()[..., None], new * (g[-1] - g).exp2()[..., None]
        loss = loss + scale * (dout * torch.einsum("thk,hkv->thv", q, state)).sum()
        last = g[-1, :, None, None] if g is not None else 0.0 if gk is None else gk[-1, :, :, None]
        state = state * torch.as_tensor(last).exp2() + torch.einsum("thk,thv->hkv", k, new)
    return state, loss


def check_maps(problem: KernelProblem, device: str) -> Checked:
    """M and B of the chosen fragments, and D, to which M^T of a gradient may be added."""
    from cp_fast.kernels.linear.fla import triton_kernels  # which asks for the interpreter when it is imported

    numbers, h_v, scale = _Numbers(problem, device), problem.h_v, 0.3
    x, spans = numbers.rows(), [problem.cu[i : i + 2] for i in problem.chosen]
    table = torch.tensor(spans, dtype=torch.int64, device=device)
    shape = h_v, problem.d_k, problem.d_v
    dfinal = numbers.normal(len(spans), *shape, dtype=torch.float32) if problem.dfinal else None
    m, b = triton_kernels.forward_maps(x.k, x.w, x.u, table, g=x.g, gk=x.gk)
    d = triton_kernels.reverse_maps(x.q, x.k, x.w, x.dout, x.dv, table, dfinal, scale, g=x.g, gk=x.gk)
    for n, span in enumerate(spans):
        state = torch.zeros(*shape, dtype=torch.float64, device=device, requires_grad=True)
        after, loss = _walk(x, h_v, span, state, scale)
        yield "B", b[n], after.detach()
        if dfinal is not None:
            loss = loss + (dfinal[n].double() * after).sum()
        (wanted,) = torch.autograd.grad(loss, state)
        yield "D", d[n], wanted
        one = torch.eye(problem.d_k, dtype=torch.float64, device=device).expand(h_v, -1, -1)
        nothing = x.u.new_zeros(len(x.u), h_v, problem.d_k)
        matrix, _ = _walk(x._replace(u=nothing, dout=nothing, dv=None), h_v, span, one, scale)
        yield "M", m[n], matrix if m.dim() > 2 else matrix[:, 0, 0]


# ---- maps one after the other


def check_scans(problem: KernelProblem, device: str) -> Checked:
    """The states before the steps of random scans and, of matrices, the composition of their maps."""
    from cp_fast.kernels.linear.fla import triton_kernels

    rng, numbers, factors = random.Random(problem.seed), _Numbers(problem, device), problem.kind == "mamba2"
    h_v, d_k, d_v, slots = problem.h_v, problem.d_k, problem.d_v, rng.randint(1, 4)
    shape, size = ((slots, h_v), 1.0) if factors else ((slots, h_v, d_k, d_k), d_k**-0.5)
    m = numbers.normal(*shape, dtype=torch.float32, size=size)
    maps = Maps(m, numbers.normal(slots, h_v, d_k, d_v, dtype=torch.float32))
    states = numbers.normal(2, h_v, d_k, d_v, dtype=torch.float32)
    scans = [(rng.choice([-1, 0, 1]), rng.choices(range(slots), k=rng.randint(1, 3))) for _ in range(rng.randint(1, 4))]
    given, transposed = rng.choice([None, states]), rng.random() < 0.5
    places = iter(rng.sample(range(count := sum(len(scan) + 1 for _, scan in scans)), count))
    steps = [(start, [(slot, next(places)) for slot in (*scan, -1)]) for start, scan in scans]
    table = scan_table(steps, torch.device(device))
    before = triton_kernels.states_before(table, maps, given, count, transposed=transposed)
    for start, scan in steps:
        state = _state(states, -1 if given is None else start)
        for slot, place in scan:
            yield "state before", before[place], state
            state = state if slot < 0 else _product(maps.m[slot], state, transposed) + maps.b[slot]
    if factors:
        return
    table = scan_table([(start, [(slot, -1) for slot in scan]) for start, scan in scans], torch.device(device))
    found = triton_kernels.composed_maps(table, maps, states if transposed else None, transposed=transposed)
    for n, (start, scan) in enumerate(scans):
        state = _state(states, start if transposed else -1)
        matrix = torch.eye(d_k, dtype=torch.float64, device=device).expand(h_v, -1, -1)
        for slot in scan:
            state = _product(maps.m[slot], state, transposed) + maps.b[slot]
            matrix = _product(maps.m[slot], matrix, transposed)
        yield "composed B", found.b[n], state
        if not transposed:
            yield "composed M", found.m[n], matrix


def _state(states: torch.Tensor, start: int) -> torch.Tensor:
    return torch.zeros_like(states[0], dtype=torch.float64) if start < 0 else states[start].double()


def _product(m: torch.Tensor, state: torch.Tensor, transposed: bool) -> torch.Tensor:
    if m.dim() == 1:
        return m.double()[:, None, None] * state
    return (m.mT if transposed else m).double() @ state


# ---- gradients inside chunks


def check_chunk_gradients(problem: KernelProblem, device: str) -> Checked:
    """Those of q, k, w and g, for one decay a head."""
    if problem.kind == "kda":
        return
    from cp_fast.kernels.linear.fla import triton_kernels

    numbers, scale = _Numbers(problem, device), 0.3
    x, parts = numbers.rows(), list(_chunks(problem.cu))
    assert x.g is not None
    h, dh = (numbers.normal(len(parts), problem.h_v, problem.d_k, problem.d_v, dtype=torch.float32) for _ in range(2))
    numbered = [(f, i) for f, length in enumerate(problem.lengths) for i in range(-(-length // CHUNK))]
    cu, chunks = (torch.tensor(it, dtype=torch.int64, device=device) for it in (problem.cu, numbered))
    found = triton_kernels.chunk_gradients(x.q, x.k, x.u, x.g, h, x.dout, dh, x.dv, scale, cu, chunks)
    for n, rows in enumerate(parts):
        leaves = [x.q[rows].double(), x.k[rows].double(), x.g[rows].double() * math.log(2)]
        q, k, g = leaves = [leaf.requires_grad_() for leaf in leaves]
        q, k = (one.repeat_interleave(problem.h_v // problem.h, 1) for one in (q, k))
        v, dout, before = x.u[rows].double(), x.dout[rows].double(), h[n].double()
        earlier = torch.ones(len(q), len(q), dtype=torch.bool, device=device).tril()[..., None]
        apart = torch.where(earlier, g[:, None] - g[None], -math.inf)
        scores = torch.einsum("ihk,jhk->ijh", q, k) * apart.exp()
        out = torch.einsum("ihk,hkv->ihv", q * g.exp()[..., None], before) + torch.einsum("ijh,jhv->ihv", scores, v)
        after = before * g[-1].exp()[:, None, None] + torch.einsum("jhk,jhv->hkv", k * (g[-1] - g).exp()[..., None], v)
        wanted = torch.autograd.grad(scale * (out * dout).sum() + (after * dh[n].double()).sum(), leaves)
        for name, mine, exact in zip(("dq", "dk", "dg"), (found[0], found[1], found[3]), wanted, strict=True):
            yield name, mine[rows], exact
        if x.dv is not None:
            assert found[2] is not None
            yield "dw", found[2][rows], -torch.einsum("thv,hkv->thk", x.dv[rows].double(), before)


# ---- selective scans


def check_selective_scan(problem: KernelProblem, device: str) -> Checked:
    """Both passes over fragments with states that enter, the maps of the chosen ones and their gradients."""
    from cp_fast.kernels.linear.triton_scan import ScanBackward, ScanForward

    numbers, h, scale = _Numbers(problem, device), problem.h, -0.3
    n, channels, d_k, fragments = problem.cu[-1], h * problem.channels, problem.numbers, len(problem.lengths)
    q, k = (numbers.normal(n, h, d_k) for _ in range(2))
    v, dout = (numbers.normal(n, channels, 1) for _ in range(2))
    steps = 0.3 * numbers.normal(n, channels, dtype=torch.float32).abs()
    rates = -numbers.normal(channels, d_k, dtype=torch.float32).abs()
    initial, final = (numbers.normal(fragments, channels, d_k, 1, dtype=torch.float32) for _ in range(2))
    enters, dfinal = (initial if problem.seed % 2 else None), (final if problem.dfinal else None)
    inputs = LinearInputs(q, k, v, steps, None, scale, "mamba", rates)
    rows, chosen = FragmentRows(tuple(problem.cu), torch.device(device)), list(problem.chosen)
    forward, backward = ScanForward(inputs, rows), ScanBackward(inputs, rows, enters, dout)
    maps, (out, ends) = forward.maps(chosen), forward.run(enters, final=True)
    d = backward.reverse_maps(chosen, None if dfinal is None else dfinal[chosen])
    grads = backward.run(dfinal)
    assert ends is not None

    start = torch.zeros_like(initial) if enters is None else enters
    leaves = [x.double().requires_grad_() for x in (q, k, v, steps, rates, start)]
    wanted_out, wanted_ends = _scanned(problem, scale, *leaves)
    ones, zeros = torch.ones_like(initial), torch.zeros_like(initial)
    nothing = (x.double() for x in (q, k, torch.zeros_like(v), steps, rates, ones))
    _, products = _scanned(problem, scale, *nothing)
    _, shifts = _scanned(problem, scale, *(x.detach() for x in leaves[:-1]), zeros.double())
    loss = (wanted_out * dout.double()).sum()
    if dfinal is not None:
        loss = loss + (wanted_ends * dfinal.double()).sum()
    wanted = torch.autograd.grad(loss, leaves)
    yield "out", out, wanted_out.detach()
    yield "final", ends, wanted_ends.detach()
    yield "M", maps.m, products[chosen][..., 0]
    yield "B", maps.b, shifts[chosen]
    yield "D", d, wanted[5][chosen]
    found = grads.dq, grads.dk, grads.dv, grads.dg, grads.dA
    for name, mine, exact in zip(("dq", "dk", "dv", "dg", "dA"), found, wanted, strict=False):
        assert mine is not None
        yield name, mine, exact
    assert (grads.dinitial is None) == (enters is None)
    if grads.dinitial is not None:
        yield "dinitial", grads.dinitial, wanted[5]


def _scanned(problem: KernelProblem, scale: float, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Out, and the states behind all fragments, one row after the other."""
    q, k, v, steps, rates, initial = given
    q, k = (x.repeat_interleave(problem.channels, 1) for x in (q, k))
    outs, ends = list[torch.Tensor](), list[torch.Tensor]()
    for state, (start, stop) in zip(initial[..., 0], pairwise(problem.cu), strict=True):
        for i in range(start, stop):
            state = (rates * steps[i, :, None]).exp() * state + k[i] * v[i]
            outs.append(scale * (q[i] * state).sum(-1, keepdim=True))
        ends.append(state[..., None])
    return torch.stack(outs), torch.stack(ends)


# ---- convolutions


def check_convolution(problem: KernelProblem, device: str) -> Checked:
    """One rank of two that share documents, with rows of the other one."""
    from cp_fast.kernels.convolution import triton_convolution

    numbers, seed = _Numbers(problem, device), problem.seed
    documents = tuple(Lengths(n, n, -(-n // 4) * 4, -(-n // 4) * 4) for n in problem.lengths)
    sizes: dict[str, Any] = {"heads_q": 1, "heads_kv": 1, "d_qk": 8, "d_v": 8, "attn_mask_type": "padding_causal"}
    layout = ("dual_chunk", "contiguous")[seed // 3 % 2]
    batch = Problem(2, documents, qkv_format="thd", layout=layout, **sizes)
    halos = LinearTables(batch, seed % 2, torch.device(device)).halo(problem.kernel_size)
    n, channels = len(halos.reads.slots), problem.channels
    x, halo = numbers.normal(n, channels), numbers.normal(halos.zeros - n, channels)
    weight, dout = numbers.normal(channels, problem.kernel_size), numbers.normal(n, channels)
    bias = numbers.normal(channels) if problem.bias else None
    given = ConvolutionInputs(x, halo, halos.reads, weight, bias, problem.silu)
    bias = None if bias is None else bias.double()
    wide = ConvolutionInputs(x.double(), halo.double(), halos.reads, weight.double(), bias, problem.silu)
    yield "out", triton_convolution.forward(given), torch_convolution.forward(wide)
    found, wanted = triton_convolution.backward(given, dout), torch_convolution.backward(wide, dout.double())
    for name, mine, exact in zip(("dx", "dweight", "dbias"), found, wanted, strict=True):
        assert (mine is None) == (exact is None)
        if mine is not None and exact is not None:
            yield name, mine, exact
    edges = triton_convolution.edges_backward(given, dout, halos.edges_read_by)
    yield "edges", edges, torch_convolution.edges_backward(wide, dout.double(), halos.edges_read_by)


CHECKS = check_maps, check_scans, check_chunk_gradients, check_selective_scan, check_convolution
