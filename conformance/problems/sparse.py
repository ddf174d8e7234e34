"""Level `sparse`: attention to chosen keys, an indexer's choice and its loss, on every rank of a group.

Each is a case of attention, which says the batch, its mask, its slices and its tensors, and a few fields more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from conformance.case import Case, check_counts, wide_dtype
from conformance.checks.budgets import Tensors, worst
from conformance.checks.play import play
from conformance.checks.probes import plain_but_for_counts, probe_pairs
from conformance.checks.reference import (
    context_of,
    dense_index_loss,
    dense_sparse_attention,
    results_of,
    values_of_ranks,
)
from conformance.checks.values import compare_result
from conformance.implementation import Implementation
from conformance.problems.capabilities import EVERYTHING, Capabilities
from conformance.problems.features import SCORE_AXES
from conformance.problems.problem import CaseProblem, in_company, shape_findings
from conformance.problems.sparse_values import (
    NAMINGS,
    as_lse,
    chosen_pairs,
    entry_rows,
    indexer_of,
    indices_of,
    misjudged,
    own_entries,
    rough,
)
from conformance.problems.strategies import FEW_SIZES, OFTEN_EXACT, cases, named_areas, tables
from conformance.tensors import (
    assemble,
    build,
    in_format,
    packed_rows,
    plan_arguments,
    take_slice,
)
from cp_ref.problems.read_problem import check_layout, check_one_document
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.problem import Sequence as Lengths
from cp_ref.schedules.values import check_choice

__all__ = [
    "IndexLoss",
    "SelectKeys",
    "SparseAttention",
    "SparseCase",
    "check_latent",
    "check_sparse_probes",
    "index_losses",
    "selections",
    "sparse_attentions",
]

# ---- problems


VALUES = ("whole", "normal")
_PLAIN = Case(Problem(2, (Lengths(8, 8, 8, 8),), "all_gather", qkv_format="thd", dtype="float64"), use_plan=True)


@dataclass(frozen=True)
class SparseCase(CaseProblem):
    """The fields of all three: a case of attention, and how many keys a row may name.

    >>> print(SparseAttention(top_k=2))
    SparseAttention(Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)], cp_comm_type="all_gather", qkv_format="thd", \
dtype="float64"), use_plan=True), top_k=2)
    """

    counts: ClassVar[tuple[str, ...]] = ("top_k",)  # The fields that are positive integers.
    case: Case = _PLAIN
    top_k: int = 3
    scale_of_call: bool = False  # The call has softmax_scale, and the plan has none.

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        check_one_document(self.problem, "top_k")
        check_counts(self, self.counts)

    @property
    def of_scale(self) -> dict[str, Any]:
        """The option that the plan leaves to the call."""
        return {"softmax_scale": self.problem.softmax_scale} if self.scale_of_call else {}

    def of_plan(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `make_plan` without those that the call has."""
        return {name: x for name, x in arguments.items() if name not in self.of_scale}

    def keys_of_rank(self, x: torch.Tensor, rate: int | None, rank: int) -> torch.Tensor:
        """A rank's slice of keys, or its entries of this rate."""
        if rate is None:
            return take_slice(self.case, x, "kv", rank)
        return x[own_entries(self.case, rate, rank).to(x.device)]

    def keys_of_all(self, parts: list[torch.Tensor], rate: int | None) -> torch.Tensor:
        """The keys of all ranks, as `keys_of_rank` takes them."""
        if rate is None:
            return assemble(self.case, parts, "kv")
        numbers = [own_entries(self.case, rate, rank).nonzero()[:, 0] for rank in range(self.cp_size)]
        return torch.cat(parts)[torch.cat(numbers).argsort().to(parts[0].device)]

    def on_ranks(self, impl: Implementation, device: str, fn: Any) -> tuple[list[Any], list[str]]:
        """`fn(cp, plan, rank)` on every rank, and findings about ranks that raise."""

        def one(member: Any) -> Any:
            cp = context_of(impl, self.problem, member)
            wishes = {"deterministic": True} if self.case.deterministic else {}
            plan = impl.make_plan(cp=cp, **self.of_plan(plan_arguments(self.problem, device)), **wishes)
            return fn(cp, plan, member.rank)

        return values_of_ranks(self.cp_size, one, impl.Unsupported, NotImplementedError)


