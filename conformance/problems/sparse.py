"""Level `sparse`: attention to chosen keys, an indexer's choice and its loss, on every rank of a group.

Each is a case of attention, which says the batch, its mask, its slices and its tensors, and a few fields more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from conformance.case import Case, dtype_of, wide_dtype
from conformance.checks.budgets import Tensors, worst
from conformance.checks.play import play
from conformance.checks.probes import plain_but_for_counts, probe_pairs
from conformance.checks.reference import (
    chosen_keys,
    context_of,
    dense_index_loss,
    dense_index_scores,
    dense_select_keys,
    dense_sparse_attention,
    documents_of,
    results_of,
    values_of_ranks,
)
from conformance.checks.values import compare_result
from conformance.implementation import Implementation
from conformance.problems.capabilities import EVERYTHING, Capabilities
from conformance.problems.features import SCORE_AXES
from conformance.problems.problem import LevelProblem, shape_findings
from conformance.problems.strategies import cases, named_areas, tables
from conformance.tensors import (
    GlobalTensors,
    assemble,
    build,
    packed_rows,
    plan_arguments,
    take_slice,
)
from cp_ref.contract.read_problem import check_layout, check_one_document
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.problem import Sequence as Lengths
from cp_ref.schedules.values import check_choice, parse_call

__all__ = [
    "NAMINGS",
    "SIZES",
    "IndexLoss",
    "SelectKeys",
    "SparseAttention",
    "SparseCase",
    "check_sparse_probes",
    "index_losses",
    "indices_of",
    "selections",
    "sparse_attentions",
]

# ---- problems


NAMINGS = ("mixed", "any", "visible", "shuffled", "twice", "beyond", "all", "nothing")
VALUES = ("whole", "normal")
_PLAIN = Case(Problem(2, (Lengths(8, 8, 8, 8),), "all_gather", qkv_format="thd", dtype="float64"), use_plan=True)


@dataclass(frozen=True)
class SparseCase(LevelProblem):
    """The fields of all three: a case of attention, and how many keys a row may name.

    >>> print(SparseAttention(top_k=2))
    SparseAttention(Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)], cp_comm_type="all_gather", qkv_format="thd", \
