"""`fa4-dry`: backend fa4 on a CPU, for tests.

All of `Fa4Backend` runs as on a GPU: its checks, the trace of scores, tables of places, padded head dims, recorded
launches and the arguments of each launch. Only FlashAttention 4 itself is replaced. Its two functions compute in plain
PyTorch, from these arguments and from nothing else. A traced program is evaluated node by node.

`taken` has the kernel of each launch. So a test can say that a plain call takes a plain kernel.

    CP_TESTS_BACKEND=fa4-dry python -m pytest tests/integrations      # `install_asked` for all tests of a run
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, cast
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

from cp_fast.kernels.attention import choose_backend as backends
from cp_fast.kernels.attention.fa4 import fa4_backend
from cp_fast.kernels.attention.fa4.fa4_backend import Fa4Backend
from cp_fast.kernels.attention.fa4.scores import score_kernels
from cp_fast.kernels.attention.fa4.scores.expressions import BOOL, FLOAT, INT, LONG, Expression
from cp_fast.kernels.attention.fa4.scores.launch_program import ScoreProgram
from cp_fast.kernels.attention.fa4.scores.score_tiles import launch_tensors
from cp_ref.batches.tensors import wide_dtype
from cp_ref.calls.scores import kept_by_dropout
from cp_ref.schedules.words import Feature

__all__ = ["OPERATIONS", "Fa4Dry", "Kernel", "dry", "evaluated", "install", "install_asked", "taken"]

Tensor = torch.Tensor


class Kernel(NamedTuple):
    """What a compiled kernel of the library is kept by."""

    name: str  # of the library's function
    dtype: torch.dtype
    dims: tuple[int, int]  # d_qk, d_v
    group: int  # query heads of a kv head
    window: tuple[bool, bool]  # whether the left and the right side are bounded
    softcap: float
    program: str  # hash of the scores' program; "" for a plain kernel
    pack_gqa: bool | None
    used: bool  # whether segments lie anywhere
    deterministic: bool


taken: list[Kernel] = []
"""The kernels of all launches since a test cleared it, in order."""


class Fa4Dry(Fa4Backend):
    """FlashAttention 4's arguments; numbers of PyTorch on a CPU, in any float dtype."""

    name: str = "fa4-dry"
    features: frozenset[Feature] = Fa4Backend.features - {Feature.CUDA} | {
        Feature.CPU,
        Feature.FLOAT32,
        Feature.FLOAT64,
    }

    def why_not(self) -> str | None:
        """None: it works everywhere."""
        return None


def install() -> None:
    """Make it the first choice of this process, until its end."""
    if backends.BACKENDS[0].name != Fa4Dry.name:
        backends.BACKENDS = (Fa4Dry(), *backends.BACKENDS)
        for module, name, value in _stand_ins():
            setattr(module, name, value)


def install_asked() -> None:
    """`install` where the variable CP_TESTS_BACKEND asks for it: in pytest's process, and in those that it starts."""
    asked = os.environ.get("CP_TESTS_BACKEND", "")
    if asked not in ("", "fa4-dry"):
        raise ValueError(f"CP_TESTS_BACKEND is {asked!r}; it must be fa4-dry")
    if asked:
        install()


@contextmanager
def dry() -> Iterator[list[Kernel]]:
    """Make it the first choice for a while. Yields `taken`, which is empty at first."""
    taken.clear()
    if backends.BACKENDS[0].name == Fa4Dry.name:
        yield taken
        return
    patches = [patch.object(module, name, value) for module, name, value in _stand_ins()]
    patches.append(patch.object(backends, "BACKENDS", (Fa4Dry(), *backends.BACKENDS)))
    for one in patches:
        one.start()
    try:
        yield taken
    finally:
        for one in patches:
            one.stop()


def _stand_ins() -> list[tuple[ModuleType, str, Any]]:
    """What stands for the library's modules: module, name, value."""
    library = ModuleType("flash_attn.cute.interface, dry")
    vars(library).update(_flash_attn_fwd=_function(_forward_call), _flash_attn_bwd=_function(_backward_call))
    vars(library).update(FlashAttentionForwardSm90=None, FlashAttentionBackwardSm90=None)
    return [
        (fa4_backend, "_interface", lambda: library),
        (score_kernels, "library", lambda _: SimpleNamespace(Int32=int)),
        (score_kernels, "forward_kernel", lambda: None),
        (score_kernels, "backward_kernel", lambda: None),
    ]