def check_latent(problem: Problem, latent: object) -> None:
    """Raise ValueError for values that cannot be parts of their keys."""
    if latent and problem.d_v > problem.d_qk:
        raise ValueError(f"latent is True, and d_v is {problem.d_v}; it must be at most d_qk")


@dataclass(frozen=True)
class SparseAttention(SparseCase):
    """One `sparse_attention`, forward and backward."""

    naming: str = "mixed"  # The kind of indices: one of NAMINGS.
    by_head: bool = False  # Each kv head has its own indices.
    latent: bool = False  # v is k[..., :d_v], a view.

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        super().__post_init__()
        check_choice("naming", self.naming, NAMINGS)
        check_latent(self.problem, self.latent)

    @property
    def indices(self) -> torch.Tensor:
        """The global indices."""
        return indices_of(self.case, self.naming, self.top_k, by_head=self.by_head, draw=self.generator())

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings about results and gradients, against the definition."""
        tensors, indices = build(self.case, device), self.indices.to(device)
        chosen = chosen_pairs(self.case, indices)
        dlse = as_lse(self.case, packed_rows(self.case, tensors.dout)[..., 0], tensors.dlse)
        blind = ~chosen.any(dim=-1).t()  # Their gradients may be anything.
        if self.problem.softmax_type == "vanilla":
            dlse = dlse.masked_fill(as_lse(self.case, blind, tensors.dlse).bool(), -torch.inf)
        rows = packed_rows(self.case, tensors.dout).masked_fill(blind.to(device)[..., None], torch.nan)
        tensors = replace(tensors, dout=in_format(self.case, rows, tensors.dout), dlse=dlse)
        played = play(AsAttention(impl, self, indices), self.case, tensors)
        if played.findings:
            return played.findings

        def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_offset: Any = None) -> Any:
            v = k[..., : self.problem.d_v] if self.latent else v
            out, lse = dense_sparse_attention(self.problem, q, k, v, indices, softmax_offset=softmax_offset)
            return out, lse, lse.new_zeros(self.problem.heads_q)

        wanted = results_of(exact, self.case, tensors, torch.float64)
        if self.problem.dtype not in ("float64", "float32"):
            return rough(self.problem.dtype, played.results, wanted)
        found: list[str] = []
        for name, got in played.results.items():
            found += compare_result(self.case, tensors, name, got, wanted[name])
        return found


@dataclass(frozen=True)
class IndexerCase(SparseCase):
    """The fields of both functions of an indexer: its sizes."""

    counts: ClassVar[tuple[str, ...]] = ("top_k", "heads", "d_index")
    heads: int = 2
    d_index: int = 4
    scale: float | None = None
    rate: int | None = None  # Of compressed keys.

    def given(self, device: str, *, whole: bool) -> Tensors:
        """The indexer's tensors, see `indexer_of`."""
        how: dict[str, Any] = {"whole": whole, "draw": self.generator(), "device": device, "rate": self.rate}
        return indexer_of(self.case, self.heads, self.d_index, **how)

    def slices(self, given: Tensors, rank: int) -> Tensors:
        """A rank's slices of them."""
        q_index, weights = (take_slice(self.case, given[name], "q", rank) for name in ("q_index", "weights"))
        return {
            "q_index": q_index,
            "k_index": self.keys_of_rank(given["k_index"], self.rate, rank),
            "weights": weights,
        }

    @property
    def of_rate(self) -> dict[str, Any]:
        """The option that says that keys are compressed; nothing for tokens."""
        return {} if self.rate is None else {"rate": self.rate}


