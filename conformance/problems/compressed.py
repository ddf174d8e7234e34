"""Level `sparse`, compressed keys: windows of tokens as keys, and attention to tokens and to these, on every rank.

An indexer's choice among compressed keys, and its loss, are in `conformance.problems.sparse`, with a rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from conformance.case import Case, dtype_of, wide_dtype
from conformance.checks.budgets import Tensors, worst
from conformance.checks.reference import (
    dense_compress_keys,
    dense_compressed_attention,
    dense_sparse_attention,
    documents_of,
)
from conformance.implementation import Implementation
from conformance.problems.problem import in_company, shape_findings
from conformance.problems.sparse import (
    IndexLoss,
    SelectKeys,
    SparseCase,
    check_latent,
    index_losses,
    selections,
    sparse_cases,
)
from conformance.problems.sparse_values import (
    NAMINGS,
    as_lse,
    chosen_pairs,
    entry_rows,
    indices_of,
    own_entries,
    rough,
)
from conformance.problems.strategies import FEW_SIZES, OFTEN_EXACT
from conformance.tensors import assemble, build, in_format, packed_rows, real_tokens, take_slice
from cp_ref.problems.read_problem import check_layout
from cp_ref.schedules.problem import Sequence as Lengths
from cp_ref.schedules.values import check_choice

__all__ = [
    "CompressKeys",
    "CompressedAttention",
    "compressed_attentions",
    "compressed_losses",
    "compressed_selections",
    "compressions",
]


@dataclass(frozen=True)
class CompressKeys(SparseCase):
    """One `compress_keys`, forward and backward.

    >>> print(CompressKeys(rate=7, overlap=True))
    CompressKeys(Case(Problem(cp_size=2, sequences=[(8, 8, 8, 8)], cp_comm_type="all_gather", qkv_format="thd", \
dtype="float64"), use_plan=True), rate=7, overlap=True)
    """

    counts: ClassVar[tuple[str, ...]] = ("rate", "width")
    rate: int = 4
    width: int = 3  # Channels of an entry.
    overlap: bool = False
    biased: bool = False
    wide_gates: bool = False

    def given(self, device: str) -> Tensors:
        """Values, gates and bias of the whole batch, NaN where there is no token."""
        draw, dtype = self.generator(), self.problem.dtype
        low, wide = dtype_of(dtype), wide_dtype(dtype)
        real, channels = real_tokens(self.case, "q"), self.width * (2 if self.overlap else 1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        values, gates = (normal(*real.shape, channels).masked_fill(~real[..., None], torch.nan) for _ in range(2))
        found = {"values": values.to(device, low), "gates": (2 * gates).to(device, wide if self.wide_gates else low)}
        return found | ({"bias": normal(self.rate, channels).to(device, wide)} if self.biased else {})

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings about entries and gradients, against the definition; and about bits, against one rank."""
        given = self.given(device)
        exact = {name: x.double().nan_to_num().requires_grad_() for name, x in given.items()}
        how: dict[str, Any] = {"rate": self.rate, "overlap": self.overlap}
        entries = dense_compress_keys(self.problem, exact["values"], exact["gates"], exact.get("bias"), **how)
        dentries = torch.randn(entries.shape, generator=self.generator(), dtype=torch.float64).to(device)
        found, results = self._play(impl, device, given, dentries)
        if found:
            return found
        problem = replace(self.problem, cp_size=1, a2a_size=1, layout="contiguous")
        alone = replace(self, case=replace(self.case, problem=problem))
        found, of_one = alone._play(impl, device, given, dentries)
        if found:
            return [f"on one rank: {finding}" for finding in found]
        if not torch.equal(results["entries"], of_one["entries"]):
            wrong = (results["entries"] != of_one["entries"]).any(-1).nonzero()[:, 0].tolist()
            found = [f"{len(wrong)} entries have other bits than on one rank, the first one is entry {wrong[0]}"]
        grads = torch.autograd.grad(entries, list(exact.values()), dentries, allow_unused=True, materialize_grads=True)
        wanted: Tensors = {"entries": entries.detach()} | {f"d{n}": g for n, g in zip(exact, grads, strict=True)}
        return found + _compared(self.case, results, wanted)

    def _play(
        self, impl: Implementation, device: str, given: Tensors, dentries: torch.Tensor
    ) -> tuple[list[str], Tensors]:
        there = entry_rows(self.case, self.rate)

        def one(cp: Any, plan: Any, rank: int) -> Tensors:
            leaves = {n: take_slice(self.case, x, "q", rank) for n, x in given.items() if n != "bias"}
            leaves |= {n: x.clone() for n, x in given.items() if n == "bias"}
            leaves = {n: x.requires_grad_() for n, x in leaves.items()}
            own = own_entries(self.case, self.rate, rank)
            how = {"rate": self.rate, "overlap": self.overlap}
            got = in_company(impl.compress_keys)(**leaves, cp=cp, plan=plan, **how)
            wrong = shape_findings("compress_keys", got, (int(own.sum()), self.width), [leaves["values"].dtype])
            mine = plan.entries(self.rate)
            for name in ("documents", "numbers"):
                of_rank, wanted = getattr(mine, name).tolist(), getattr(there, name)[own].tolist()
                if of_rank != wanted:
                    wrong.append(f"plan.entries has {name} {of_rank}, but should have {wanted}")
            upstream = dentries[own.to(device)].to(leaves["values"].dtype)
            grads = () if wrong else torch.autograd.grad(got, list(leaves.values()), upstream)
            for (name, x), grad in zip(leaves.items(), grads, strict=not wrong):
                wrong += shape_findings(f"d{name}", grad, x.shape, [x.dtype])
            if wrong:
                raise AssertionError(wrong[0])
            return {"entries": got.detach()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}

        ranks, found = self.on_ranks(impl, device, one)
        if found:
            return found, {}
        results = {"entries": self.keys_of_all([values["entries"] for values in ranks], self.rate)}
        results |= {n: assemble(self.case, [values[n] for values in ranks], "q") for n in ("dvalues", "dgates")}
        if self.biased:
            results["dbias"] = torch.stack([values["dbias"] for values in ranks]).sum(0)
        return [], results


