"""Problems that `benchmarks.conformance_gpu` draws, by kind, on few kernels.

Head dims, softcaps and, where scores know their places, head groups are folded onto a few, since each combination costs
FlashAttention 4 seconds of compilation. Lengths, padding, layouts, schedules, formats and masks are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from hypothesis import assume
from hypothesis import strategies as st

from conformance.case import Case
from conformance.problems.capabilities import EVERYTHING
from conformance.problems.linear import CausalConv1d, LinearCase, convolutions, linear_attentions
from conformance.problems.problem import CaseProblem
from conformance.problems.sparse import SparseAttention, SparseCase, index_losses, selections, sparse_attentions
from conformance.problems.strategies import cases, tables
from conformance.runner.play_problem import Runner
from cp_fast import masks
from cp_fast.compile.pipeline import compiled
from cp_fast.compile.program import Launch
from cp_fast.tools.cost.counts import LIBRARY
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.problem import Sequence as Lengths
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS
from tests.spec.problems import problems_of_areas

__all__ = ["ATTENTION", "KINDS", "parts_of"]

DTYPES = ("bfloat16", "float16")
_GROUPS = st.sampled_from([1, 2, 4])


class KernelClass(NamedTuple):
    """A launch with scores of places has one of few kernels, by these numbers, its mask and the form of its rows."""

    group: int  # query heads for each kv head, in each launch
    head_dim: int


KERNEL_CLASSES = (KernelClass(1, 128), KernelClass(4, 128), KernelClass(1, 64), KernelClass(4, 64), KernelClass(3, 128))


def parts_of(kind: str) -> int:
    """How many parts a kind has: one for each class of kernels that it names.

    >>> parts_of("areas"), parts_of("dropout")
    (1, 5)
    """
    return len(KERNEL_CLASSES) if kind in SCORES else 1


def folded(case: Case) -> Case:
    """The same problem with one of a few head dims and softcaps."""
    p = case.problem
    equal = 64 if p.d_qk <= 16 else 128
    d_qk, d_v = (192, 128) if p.d_qk > p.d_v else (equal, equal)
    softcap = 30.0 if p.softcap else 0.0
    problem = replace(p, d_qk=d_qk, d_v=d_v, softcap=softcap, softmax_scale=None, score_mod="", dropout_p=0.0)
    return replace(case, problem=problem, alibi="")


def scaled(problem: Problem, times: int) -> Problem:
    """The problem with this number of rows for each of its rows. Areas that share no pair share none then either."""
    sequences = tuple(
        Lengths(*(times * n for n in (s.len_q, s.len_kv, s.slots_q, s.slots_kv))) for s in problem.sequences
    )
    areas = tuple(tuple(n if n < 0 else times * n for n in area) for area in problem.areas or ())
    return replace(problem, sequences=sequences, areas=areas)


@st.composite
def of_anything(draw: st.DrawFn, runner: Runner, cp_sizes: Sequence[int], part: int) -> Case:
    """Cases of the suite."""
    return folded(draw(cases(runner.capabilities(), cp_sizes=cp_sizes, dtypes=DTYPES)))


@st.composite
def of_layouts(draw: st.DrawFn, runner: Runner, cp_sizes: Sequence[int], part: int) -> Case:
    """Cases without areas, half of them of self-attention, half of which may have a table."""
    capabilities = runner.capabilities()
    if draw(st.booleans()):
        lengths = tuple(choice for choice in capabilities.choices["lengths"] if choice != "cross")
        capabilities = replace(capabilities, choices=capabilities.choices | {"lengths": lengths})
    case = draw(cases(capabilities, cp_sizes=cp_sizes, dtypes=DTYPES).filter(lambda case: case.problem.areas is None))
    p = case.problem
    itself = all((s.len_q, s.slots_q) == (s.len_kv, s.slots_kv) for s in p.sequences)
    if itself and (p.qkv_format == "thd" or p.attn_mask_type.startswith("padding")) and draw(st.booleans()):
        case = replace(case, problem=replace(p, layout=draw(tables(p.lengths.slots_q, p.cp_size))))
    return folded(case)


@st.composite
def of_areas(draw: st.DrawFn, runner: Runner, cp_sizes: Sequence[int], part: int) -> Case:
    """Cases of a few areas, from a dozen rows to hundreds."""
    problem = draw(problems_of_areas(cp_sizes, (*LAYOUTS, "balanced")))
    dims: dict[str, Any] = {"d_qk": 64, "d_v": 64, "softcap": 0.0, "dtype": draw(st.sampled_from(DTYPES))}
    problem = replace(scaled(problem, draw(st.sampled_from([1, 1, 7, 13]))), **dims)
    tail = draw(st.integers(0, 1)) * problem.cp_size
    return Case(
        problem, tail, tail, use_plan=draw(st.booleans()), return_lse=True, return_max_logit=True, loss="out+lse"
    )


@st.composite
def of_common_keys(draw: st.DrawFn, runner: Runner, cp_sizes: Sequence[int], part: int) -> Case:
    """Cases whose launches have segments with common keys (`cp_fast.tiles.launches`). Their rows fill the tiles
    of a kernel, so that a plan has such launches."""
    size, comm, group = draw(st.sampled_from(cp_sizes)), draw(st.sampled_from(CP_COMM_TYPES)), draw(_GROUPS)
    unit, a2a = 128 // group, {"a2a": size, "a2a+p2p": 2}.get(comm, 1)
    assume(size % a2a == 0)
    block, count = unit * draw(st.integers(1, 2)), draw(st.integers(3, 8))
    prompt = unit * draw(st.integers(1, 4))
    made = draw(st.sampled_from(["block_causal", "shared_prefix", "seen_blocks"]))
    if made == "block_causal":
        areas = masks.block_causal(count * block, block)
    elif made == "shared_prefix":
        areas = masks.shared_prefix(prompt, [block] * count)
    else:  # A block sees all keys up to its end.
        areas = torch.tensor([(n, n + block, 0, n + block, -1, -1) for n in range(0, count * block, block)])
    rows = int(areas[:, 1].max())
    heads = draw(st.integers(1, 2)) * a2a
    sizes: dict[str, Any] = {"heads_q": group * heads, "heads_kv": heads, "d_qk": 128, "d_v": 128}
    layout, dtype = draw(st.sampled_from((*LAYOUTS, "balanced"))), draw(st.sampled_from(DTYPES))
    rows_of_areas = tuple(map(tuple, areas.tolist()))
    problem = Problem(
        *(size, (Lengths(*[rows] * 4),), comm, a2a),
        layout=layout,
        qkv_format="thd",
        areas=rows_of_areas,
        dtype=dtype,
        **sizes,
    )
    passes = (compiled(problem, rank, LIBRARY).programs.forward for rank in range(size))
    assume(any(one.batch.starts for program in passes for one in program.of(Launch)))
    return Case(problem, use_plan=draw(st.booleans()), return_lse=True, loss="out+lse")


Kind = Callable[[Runner, Sequence[int], int], st.SearchStrategy[Case | CaseProblem]]


def of_scores(
    alibi: Sequence[str] = ("",), score_mods: Sequence[str] = ("",), dropout: Sequence[float] = (0.0,)
) -> Kind:
    """Cases with one score of places. A part has one class of kernels, and one of the given scores, which its number
    names.
    """
    plain = replace(EVERYTHING, choices=EVERYTHING.choices | {"window": (), "areas": (), "softcap": ("off",)})

    @st.composite
    def drawn(draw: st.DrawFn, runner: Runner, cp_sizes: Sequence[int], part: int) -> Case:
        case = folded(draw(cases(plain, cp_sizes=cp_sizes, dtypes=("bfloat16",))))
        group, head_dim = KERNEL_CLASSES[part % len(KERNEL_CLASSES)]
        scores: dict[str, Any] = {"score_mod": score_mods[part % len(score_mods)], "softcap": 0.0}
        scores |= {"dropout_p": dropout[part % len(dropout)], "d_qk": head_dim, "d_v": head_dim}
        heads = max(2, case.problem.a2a_size)  # of k and v: whole groups on each rank
        problem = replace(case.problem, heads_q=group * heads, heads_kv=heads, **scores)
        return replace(case, problem=problem, alibi=alibi[part % len(alibi)], deterministic=False)

    return drawn


@st.composite
def of_linear(draw: st.DrawFn, runner: Runner, cp_sizes: Sequence[int], part: int) -> LinearCase:
    """Linear attention of the sizes that `benchmarks.linear check` has, and convolutions; a third in longer
    documents.
    """
    case: LinearCase = draw(linear_attentions(cp_sizes, ("bfloat16",)) | convolutions(cp_sizes, ("bfloat16",)))
    times = draw(st.sampled_from([1, 1, 9])) if isinstance(case.problem.layout, str) else 1
    sizes: dict[str, Any] = {"heads": 2, "shared": 2, "d_k": 64, "d_v": 128}
    if isinstance(case, CausalConv1d):
        sizes = {"channels": 136, "kernel_size": 2 if case.kernel_size < 3 else 4}
    longer = tuple(Lengths(*[times * s.len_q] * 2, *[times * s.slots_q] * 2) for s in case.problem.sequences)
    batch = replace(case.case, problem=replace(case.problem, sequences=longer))
    return replace(case, case=batch, wide=True, **sizes)


_LATENT = {"heads_q": 16, "heads_kv": 1, "d_qk": 576, "d_v": 512}


@st.composite
def of_sparse(draw: st.DrawFn, runner: Runner, cp_sizes: Sequence[int], part: int) -> SparseCase:
    """Attention to chosen keys, an indexer's choice and its loss, with the dims of models: half in the latent form."""
    kinds = sparse_attentions, sparse_attentions, selections, index_losses
    case: SparseCase = draw(kinds[part % len(kinds)](cp_sizes, ("bfloat16",)))
    heads = case.problem.a2a_size
    sizes = _LATENT if draw(st.booleans()) else {"heads_q": 4 * heads, "heads_kv": heads, "d_qk": 128, "d_v": 128}
    if sizes["heads_q"] % heads:  # a2a over three ranks
        sizes = {**_LATENT, "heads_q": 12 * heads}
    problem = replace(case.problem, softmax_scale=None, **sizes)
    more = (
        {"latent": sizes["d_v"] == _LATENT["d_v"]}
        if isinstance(case, SparseAttention)
        else {"heads": 4, "d_index": 128}
    )
    return replace(case, case=replace(case.case, problem=problem), top_k=draw(st.sampled_from([16, 64])), **more)


SCORES: dict[str, Kind] = {
    "alibi": of_scores(alibi=("head", "document")),
    "score_mod": of_scores(score_mods=("hidden", "near", "by_key", "by_document", "by_head")),
    "dropout": of_scores(dropout=(0.1, 0.25, 0.5)),
}
ATTENTION: dict[str, Kind] = {
    "anything": of_anything,
    "layouts": of_layouts,
    "areas": of_areas,
    "common_keys": of_common_keys,
    **SCORES,
}
KINDS: dict[str, Kind] = {**ATTENTION, "linear": of_linear, "sparse": of_sparse}