dtype="float64"), use_plan=True), top_k=2)
    """

    counts: ClassVar[tuple[str, ...]] = ("top_k",)  # The fields that are positive integers.
    case: Case = _PLAIN
    top_k: int = 3

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        check_one_document(self.problem, "top_k")
        for name in self.counts:
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a positive integer")

    def __str__(self) -> str:
        """One line that `parse` reads back."""
        words = [f"{f.name}={v!r}" for f in fields(self)[1:] if (v := getattr(self, f.name)) != f.default]
        return f"{type(self).__name__}({', '.join([str(self.case), *words])})".replace("'", '"')

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that `str` printed. Raises ValueError on anything else."""
        try:
            _, (case,), values = parse_call(text, [cls.__name__])
            return cls(case=Case.parse(str(case)), **values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot read a problem of {cls.__name__} from {text!r}: {error}") from error

    @property
    def problem(self) -> Problem:
        """The batch."""
        return self.case.problem

    @property
    def cp_size(self) -> int:
        """The size of the group that it needs."""
        return self.problem.cp_size

    @property
    def seed(self) -> int:
        """Of all its values."""
        return self.case.seed

    def on_ranks(self, impl: Implementation, device: str, fn: Any) -> tuple[list[Any], list[str]]:
        """`fn(cp, plan, rank)` on every rank, and findings about ranks that raise."""

        def one(member: Any) -> Any:
            cp = context_of(impl, self.problem, member)
            wishes = {"deterministic": True} if self.case.deterministic else {}
            plan = impl.make_plan(cp=cp, **plan_arguments(self.problem, device), **wishes)
            return fn(cp, plan, member.rank)

        return values_of_ranks(self.cp_size, one, impl.Unsupported, NotImplementedError)


@dataclass(frozen=True)
class SparseAttention(SparseCase):
    """One `sparse_attention`, forward and backward."""

    naming: str = "mixed"  # What indices name: one of NAMINGS.
    by_head: bool = False  # Each kv head has indices of its own.
    latent: bool = False  # v is k[..., :d_v], a view.

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        super().__post_init__()
        check_choice("naming", self.naming, NAMINGS)
        if self.latent and self.problem.d_v > self.problem.d_qk:
            raise ValueError(f"latent is True, and d_v is {self.problem.d_v}; it must be at most d_qk")

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings about results and gradients, against the definition."""
        tensors, indices = build(self.case, device), indices_of(self).to(device)
        chosen = _chosen(self, indices)
        dlse = _as_lse(self.case, packed_rows(self.case, tensors.dout)[..., 0], tensors.dlse)
        if self.problem.softmax_type == "vanilla":  # the gradient of an lse of -inf may be anything
            dlse = dlse.masked_fill(_as_lse(self.case, ~chosen.any(dim=-1).t(), tensors.dlse).bool(), -torch.inf)
        tensors = replace(tensors, dlse=dlse)
        played = play(AsAttention(impl, self, indices), self.case, tensors)
        if played.findings:
            return played.findings

        def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_offset: Any = None) -> Any:
            v = k[..., : self.problem.d_v] if self.latent else v
            out, lse = dense_sparse_attention(self.problem, q, k, v, indices, softmax_offset=softmax_offset)
            return out, lse, lse.new_zeros(self.problem.heads_q)

        wanted = results_of(exact, self.case, tensors, torch.float64)
        if self.problem.dtype not in ("float64", "float32"):
            return _rough(self.problem.dtype, played.results, wanted)
        found: list[str] = []
        for name, got in played.results.items():
            found += compare_result(self.case, tensors, name, got, wanted[name])
        return found


@dataclass(frozen=True)
class SelectKeys(SparseCase):
    """One `select_keys`."""

    counts: ClassVar[tuple[str, ...]] = ("top_k", "heads", "d_index")
    heads: int = 2
    d_index: int = 4
    scale: float | None = None
    values: str = "whole"  # "whole": scores are exact, and many are equal. "normal": some bits decide.

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        super().__post_init__()
        check_choice("values", self.values, VALUES)

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings about the keys that are chosen: against the definition, and against one rank, bit for bit."""
        given = _indexer(self, device)
        found, got = self._play(impl, device, given)
        if found:
            return found
        problem = replace(self.problem, cp_size=1, a2a_size=1, layout="contiguous")
        alone = replace(self, case=replace(self.case, problem=problem))
        found, of_one = alone._play(impl, device, given)
        if found:
            return [f"on one rank: {finding}" for finding in found]
        if not torch.equal(got, of_one):
            wrong = (packed_rows(self.case, got) != packed_rows(self.case, of_one)).any(-1)
            first = int(wrong.nonzero()[0])
            found = [f"{int(wrong.sum())} rows choose other keys than on one rank, the first one is row {first}"]
        return found + _misjudged(self, given, got)

    def _play(self, impl: Implementation, device: str, given: Tensors) -> tuple[list[str], torch.Tensor]:
        case = self.case

        def one(cp: Any, plan: Any, rank: int) -> torch.Tensor:
            sides = {"q_index": "q", "k_index": "kv", "weights": "q"}
            mine = {name: take_slice(case, given[name], side, rank) for name, side in sides.items()}
            got = impl.select_keys(**mine, cp=cp, plan=plan, top_k=self.top_k, scale=self.scale)
            wanted = (*mine["weights"].shape[:-1], self.top_k)
            if wrong := shape_findings("select_keys", got, wanted, [torch.int32]):
                raise AssertionError(wrong[0])
            return got

        ranks, found = self.on_ranks(impl, device, one)
        return found, torch.zeros(0) if found else assemble(case, ranks, "q")


@dataclass(frozen=True)
class IndexLoss(SparseCase):
    """One `index_loss`, forward and backward."""

    counts: ClassVar[tuple[str, ...]] = ("top_k", "heads", "d_index")
    heads: int = 2
    d_index: int = 4
    scale: float | None = None
    naming: str = "mixed"

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        super().__post_init__()
        check_choice("naming", self.naming, NAMINGS)

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings about the loss and its gradients, against the definition."""
        case, problem = self.case, self.problem
        tensors, indices, given = build(case, device), indices_of(self).to(device), _indexer(self, device)
        q, k, v = (x.detach().nan_to_num() for x in (tensors.q, tensors.k, tensors.v))
        _, lse = dense_sparse_attention(problem, q, k, v, indices, softmax_offset=tensors.softmax_offset)
        lse, real = lse.to(tensors.dlse.dtype), tensors.real_q
        dloss = torch.randn(real.shape, generator=self.generator(), dtype=torch.float64)
        dloss = dloss.to(device, wide_dtype(problem.dtype)).masked_fill(~real, torch.nan)

        def one(cp: Any, plan: Any, rank: int) -> Tensors:
            sides = {"q_index": "q", "k_index": "kv", "weights": "q"}
            leaves = {n: take_slice(case, given[n], side, rank).requires_grad_() for n, side in sides.items()}
            constants = take_slice(case, lse, "q", rank, lse=True), *_slices(case, tensors, rank)
            of_rank = take_slice(case, indices, "q", rank)
            loss = impl.index_loss(*leaves.values(), *constants, of_rank, cp=cp, plan=plan, scale=self.scale)
            mine = take_slice(case, dloss, "q", rank)
            wrong = shape_findings("index_loss", loss, mine.shape, [mine.dtype])
            grads = () if wrong else torch.autograd.grad(loss, list(leaves.values()), mine)
            for (name, x), grad in zip(leaves.items(), grads, strict=not wrong):
                wrong += shape_findings(f"d{name}", grad, x.shape, [x.dtype])
            if wrong:
                raise AssertionError(wrong[0])
            return {"loss": loss.detach()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}

        ranks, found = self.on_ranks(impl, device, one)
        if found:
            return found
        exact = [given[n].double().nan_to_num().requires_grad_() for n in ("q_index", "k_index", "weights")]
        loss = dense_index_loss(problem, exact[0], exact[1], exact[2], lse, q, k, indices, scale=self.scale)
        grads = (
            torch.autograd.grad(loss, exact, dloss.double().nan_to_num(), materialize_grads=True)
            if loss.requires_grad
            else [torch.zeros_like(x) for x in exact]
        )
        names, sides = ("loss", "dq_index", "dk_index", "dweights"), ("q", "q", "kv", "q")
        wanted: Tensors = dict(zip(names, (loss.detach(), *grads), strict=True))
        results: Tensors = {
            name: assemble(case, [values[name] for values in ranks], side)
            for name, side in zip(names, sides, strict=True)
        }
        if problem.dtype not in ("float64", "float32"):
            return _rough(problem.dtype, results, wanted)
        for name, got in results.items():
            limit = (1e-9 if problem.dtype == "float64" else 2e-4) * (1 + wanted[name].abs()) * case.magnitude**2
            found += worst(name, got, wanted[name], limit)
        return found


# ---- strategies


_NONE_OF_SCORES = {axis.option: tuple(axis.choices)[:1] for axis in SCORE_AXES}
_HAS = _NONE_OF_SCORES | {"cp_comm_type": ("all_gather", "a2a"), "softmax_type": ("vanilla", "learnable")}
HAS = Capabilities(EVERYTHING.choices | _HAS, wishes=("use_plan", "return_lse", "lse gradient", "deterministic"))
SIZES = (2, 3, 4, 8, 1)
_FEW_ROWS = 150  # Attention slices are drawn for at most this many queries.
_DTYPES = ("float64", "float64", "float32", "bfloat16", "float16")


@st.composite
def sparse_cases(draw: DrawFn, cp_sizes: Sequence[int] = SIZES, dtypes: Sequence[str] = _DTYPES) -> Case:
    """A case whose pairs are of one document each; at times with attention slices inside documents, or with a table as
    its layout.
    """
    kind = draw(st.sampled_from(["any", "areas", "table", "areas"]))
    has = replace(HAS, choices=HAS.choices | ({"qkv_format": ("thd",)} if kind == "areas" else {}))
    case = draw(cases(has, cp_sizes=cp_sizes, dtypes=(draw(st.sampled_from(dtypes)),)))
    case = replace(case, use_plan=True, return_max_logit=False)
    try:
        check_one_document(case.problem, "top_k")
    except ValueError:
        case = replace(case, problem=replace(case.problem, areas=None))
    if kind == "areas" and case.rows("q") <= _FEW_ROWS:
        itself = tuple(Lengths(s.len_q, s.len_q, s.slots_q, s.slots_q) for s in case.problem.sequences)
        mask: Any = {"areas": draw(named_areas(itself)), "attn_mask_type": "causal", "window_size": (-1, -1)}
        return replace(case, problem=replace(case.problem, sequences=itself, **mask))
    if kind != "table":
        return case
    table = draw(tables([s.slots_q for s in case.problem.sequences], case.problem.cp_size))
    problem = replace(case.problem, layout=table)
    try:
        check_layout(problem)
    except ValueError:  # not for cross attention, nor for a batch without padding
        return case
    return replace(case, problem=problem)


@st.composite
def sparse_attentions(
    draw: DrawFn, cp_sizes: Sequence[int] = SIZES, dtypes: Sequence[str] = _DTYPES
) -> SparseAttention:
    """A problem of `sparse_attention`."""
    with_lse = draw(st.booleans())
    case = draw(sparse_cases(cp_sizes, dtypes))
    return SparseAttention(
        replace(case, return_lse=True, loss="out+lse") if with_lse else case,
        top_k=draw(st.sampled_from([3, 1, 2, 8, 33])),
        naming=draw(st.sampled_from(NAMINGS)),
        by_head=draw(st.booleans()),
        latent=case.problem.d_v <= case.problem.d_qk and draw(st.booleans()),
    )


@st.composite
def selections(draw: DrawFn, cp_sizes: Sequence[int] = SIZES, dtypes: Sequence[str] = _DTYPES) -> SelectKeys:
    """A problem of `select_keys`."""
    case, values = draw(sparse_cases(cp_sizes, dtypes)), draw(st.sampled_from(VALUES))
    d_index = draw(st.sampled_from([4, 1, 3, 6, 16]))
    exact = d_index in (1, 4, 16) or values == "normal"  # the default scale is a power of two, or need not be
    return SelectKeys(
        case,
        top_k=draw(st.sampled_from([3, 1, 2, 8, 65])),
        heads=draw(st.integers(1, 3)),
        d_index=d_index,
        scale=draw(st.sampled_from([None, 1.0, 0.5, -2.0] if exact else [1.0, 0.5, -2.0])),
        values=values,
    )


@st.composite
def index_losses(draw: DrawFn, cp_sizes: Sequence[int] = SIZES, dtypes: Sequence[str] = _DTYPES) -> IndexLoss:
    """A problem of `index_loss`."""
    return IndexLoss(
        draw(sparse_cases(cp_sizes, dtypes)),
        top_k=draw(st.sampled_from([3, 1, 2, 8, 33])),
        heads=draw(st.integers(1, 3)),
        d_index=draw(st.sampled_from([4, 1, 3, 6])),
        scale=draw(st.sampled_from([None, 1.0, 0.5])),
        naming=draw(st.sampled_from(NAMINGS)),
    )


# ---- probes


def check_sparse_probes(impl: Implementation, problem: SparseAttention, device: str = "cpu") -> list[str]:
    """Rows that see the wrong keys, and keys that are seen by the wrong rows.

    By `conformance.checks.probes`: with q = 0 exp(lse) counts the chosen keys, and the digits of v say which they are.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    problem = replace(problem, case=plain_but_for_counts(problem.case), latent=False)
    indices = indices_of(problem)
    chosen = _chosen(problem, indices).to(device)
    return probe_pairs(AsAttention(impl, problem, indices.to(device)), problem.case, chosen, device)


class AsAttention:
    """An implementation whose `attention` is its `sparse_attention`, with the indices of a problem."""

    supports = None  # it answers for dense attention

    def __init__(self, impl: Implementation, problem: SparseAttention, indices: torch.Tensor) -> None:
        self._impl, self._problem, self._indices = impl, problem, indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._impl.offered, name)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cp: Any,
        plan: Any,
        softmax_offset: torch.Tensor | None = None,
        return_lse: bool = False,
        deterministic: bool = False,  # the plan has it
        areas: Any = None,  # so has it these
    ) -> Any:
        """One rank's call."""
        v = k[..., : self._problem.problem.d_v] if self._problem.latent else v
        mine = take_slice(self._problem.case, self._indices, "q", cp.rank)
        options = {"softmax_offset": softmax_offset, "return_lse": return_lse}
        return self._impl.sparse_attention(q, k, v, mine, cp=cp, plan=plan, **options)