CLOSED = "closed"


@dataclass(frozen=True)
class CompressedAttention(SparseCase):
    """One `compressed_attention`, or one `sparse_attention` with a rate, forward and backward; then once more with
    counting inputs.
    """

    counts: ClassVar[tuple[str, ...]] = ("top_k", "rate")
    rate: int = 4
    naming: str = CLOSED  # Rows see all closed entries; or indices name some: one of NAMINGS.
    by_head: bool = False  # Each kv head has its own indices.
    tokens: bool = True  # Rows see tokens too, by `compressed_attention`.
    latent: bool = False  # v is k[..., :d_v], a view.

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        super().__post_init__()
        check_choice("naming", self.naming, (CLOSED, *NAMINGS))
        check_latent(self.problem, self.latent)

    @property
    def indices(self) -> torch.Tensor | None:
        """The global indices."""
        if self.naming == CLOSED:
            return None
        how: dict[str, Any] = {"by_head": self.by_head, "draw": self.generator(), "rate": self.rate}
        return indices_of(self.case, self.naming, self.top_k, **how)

    def seen(self) -> torch.Tensor:
        """Which packed rows see which keys, tokens first if rows see them: bool [h_q, rows, keys]."""
        indices = self.indices
        if indices is None:
            indices = torch.arange(len(entry_rows(self.case, self.rate).last) + 1, dtype=torch.int32)
            indices = indices.expand(*real_tokens(self.case, "q").shape, -1)
        found = chosen_pairs(self.case, indices, self.rate)
        if not self.tokens:
            return found
        p = self.problem
        of_tokens = torch.zeros(case_rows := self.case.rows("q"), self.case.rows("kv"), dtype=torch.bool)
        for rows, keys, visible in documents_of(p):
            of_tokens[rows, keys] = visible
        return torch.cat([of_tokens.expand(p.heads_q, case_rows, -1), found], dim=-1)

    def given(self, device: str) -> Tensors:
        """Q, k, v, k_entries and v_entries of the whole batch."""
        tensors, p, draw = build(self.case, device), self.problem, self.generator()
        count = len(entry_rows(self.case, self.rate).last)
        k, v = (torch.randn(count, p.heads_kv, d, generator=draw, dtype=torch.float64) for d in (p.d_qk, p.d_v))
        dtype = dtype_of(p.dtype)
        entries = {"k_entries": (k * self.case.magnitude).to(device, dtype), "v_entries": v.to(device, dtype)}
        found = {"q": tensors.q, "k": tensors.k, "v": tensors.v} | entries
        if self.latent:
            found = {n: x for n, x in found.items() if n[0] != "v"}
        if not self.tokens:
            found = {n: x for n, x in found.items() if n not in ("k", "v")}
        return found | ({} if tensors.softmax_offset is None else {"softmax_offset": tensors.softmax_offset})

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings about results and gradients, against the definition; and about who sees whom."""
        given, tensors, seen = self.given(device), build(self.case, device), self.seen().to(device)
        blind = ~seen.any(dim=-1).t()  # Their gradients may be anything.
        dlse = as_lse(self.case, packed_rows(self.case, tensors.dout)[..., 0], tensors.dlse)
        if self.problem.softmax_type == "vanilla":
            dlse = dlse.masked_fill(as_lse(self.case, blind, tensors.dlse).bool(), -torch.inf)
        rows = packed_rows(self.case, tensors.dout).masked_fill(blind[..., None], torch.nan)
        upstream = in_format(self.case, rows, tensors.dout), dlse
        found, results = self._play(impl, device, given, upstream)
        if found:
            return found
        exact = {n: x.double().nan_to_num().requires_grad_() for n, x in given.items()}
        outputs = self._dense(exact, device)
        clean = [x.double().nan_to_num(posinf=0.0, neginf=0.0) for x in upstream]
        lse = outputs[1].masked_fill(outputs[1].isinf(), 0.0)
        grads = [torch.zeros_like(x) for x in exact.values()]
        if lse.requires_grad:  # else the batch has no tokens
            leaves, how = list(exact.values()), {"allow_unused": True, "materialize_grads": True}
            grads = torch.autograd.grad((outputs[0], lse), leaves, clean, **how)
        wanted: Tensors = {"out": outputs[0].detach(), "lse": outputs[1].detach()}
        wanted |= {f"d{n}": g for n, g in zip(exact, grads, strict=True)}
        return _compared(self.case, results, wanted) or self._miscounted(impl, device, seen)

    def _miscounted(self, impl: Implementation, device: str, seen: torch.Tensor) -> list[str]:
        """Findings with q = 0: exp(lse) counts the keys of a row, and out is the mean of their values."""
        plain = replace(self.problem, dtype="float64", softmax_type="vanilla")
        problem = replace(self, case=replace(self.case, problem=plain), latent=False)
        given = problem.given(device)
        given["q"] = given["q"] * 0
        found, results = problem._play(impl, device, given, None)
        if found:
            return [f"with q = 0: {finding}" for finding in found]
        counted = results["lse"].exp()
        count = as_lse(problem.case, seen.sum(-1).t(), results["lse"])
        wrong = ((counted - count).abs() > 1e-6).nonzero()
        if not len(wrong):
            return []
        place = tuple(wrong[0].tolist())
        return [f"with q = 0: row {place} of lse counts {counted[place]:.3f} keys, but sees {int(count[place])}"]

    def _dense(self, exact: Tensors, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        given, indices = self._with_values(exact), self.indices
        indices = None if indices is None else indices.to(device)
        how: dict[str, Any] = {"softmax_offset": given.pop("softmax_offset", None), "rate": self.rate}
        dense: Any = dense_compressed_attention if self.tokens else dense_sparse_attention
        return dense(self.problem, *given.values(), indices, **how)

    def _with_values(self, given: Tensors) -> Tensors:
        """The operands in order, with values that are parts of keys."""
        names = ("q", "k", "v", "k_entries", "v_entries") if self.tokens else ("q", "k_entries", "v_entries")
        found = dict(given)
        for name in names if self.latent else ():
            if name[0] == "v":
                found[name] = found["k" + name[1:]][..., : self.problem.d_v]
        return {n: found[n] for n in (*names, "softmax_offset") if n in found}

    def _play(
        self, impl: Implementation, device: str, given: Tensors, upstream: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[list[str], Tensors]:
        indices, case = self.indices, self.case

        def slice_of(name: str, x: torch.Tensor, rank: int) -> torch.Tensor:
            if name == "softmax_offset":
                return x.clone()
            if name.endswith("entries"):
                return self.keys_of_rank(x, self.rate, rank)
            return take_slice(case, x, "q" if name == "q" else "kv", rank)

        def one(cp: Any, plan: Any, rank: int) -> Tensors:
            leaves = {n: slice_of(n, x, rank).requires_grad_() for n, x in given.items()}
            mine = None if indices is None else take_slice(case, indices.to(device), "q", rank)
            operands = self._with_values(leaves)
            how: dict[str, Any] = {"softmax_offset": operands.pop("softmax_offset", None), "return_lse": True}
            how |= self.of_scale
            call = in_company(impl.compressed_attention if self.tokens else impl.sparse_attention)
            out, lse = call(*operands.values(), mine, cp=cp, plan=plan, rate=self.rate, **how)
            found = {"out": out.detach(), "lse": lse.detach()}
            if upstream is None:
                return found
            of_rank = take_slice(case, upstream[0], "q", rank), take_slice(case, upstream[1], "q", rank, lse=True)
            wrong = shape_findings("out", out, of_rank[0].shape, [of_rank[0].dtype])
            wrong += shape_findings("lse", lse, of_rank[1].shape, [of_rank[1].dtype])
            if wrong:
                raise AssertionError(wrong[0])
            grads = torch.autograd.grad((out, lse), list(leaves.values()), of_rank)
            return found | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}

        ranks, found = self.on_ranks(impl, device, one)
        if found:
            return found, {}
        results: Tensors = {}
        for name in ranks[0]:
            parts = [values[name] for values in ranks]
            if name == "dsoftmax_offset":
                results[name] = torch.stack(parts).sum(0)
            elif name.endswith("entries"):
                results[name] = self.keys_of_all(parts, self.rate)
            else:
                side = "q" if name in ("out", "lse", "dq") else "kv"
                results[name] = assemble(case, parts, side, lse=name == "lse")
        return [], results


def _compared(case: Case, results: Tensors, wanted: Tensors) -> list[str]:
    dtype = case.problem.dtype
    if dtype not in ("float64", "float32"):
        return rough(dtype, results, wanted)
    found: list[str] = []
    for name, got in results.items():
        limit = (1e-9 if dtype == "float64" else 2e-4) * (1 + wanted[name].abs()) * case.magnitude**2
        found += worst(name, got, wanted[name], limit)
    return found


# ---- strategies


RATES = (4, 2, 3, 1, 7, 128)


@st.composite
def window_cases(draw: DrawFn, cp_sizes: Sequence[int], dtypes: Sequence[str], rate: int) -> Case:
    """A case of documents whose tokens are queries and keys, under a causal mask; at times of long documents."""
    case = draw(sparse_cases(cp_sizes, dtypes))
    p = case.problem
    sequences = tuple(Lengths(s.len_q, s.len_q, s.slots_q, s.slots_q) for s in p.sequences)
    padded = p.attn_mask_type.startswith("padding")
    if rate > 4 and draw(st.booleans()):
        lengths = [n * rate + more for n, more in draw(st.lists(st.sampled_from(_LONG), min_size=1, max_size=3))]
        sequences = tuple(Lengths(n, n, n, n) for n in lengths)
        p, padded = replace(p, qkv_format="thd", layout=draw(st.sampled_from(_NAMED))), True
    window = draw(st.sampled_from([-1, 0, 2, 5, 40]))
    mask: Any = {"attn_mask_type": "padding_causal" if padded else "causal", "window_size": (window, 0), "areas": None}
    problem = replace(p, sequences=sequences, **mask)
    try:
        check_layout(problem)
    except ValueError:
        problem = replace(problem, layout="dual_chunk")
    tails = {"tail_q": case.tail_q, "tail_kv": case.tail_q} if problem.qkv_format == "thd" else {}
    return replace(case, **{"tail_q": 0, "tail_kv": 0} | tails, problem=problem)


_LONG = ((1, 0), (0, 0), (1, -1), (1, 1), (2, 0), (2, 3))  # windows and tokens
_NAMED = ("dual_chunk", "contiguous", "balanced")


@st.composite
def compressions(
    draw: DrawFn, cp_sizes: Sequence[int] = FEW_SIZES, dtypes: Sequence[str] = OFTEN_EXACT
) -> CompressKeys:
    """A problem of `compress_keys`."""
    rate = draw(st.sampled_from(RATES))
    return CompressKeys(
        draw(window_cases(cp_sizes, dtypes, rate)),
        rate=rate,
        width=draw(st.sampled_from([3, 1, 8, 17])),
        overlap=draw(st.booleans()),
        biased=draw(st.booleans()),
        wide_gates=draw(st.booleans()),
    )


@st.composite
def compressed_attentions(
    draw: DrawFn, cp_sizes: Sequence[int] = FEW_SIZES, dtypes: Sequence[str] = OFTEN_EXACT
) -> CompressedAttention:
    """A problem of `compressed_attention`."""
    rate = draw(st.sampled_from(RATES))
    case = draw(window_cases(cp_sizes, dtypes, rate))
    return CompressedAttention(
        case,
        top_k=draw(st.sampled_from([3, 1, 2, 8, 33])),
        rate=rate,
        naming=draw(st.sampled_from([CLOSED, *NAMINGS])),
        by_head=draw(st.booleans()),
        tokens=draw(st.sampled_from([True, True, False])),
        latent=case.problem.d_v <= case.problem.d_qk and draw(st.booleans()),
        scale_of_call=draw(st.booleans()),
    )


def compressed_selections(
    cp_sizes: Sequence[int] = FEW_SIZES, dtypes: Sequence[str] = OFTEN_EXACT
) -> st.SearchStrategy[SelectKeys]:
    """A problem of `select_keys` among entries."""
    return _among_entries(selections(cp_sizes, dtypes), cp_sizes, dtypes)


def compressed_losses(
    cp_sizes: Sequence[int] = FEW_SIZES, dtypes: Sequence[str] = OFTEN_EXACT
) -> st.SearchStrategy[IndexLoss]:
    """A problem of `index_loss` over entries."""
    return _among_entries(index_losses(cp_sizes, dtypes), cp_sizes, dtypes)


@st.composite
def _among_entries(draw: DrawFn, problems: Any, cp_sizes: Sequence[int], dtypes: Sequence[str]) -> Any:
    """One of an indexer's problems, with entries for keys."""
    problem, rate = draw(problems), draw(st.sampled_from(RATES))
    return replace(problem, case=draw(window_cases(cp_sizes, dtypes, rate)), rate=rate)