@dataclass(frozen=True)
class SelectKeys(IndexerCase):
    """One `select_keys`."""

    values: str = "whole"  # "whole": scores are exact, and many are equal. "normal": some bits decide.

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        super().__post_init__()
        check_choice("values", self.values, VALUES)

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings about the keys that are chosen: against the definition, and against one rank, bit for bit."""
        whole = self.values == "whole"
        given = self.given(device, whole=whole)
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
        return found + misjudged(self.case, given, got, self.scale, whole=whole, rate=self.rate)

    def _play(self, impl: Implementation, device: str, given: Tensors) -> tuple[list[str], torch.Tensor]:
        def one(cp: Any, plan: Any, rank: int) -> torch.Tensor:
            mine = self.slices(given, rank)
            how = {"top_k": self.top_k, "scale": self.scale, **self.of_rate}
            got = in_company(impl.select_keys)(**mine, cp=cp, plan=plan, **how)
            wanted = (*mine["weights"].shape[:-1], self.top_k)
            if wrong := shape_findings("select_keys", got, wanted, [torch.int32]):
                raise AssertionError(wrong[0])
            return got

        ranks, found = self.on_ranks(impl, device, one)
        return found, torch.zeros(0) if found else assemble(self.case, ranks, "q")


@dataclass(frozen=True)
class IndexLoss(IndexerCase):
    """One `index_loss`, forward and backward."""

    naming: str = "mixed"

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        super().__post_init__()
        check_choice("naming", self.naming, NAMINGS)

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings about the loss and its gradients, against the definition."""
        case, problem = self.case, self.problem
        tensors = build(case, device)
        named: dict[str, Any] = {"by_head": False, "draw": self.generator(), "rate": self.rate}
        indices = indices_of(case, self.naming, self.top_k, **named).to(device)
        given = self.given(device, whole=False)
        keys = tensors.k, tensors.v
        if self.rate is not None:  # entries, with the values of some tokens
            keys = (*(packed_rows(case, x)[entry_rows(case, self.rate).last.to(device)] for x in keys),)
        q, k, v = (x.detach().nan_to_num() for x in (tensors.q, *keys))
        offset = {"softmax_offset": tensors.softmax_offset}
        _, lse = dense_sparse_attention(problem, q, k, v, indices, **offset, rate=self.rate)
        lse, real = lse.to(tensors.dlse.dtype), tensors.real_q
        dloss = torch.randn(real.shape, generator=self.generator(), dtype=torch.float64)
        blind = (
            ~chosen_pairs(case, indices, self.rate).any(dim=-1)[:1].t()
        )  # Their loss is 0, and its gradient may be anything.
        dloss = dloss.to(device, wide_dtype(problem.dtype)).masked_fill(~real, torch.nan)
        dloss = in_format(case, packed_rows(case, dloss).masked_fill(blind[:, 0].to(device), torch.nan), dloss)

        def one(cp: Any, plan: Any, rank: int) -> Tensors:
            leaves = {name: x.requires_grad_() for name, x in self.slices(given, rank).items()}
            of_q, of_k = take_slice(case, tensors.q, "q", rank), self.keys_of_rank(keys[0], self.rate, rank)
            others = take_slice(case, lse, "q", rank, lse=True), of_q, of_k, take_slice(case, indices, "q", rank)
            how = {"scale": self.scale, **self.of_rate, **self.of_scale}
            loss = in_company(impl.index_loss)(*leaves.values(), *others, cp=cp, plan=plan, **how)
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
        loss = dense_index_loss(
            problem, exact[0], exact[1], exact[2], lse, q, k, indices, scale=self.scale, rate=self.rate
        )
        grads = (
            torch.autograd.grad(loss, exact, dloss.double().nan_to_num(), materialize_grads=True)
            if loss.requires_grad
            else [torch.zeros_like(x) for x in exact]
        )
        names = ("loss", "dq_index", "dk_index", "dweights")
        wanted: Tensors = dict(zip(names, (loss.detach(), *grads), strict=True))
        results: Tensors = {}
        for name in names:
            parts = [values[name] for values in ranks]
            of_keys = name == "dk_index"
            results[name] = self.keys_of_all(parts, self.rate) if of_keys else assemble(case, parts, "q")
        if problem.dtype not in ("float64", "float32"):
            return rough(problem.dtype, results, wanted)
        for name, got in results.items():
            limit = (1e-9 if problem.dtype == "float64" else 2e-4) * (1 + wanted[name].abs()) * case.magnitude**2
            found += worst(name, got, wanted[name], limit)
        return found