# ---- the library's two functions: they check, allocate, and launch a compiled kernel


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the library, with its cache of compiled kernels."""

    def function(**arguments: Any) -> Any:
        return call(lambda key: cast(Any, function).compile_cache[key], **arguments)

    cast(Any, function).compile_cache = _Kernels()
    return function


class _Kernels(dict[Any, Any]):
    """Compiled kernels by key. Any kernel can be compiled."""

    cache: ClassVar[Mapping[Any, Any]] = {}

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: Any) -> Callable[..., None]:
        kernel = _forward if key.name == "forward" else _backward

        def launch(*arguments: Any) -> None:
            taken.append(key)
            with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):  # its work is nobody's operators
                kernel(*arguments)

        return launch


def _forward_call(
    kernel: Callable[[Kernel], Any],
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float,
    softcap: float | None,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    return_lse: bool,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    score_mod: ScoreProgram | None = None,
    aux_tensors: Sequence[Tensor] = (),
    aux_scalars: tuple[int, ...] = (),
    pack_gqa: bool | None = None,
) -> tuple[Tensor, Tensor]:
    band = window_size_left, window_size_right
    key = _key("forward", q, k, v, band, softcap, score_mod, pack_gqa, used=seqused_q is not None)
    assert return_lse
    assert not causal
    if score_mod is not None and score_mod.dropout_p:
        assert pack_gqa is False, "rows of several heads would not share random words"
    _check_lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if out is None:
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device).fill_(torch.nan)
    if lse is None:
        lse = torch.empty(q.shape[1], q.shape[0], dtype=wide_dtype(q.dtype), device=q.device).fill_(torch.nan)
    assert (*q.shape[:2], v.shape[2], q.dtype) == (*out.shape, out.dtype)
    assert lse.shape == (q.shape[1], q.shape[0])
    places = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    numbers = softmax_scale, softcap or 0.0, *band
    kernel(key)(q, k, v, out, lse, *places, *numbers, score_mod, tuple(aux_tensors), *aux_scalars)
    return out, lse


def _backward_call(
    kernel: Callable[[Kernel], Any],
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    score_mod: ScoreProgram | None = None,
    score_mod_bwd: ScoreProgram | None = None,
    aux_tensors: Sequence[Tensor] = (),
    aux_scalars: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    band = window_size_left, window_size_right
    key = _key("backward", q, k, v, band, softcap, score_mod, None, deterministic=deterministic)
    assert not causal
    assert score_mod is score_mod_bwd
    assert key.group == 1 or key.dims[0] == key.dims[1], "GQA backward requires head_dim == head_dim_v"
    _check_lengths(cu_seqlens_q, cu_seqlens_k)
    assert lse.is_contiguous()
    assert lse.dtype == wide_dtype(q.dtype)
    if deterministic:  # they size the semaphores
        longest = ((int(x.diff().max()) if x.numel() > 1 else 0) for x in (cu_seqlens_q, cu_seqlens_k))
        assert max_seqlen_q >= next(longest)
        assert max_seqlen_k >= next(longest)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    numbers = softmax_scale, softcap, *band
    places = cu_seqlens_q, cu_seqlens_k, None, None
    operands = q, k, v, out, dout, lse, dlse
    kernel(key)(*operands, *grads, *places, *numbers, score_mod, tuple(aux_tensors), *aux_scalars)
    return grads


def _key(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: tuple[int | None, int | None],
    softcap: float | None,
    program: ScoreProgram | None,
    pack_gqa: bool | None,
    *,
    used: bool = False,
    deterministic: bool = False,
) -> Kernel:
    """The kernel of a call, whose tensors it checks as the library does."""
    assert k.shape[:2] == v.shape[:2]
    assert q.shape[1] % k.shape[1] == 0
    assert all(x.shape[2] % 8 == 0 and x.shape[2] <= 256 for x in (q, k, v)), "head dims are multiples of 8"
    assert all(0 not in x.stride() for x in (q, k, v)), "a stride of zero is another shape class"
    assert not all(side is not None and side < 0 for side in band), "both sides negative count as unbounded"
    bounded = band[0] is not None, band[1] is not None
    hashed = "" if program is None else program.__cute_hash__
    dims, group = (q.shape[2], v.shape[2]), q.shape[1] // k.shape[1]
    return Kernel(name, q.dtype, dims, group, bounded, softcap or 0.0, hashed, pack_gqa, used, deterministic)


def _check_lengths(*lengths: Tensor | None) -> None:
    assert all(x is None or (x.dtype == torch.int32 and x.is_contiguous()) for x in lengths)


# ---- the kernels, segment by segment


class _Segment:
    """One segment of a launch: its rows and columns, and what a program reads there."""

    def __init__(
        self, number: int, rows: slice, columns: slice, program: ScoreProgram | None, aux: Sequence[Tensor], first: int
    ) -> None:
        self.rows, self.columns, self.program = rows, columns, program
        if program is None:
            return
        given = dict(zip(launch_tensors(program), aux, strict=True))
        if program.places.by_segment:
            b, q_first, diagonal, k_first = given["places"].view(4, -1)[:, number]
            local = torch.arange(rows.stop - rows.start, dtype=torch.int32)
            at = [b.expand(len(local)), q_first + local, diagonal + local]
            keys = k_first + torch.arange(columns.stop - columns.start, dtype=torch.int32)
        else:
            at = [given[name][rows] for name in ("b", "q_idx", "diagonal")]
            keys = given["kv_idx"][columns]
        self.first, self.seed = first, given.get("seed")
        self.b, self.i, self.d = (x[:, None] for x in at)
        self.j, sizes = keys[None], dict(program.traced.sizes)
        self.captured = {name: given[name].reshape(-1, *sizes[name]) for name in program.traced.captured}

    def places(self, heads: int) -> list[Tensor]:
        """b, h, q_idx, kv_idx and diagonal of each pair; int32, of the shape [heads, rows, columns]."""
        h = (self.first + torch.arange(heads, dtype=torch.int32))[:, None, None]
        return list(torch.broadcast_tensors(self.b, h, self.i, self.j, self.d))

    def factors(self, heads: int, dtype: torch.dtype) -> Tensor | None:
        """What dropout multiplies the probabilities by."""
        if self.program is None or not self.program.dropout_p:
            return None
        b, h, i, j, _ = self.places(heads)
        assert self.seed is not None
        kept = kept_by_dropout(b, h, i, j, self.seed.view(torch.int64), self.program.dropout_p)
        return kept.to(dtype) / (1 - self.program.dropout_p)


def _segments(
    cu_q: Tensor, cu_k: Tensor, used_q: Tensor | None, used_k: Tensor | None, *scores: Any
) -> Iterator[_Segment]:
    program, aux, *first = scores
    lengths = [cu.diff().tolist() if used is None else used.tolist() for cu, used in ((cu_q, used_q), (cu_k, used_k))]
    starts = [cu.tolist() for cu in (cu_q, cu_k)]
    for n, (rows, columns) in enumerate(zip(*lengths, strict=True)):
        if rows and columns:
            spans = slice(starts[0][n], starts[0][n] + rows), slice(starts[1][n], starts[1][n] + columns)
            yield _Segment(n, *spans, program, aux, *(first or (0,)))


def _scores(
    q: Tensor, k: Tensor, segment: _Segment, scale: float, softcap: float, left: int | None, right: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """scale * q.k, the scores before the mask, and which pairs are seen: [h_q, rows, columns]."""
    queries, keys = q[segment.rows].transpose(0, 1), k[segment.columns].transpose(0, 1)
    products = scale * queries @ keys.repeat_interleave(q.shape[1] // k.shape[1], 0).mT
    lq, lk = products.shape[1:]
    apart = torch.arange(lk)[None] - torch.arange(lq)[:, None] - (lk - lq)
    seen = torch.ones(lq, lk, dtype=torch.bool)
    if left is not None:
        seen &= apart >= -left
    if right is not None:
        seen &= apart <= right
    scores = softcap * torch.tanh(products / softcap) if softcap else products
    if segment.program is not None:
        scores = evaluated(
            segment.program.traced.modified, scores, scores, segment.places(q.shape[1]), segment.captured
        )
    return products, scores.to(products.dtype), seen


def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any) -> None:
    """Writes out and lse, for the rows of segments alone."""
    places, numbers, scores = others[:4], others[4:8], others[8:]
    q, k, v = (x.to(lse.dtype) for x in (q, k, v))
    for segment in _segments(*places, *scores):
        _, s, seen = _scores(q, k, segment, *numbers)
        s = s.masked_fill(~seen, -torch.inf)
        total = lse[:, segment.rows] = s.logsumexp(-1)
        p = (s - total.masked_fill(total == -torch.inf, torch.inf)[..., None]).exp()
        if (factors := segment.factors(q.shape[1], p.dtype)) is not None:
            p = p * factors
        values = v[segment.columns].transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], 0)
        out[segment.rows] = (p @ values).transpose(0, 1).to(out.dtype)


def _backward(*given: Any) -> None:
    """Writes dq, dk and dv."""
    q, k, v, out, dout, lse, dlse, dq, dk, dv, *others = given
    places, numbers, scores = others[:4], others[4:8], others[8:]
    q, k, v, out, dout = (x.to(lse.dtype) for x in (q, k, v, out, dout))
    group, sums = q.shape[1] // k.shape[1], [torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v)]
    delta = (out * dout).sum(-1).T
    if dlse is not None:
        delta = delta - dlse
    for segment in _segments(*places, *scores):
        scale, softcap, *_ = numbers
        products, s, seen = _scores(q, k, segment, *numbers)
        norm = lse[:, segment.rows, None]
        p = (s - norm.masked_fill(norm == -torch.inf, torch.inf)).exp().masked_fill(~seen, 0.0)
        douts = dout[segment.rows].transpose(0, 1)
        values, keys = (x[segment.columns].transpose(0, 1).repeat_interleave(group, 0) for x in (v, k))
        dp = douts @ values.mT
        factors = segment.factors(q.shape[1], p.dtype)
        kept_p = p
        if factors is not None:
            dp, kept_p = dp * factors, p * factors
        ds = p * (dp - delta[:, segment.rows, None])
        if segment.program is not None:
            pulled = segment.program.traced.pulled_back
            back = evaluated(pulled, products, ds, segment.places(q.shape[1]), segment.captured).to(ds.dtype)
            ds = torch.where(ds == 0, 0.0, back) if segment.program.guarded else back
        if softcap:
            ds = ds * (1 - torch.tanh(products / softcap) ** 2)
        queries = q[segment.rows].transpose(0, 1)
        sums[0][segment.rows] += (scale * ds @ keys).transpose(0, 1)
        heads = k.shape[1], group
        sums[1][segment.columns] += (scale * ds.mT @ queries).unflatten(0, heads).sum(1).transpose(0, 1)
        sums[2][segment.columns] += (kept_p.mT @ douts).unflatten(0, heads).sum(1).transpose(0, 1)
    for result, total in zip((dq, dk, dv), sums, strict=True):
        result.copy_(total)


# ---- expressions


DTYPES = {FLOAT: torch.float64, INT: torch.int32, LONG: torch.int64, BOOL: torch.bool}
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "convert": lambda kind, x: torch.as_tensor(x).to(DTYPES[kind]),
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda _, a, b: a * b,
    "div": lambda _, a, b: a / b,
    "floor_div": lambda _, a, b: a // b,
    "mod": lambda _, a, b: a % b,
    "neg": lambda _, x: -x,
    "abs": lambda _, x: abs(x),
    "minimum": lambda _, a, b: torch.minimum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b))),
    "maximum": lambda _, a, b: torch.maximum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b))),
    "where": lambda kind, c, a, b: torch.where(
        c, torch.as_tensor(a).to(DTYPES[kind]), torch.as_tensor(b).to(DTYPES[kind])
    ),
    "eq": lambda _, a, b: a == b,
    "ne": lambda _, a, b: a != b,
    "lt": lambda _, a, b: a < b,
    "le": lambda _, a, b: a <= b,
    "gt": lambda _, a, b: a > b,
    "ge": lambda _, a, b: a >= b,
    "and": lambda _, a, b: a & b,
    "or": lambda _, a, b: a | b,
    "xor": lambda _, a, b: a ^ b,
    "not": lambda _, x: ~x,
    **{
        name: (lambda function: lambda _, x: function(x))(getattr(torch, name))
        for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid")
    },
}


def evaluated(
    expression: Expression, score: Tensor, grad: Tensor, at: Sequence[Tensor], captured: Mapping[str, Tensor]
) -> Tensor:
    """An expression's values, in float64.

    Args:
        score, grad: of any shape.
        at: b, h, q_idx, kv_idx and diagonal, of the same shape.
        captured: tensors by name. An index outside one gives NaN.
    """
    outside = torch.zeros(score.shape, dtype=torch.bool)

    def load(name: str, indices: Sequence[Any]) -> Tensor:
        nonlocal outside
        x, inside = captured[name] if captured[name].dim() else captured[name][None], []
        for size, index in zip(x.shape, indices, strict=False):
            index = torch.as_tensor(index).long()
            index = torch.where(index < 0, index + size, index)
            outside = outside | (index < 0) | (index >= size)
            inside.append(index.clamp(0, size - 1))
        x = x[tuple(inside)] if inside else x[0]
        return x.double() if x.is_floating_point() else x

    names = ("score", "grad", "b", "h", "q_idx", "kv_idx", "diagonal")
    leaves = dict(zip(names, (score.double(), grad.double(), *at), strict=True))
    values: list[Any] = []
    for node in expression.nodes:
        inputs = [values[n] for n in node.inputs]
        if node.op == "leaf":
            values.append(leaves[node.value])
        elif node.op == "constant":
            values.append(node.value)
        else:
            values.append(load(node.value, inputs) if node.op == "load" else OPERATIONS[node.op](node.kind, *inputs))
    result = torch.as_tensor(values[expression.result], dtype=torch.float64).expand(score.shape)
    return torch.where(outside, torch.nan, result)