# ---- tensors


def indices_of(problem: SparseAttention | IndexLoss) -> torch.Tensor:
    """The global indices of a problem, in its format. Padding and the tail name keys too, which nobody may read."""
    case, p = problem.case, problem.problem
    heads = p.heads_kv if isinstance(problem, SparseAttention) and problem.by_head else 1
    draw = problem.generator()
    found = torch.randint(0, 4, (case.rows("q"), heads, problem.top_k), generator=draw, dtype=torch.int32)
    for rows, _, visible in documents_of(p):
        shape = (visible.shape[0], heads)
        kinds = dict(_named(visible, shape, problem.top_k, draw))
        if problem.naming != "mixed":
            found[rows] = kinds[problem.naming]
            continue
        which = torch.randint(0, len(kinds), shape, generator=draw)
        for n, made in enumerate(kinds.values()):
            found[rows] = torch.where((which == n)[..., None], made, found[rows])
    packed = found if heads > 1 or getattr(problem, "by_head", False) else found[:, 0]
    if p.qkv_format == "thd":
        return packed
    packed = packed.unflatten(0, (len(p.sequences), -1))
    return packed.transpose(0, 1).contiguous() if p.qkv_format == "sbhd" else packed


def _named(
    visible: torch.Tensor, shape: tuple[int, int], top_k: int, draw: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """Indices [n, h, top_k] of each kind, for a document whose rows see these keys, bool [n, m]."""
    keys = visible.shape[1]

    def between(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, max(high, low + 1), (*shape, top_k), generator=draw, dtype=torch.int32)

    def some(order: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(order[..., :top_k], (0, max(0, top_k - keys)), value=-1)
        return padded.to(torch.int32)

    shuffled = torch.rand(*shape, keys, generator=draw).argsort(-1)
    hidden_last = (~visible[:, None].expand(*shape, keys)).gather(-1, shuffled)
    ordered = shuffled.gather(-1, hidden_last.int().sort(stable=True, dim=-1).indices)
    extremes = torch.tensor([2**31 - 1, -(2**31), keys, -1], dtype=torch.int32)[between(0, 4).long()]
    yield "any", between(-3, keys + 3)
    yield "visible", some(ordered).masked_fill(some(hidden_last.int().sort(dim=-1).values) != 0, -1)
    yield "shuffled", some(shuffled)
    yield "twice", between(0, min(keys, 2))
    yield "beyond", torch.where(between(0, 2) == 0, extremes, between(keys, 2 * keys + 2))
    yield "all", some(torch.arange(keys).expand(*shape, keys))
    yield "nothing", between(-1, 0)


def _chosen(problem: SparseAttention, indices: torch.Tensor) -> torch.Tensor:
    """Which packed rows see which packed keys, of every query head: bool [h_q, rows of q, rows of kv]."""
    case, p = problem.case, problem.problem
    named = packed_rows(case, indices)
    named = named if problem.by_head else named[:, None].expand(-1, p.heads_kv, -1)
    named = named.repeat_interleave(p.heads_per_kv, dim=1)
    found = torch.zeros(case.rows("q"), p.heads_q, case.rows("kv"), dtype=torch.bool)
    for rows, keys, visible in documents_of(p):
        found[rows, :, keys] = chosen_keys(named[rows].cpu(), visible)
    return found.transpose(0, 1)


def _as_lse(case: Case, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Packed rows [rows, h] as the LSE's axes, dtype and device."""
    fmt = case.problem.qkv_format
    found = rows.t() if fmt == "thd" else rows.unflatten(0, (len(case.problem.sequences), -1)).transpose(1, 2)
    return found.to(like.device, like.dtype).contiguous()


def _indexer(problem: SelectKeys | IndexLoss, device: str) -> Tensors:
    """q_index, k_index and weights of the whole batch, NaN where there is no token."""
    tensors, draw, low = build(problem.case), problem.generator(), dtype_of(problem.problem.dtype)
    shapes = {
        "q_index": (tensors.real_q, (problem.heads, problem.d_index)),
        "k_index": (tensors.real_kv, (problem.d_index,)),
        "weights": (tensors.real_q, (problem.heads,)),
    }
    found: Tensors = {}
    for name, (real, last) in shapes.items():
        if isinstance(problem, SelectKeys) and problem.values == "whole":
            values = torch.randint(-2, 3, (*real.shape, *last), generator=draw).double()
        else:
            values = torch.randn(*real.shape, *last, generator=draw, dtype=torch.float64)
        dtype = wide_dtype(problem.problem.dtype) if name == "weights" else low
        found[name] = values.masked_fill(~real[(..., *[None] * len(last))], torch.nan).to(device, dtype)
    return found


def _slices(case: Case, tensors: GlobalTensors, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return take_slice(case, tensors.q, "q", rank), take_slice(case, tensors.k, "kv", rank)


# ---- judging


def _misjudged(problem: SelectKeys, given: Tensors, got: torch.Tensor) -> list[str]:
    """Findings about chosen keys: each visible, none twice, the best ones, best first, -1 behind the last."""
    case, p = problem.case, problem.problem
    clean = {name: x.double().cpu().nan_to_num() for name, x in given.items()}
    if problem.values == "whole":
        wanted = dense_select_keys(p, **clean, top_k=problem.top_k, scale=problem.scale)
        wrong = (packed_rows(case, got.cpu()) != packed_rows(case, wanted)).any(-1)
        if not wrong.any():
            return []
        row = int(wrong.nonzero()[0])
        has, lacks = (packed_rows(case, x.cpu())[row].tolist() for x in (got, wanted))
        return [f"row {row} chooses {has}, but should {lacks}; {int(wrong.sum())} rows are wrong"]
    q, k, w = (packed_rows(case, clean[name]) for name in ("q_index", "k_index", "weights"))
    rows_of = packed_rows(case, got.cpu()).long()
    scale = problem.d_index**-0.5 if problem.scale is None else problem.scale
    eps = 1e-12 if p.dtype == "float64" else 1e-5
    outside = torch.ones(len(rows_of), dtype=torch.bool)
    for rows, keys, visible in documents_of(p):
        outside[rows] = False
        scores = dense_index_scores(q[rows], k[keys], w[rows], scale)
        named, count = rows_of[rows], visible.sum(1).clamp(max=problem.top_k)
        place = torch.arange(problem.top_k)
        if not ((named >= 0) == (place < count[:, None])).all() or not (named < max(visible.shape[1], 1)).all():
            return [f"rows {rows.start}:{rows.stop} do not choose as many keys as they see, or {problem.top_k}"]
        if not scores.numel():
            continue
        there = named.clamp(min=0)
        times = torch.zeros_like(scores).scatter_add_(1, there, (named >= 0).double())
        if (times > visible.double()).any():
            return [f"rows {rows.start}:{rows.stop} choose a key twice, or one that is hidden"]
        best = scores.masked_fill(~visible, -torch.inf).sort(1, descending=True).values[:, : problem.top_k]
        best = torch.nn.functional.pad(best, (0, problem.top_k - best.shape[1]))
        sizes = dense_index_scores(q[rows].abs(), k[keys].abs(), w[rows].abs(), abs(scale))
        off = (scores.gather(1, there) - best).masked_fill(named < 0, 0.0).abs()
        if (off > eps * sizes.amax(1, keepdim=True)).any():
            return [
                f"rows {rows.start}:{rows.stop} choose keys whose scores are {off.max().item():.3g} worse than the best"
            ]
    return ["padding or the tail chooses keys"] if (rows_of[outside] != -1).any() else []


_ROUGH = {"bfloat16": 2e-2, "float16": 5e-3}


def _rough(dtype: str, results: Tensors, exact: Tensors) -> list[str]:
    """Findings in low precision: the root of the mean square of each error, in units of the result's own and of the
    typical result's.
    """
    typical = sum(_size(exact[name]) for name in results) / max(len(results), 1)
    found: list[str] = []
    for name, got in results.items():
        if not torch.equal(got.isfinite(), exact[name].isfinite()):
            found.append(f"{name} is not finite where it should be, or is where it should not")
            continue
        error, bound = _size(got.double() - exact[name]), _ROUGH[dtype] * max(_size(exact[name]), typical)
        if error > bound:
            found.append(f"{name} has errors of {error:.2g} (root of the mean square), allowed {bound:.2g}")
    return found


def _size(x: torch.Tensor) -> float:
    """The root of the mean square of what is finite."""
    finite = x[x.isfinite()]
    return finite.square().mean().sqrt().item() if finite.numel() else 0.0