# ---- strategies


_NONE_OF_SCORES = {axis.option: tuple(axis.choices)[:1] for axis in SCORE_AXES}
_HAS = _NONE_OF_SCORES | {"cp_comm_type": ("all_gather", "a2a"), "softmax_type": ("vanilla", "learnable")}
HAS = Capabilities(EVERYTHING.choices | _HAS, wishes=("use_plan", "return_lse", "lse gradient", "deterministic"))
_FEW_ROWS = 150  # Areas are drawn for at most this many queries.


@st.composite
def sparse_cases(draw: DrawFn, cp_sizes: Sequence[int], dtypes: Sequence[str]) -> Case:
    """A case whose pairs are of one document each; at times with areas inside documents, or a table as its layout."""
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
    draw: DrawFn, cp_sizes: Sequence[int] = FEW_SIZES, dtypes: Sequence[str] = OFTEN_EXACT
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
        scale_of_call=draw(st.booleans()),
    )


@st.composite
def selections(draw: DrawFn, cp_sizes: Sequence[int] = FEW_SIZES, dtypes: Sequence[str] = OFTEN_EXACT) -> SelectKeys:
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
def index_losses(draw: DrawFn, cp_sizes: Sequence[int] = FEW_SIZES, dtypes: Sequence[str] = OFTEN_EXACT) -> IndexLoss:
    """A problem of `index_loss`."""
    return IndexLoss(
        draw(sparse_cases(cp_sizes, dtypes)),
        top_k=draw(st.sampled_from([3, 1, 2, 8, 33])),
        heads=draw(st.integers(1, 3)),
        d_index=draw(st.sampled_from([4, 1, 3, 6])),
        scale=draw(st.sampled_from([None, 1.0, 0.5])),
        naming=draw(st.sampled_from(NAMINGS)),
        scale_of_call=draw(st.booleans()),
    )


# ---- probes


def check_sparse_probes(impl: Implementation, problem: SparseAttention, device: str = "cpu") -> list[str]:
    """Rows that see the wrong keys, and keys that are seen by the wrong rows.

    By `conformance.checks.probes`: with q = 0 exp(lse) counts the chosen keys, and the digits of v say which they are.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    problem = replace(problem, case=plain_but_for_counts(problem.case), latent=False)
    indices = problem.indices
    chosen = chosen_pairs(problem.case, indices).to(device)
    return probe_pairs(AsAttention(impl, problem, indices.to(device)), problem.case, chosen, device)


class AsAttention:
    """An implementation whose `attention` is its `sparse_attention`, with the indices of a problem."""

    supports = None  # it answers for dense attention

    def __init__(self, impl: Implementation, problem: SparseAttention, indices: torch.Tensor) -> None:
        self._impl, self._problem, self._indices = impl, problem, indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._impl.offered, name)

    def make_plan(self, **arguments: Any) -> Any:
        """One rank's plan."""
        return self._impl.make_plan(**self._problem.of_plan(arguments))

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
        options = {"softmax_offset": softmax_offset, "return_lse": return_lse, **self._problem.of_scale}
        return in_company(self._impl.sparse_attention)(q, k, v, mine, cp=cp, plan=plan, **options)
