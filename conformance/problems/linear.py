"""Level `linear`: linear attention and causal convolutions on every rank of a group, against the recurrence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from conformance.case import Case, check_counts, dtype_of, wide_dtype
from conformance.checks.budgets import worst
from conformance.checks.reference import dense_causal_conv1d, dense_linear_attention, values_of_ranks
from conformance.implementation import Implementation, context
from conformance.problems.problem import CaseProblem, in_company, shape_findings
from conformance.problems.strategies import FEW_SIZES, OFTEN_EXACT, tables
from conformance.tensors import assemble, cumulative, marked_slots, plan_arguments, real_tokens, take_slice
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.values import check_choice
from cp_ref.schedules.words import CP_COMM_TYPES, LAYOUTS

__all__ = [
    "ACTIVATIONS",
    "LINEAR_KINDS",
    "CausalConv1d",
    "LayerResults",
    "LinearAttention",
    "LinearCase",
    "LinearTensors",
    "batch_of",
    "batches",
    "build_linear",
    "compare_linear",
    "convolutions",
    "exact_linear",
    "judged_documents",
    "judged_results",
    "judged_rows",
    "linear_attentions",
    "play_layer",
]

# ---- problems


LINEAR_KINDS = ("gated_delta_rule", "kda", "mamba2", "mamba")
ACTIVATIONS = (None, "silu", "swish")


def batch_of(
    documents: Seq[tuple[int, int]], cp_size: int = 2, qkv_format: Any = "thd", *, layout: Any = "dual_chunk",
    tail: int = 0, seed: int = 0, **fields: Any,
) -> Case:  # fmt: skip
    """The batch of these documents, (tokens, slots) of each, for linear layers. tail: slots behind them, for each rank.
    fields: others of the problem.
    """
    full = all(tokens == slots for tokens, slots in documents)
    masked = qkv_format != "thd" and (not full or layout == "balanced" or not isinstance(layout, str))
    sequences = tuple(Sequence(tokens, tokens, slots, slots) for tokens, slots in documents)
    fields = {"dtype": "float64", "heads_q": cp_size, "heads_kv": cp_size, **fields}
    mask = "padding_causal" if masked else "causal"
    problem = Problem(cp_size, sequences, layout=layout, qkv_format=qkv_format, attn_mask_type=mask, **fields)
    return Case(problem, tail_q=tail * cp_size, tail_kv=tail * cp_size, seed=seed)


_PLAIN = batch_of([(8, 8)])


@dataclass(frozen=True)
class LinearCase(CaseProblem):
    """The fields of both layers."""

    counts: ClassVar[tuple[str, ...]] = ()  # The fields that are positive integers.
    case: Case = _PLAIN
    wide: bool = False  # g and beta, or weight and bias, are in float32 with a low dtype.
    spoiled: int = -1  # The document whose tokens are NaN on the ranks; the others may not know. -1: none.

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        check_counts(self, self.counts)
        if type(self.spoiled) is not int or not -1 <= self.spoiled < len(self.problem.sequences):
            raise ValueError(f"spoiled is {self.spoiled!r}; it must be the number of a document, or -1")

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are no tensors."""
        raise NotImplementedError

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings about the layer's results and gradients on all ranks, against the recurrence."""
        tensors = build_linear(self, device)

        def one_rank(member: Any) -> LayerResults:
            return play_layer(impl, self, tensors, context(impl, self.problem, member), member.rank)

        ranks, found = values_of_ranks(self.cp_size, one_rank, impl.Unsupported, NotImplementedError)
        return found or compare_linear(self, tensors, ranks)


@dataclass(frozen=True)
class LinearAttention(LinearCase):
    """One `linear_attention`, forward and backward."""

    counts: ClassVar[tuple[str, ...]] = ("heads", "shared", "d_k", "d_v")
    kind: str = "gated_delta_rule"
    heads: int = 1
    shared: int = 1  # Value heads for each head of q and k.
    d_k: int = 3
    d_v: int = 2
    scale: float | None = None
    initial_state: bool = False
    output_final_state: bool = False

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        super().__post_init__()
        check_choice("kind", self.kind, LINEAR_KINDS)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are no tensors."""
        return {"kind": self.kind, "scale": self.scale}


@dataclass(frozen=True)
class CausalConv1d(LinearCase):
    """One `causal_conv1d`, forward and backward."""

    counts: ClassVar[tuple[str, ...]] = ("channels", "kernel_size")
    channels: int = 2
    kernel_size: int = 4
    bias: bool = True
    activation: str | None = None

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        super().__post_init__()
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}; it must be one of {ACTIVATIONS}")

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are no tensors."""
        return {"activation": self.activation}


# ---- strategies
#
# Strategies of the level `linear`: documents that are empty, short, or longer than a kernel's chunk, in any layout.


_LONG = (63, 64, 65, 100, 130)  # Around a kernel's chunk, and two.
_REAL_DIMS = ((64, 64), (64, 128), (128, 128))


@st.composite
def batches(
    draw: DrawFn,
    cp_sizes: Seq[int] = FEW_SIZES,
    dtypes: Seq[str] = ("float64",),
    most: int = 16,
    long: tuple[int, ...] = _LONG,
) -> Case:
    """A batch of at most four documents of at most `most` slots, or rarely one of `long`."""
    cp_size = draw(st.sampled_from(sorted(cp_sizes, key=lambda n: (n == 1, n))))
    comm = draw(st.sampled_from(CP_COMM_TYPES))
    divisors = [n for n in range(1, cp_size + 1) if cp_size % n == 0]
    a2a_size = {"a2a": cp_size, "a2a+p2p": draw(st.sampled_from(divisors))}.get(comm, 1)
    layout: Any = draw(st.sampled_from((*LAYOUTS, "table")))
    qkv_format = draw(st.sampled_from(["thd", "thd", "bshd", "sbhd"]))
    slots = draw(st.lists(st.integers(0, most), min_size=1, max_size=4))
    if long and draw(st.integers(0, 7)) == 7:
        slots[0] = draw(st.sampled_from(long))
    slots = slots if qkv_format == "thd" else [max(slots)] * (1 if max(slots) > most else len(slots))
    padded = draw(st.booleans())
    documents = [(draw(st.sampled_from([n, 0, 1]) | st.integers(0, n)) if padded and n else n, n) for n in slots]
    return batch_of(
        documents,
        cp_size,
        qkv_format,
        layout=draw(tables(slots, cp_size)) if layout == "table" else layout,
        cp_comm_type=comm,
        a2a_size=a2a_size,
        tail=draw(st.integers(0, 2)) if qkv_format == "thd" else 0,
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 999)),
    )


@st.composite
def _fields(draw: DrawFn, cp_sizes: Seq[int], dtypes: Seq[str]) -> dict[str, Any]:
    """The fields of both layers."""
    case = draw(batches(cp_sizes, dtypes))
    several = len(case.problem.sequences)
    return {
        "case": case,
        "wide": case.problem.dtype in ("bfloat16", "float16") and draw(st.booleans()),
        "spoiled": draw(st.sampled_from([-1, -1, *(range(several) if several > 1 else ())])),
    }


@st.composite
def linear_attentions(draw: DrawFn, cp_sizes: Seq[int] = FEW_SIZES, dtypes: Seq[str] = OFTEN_EXACT) -> LinearAttention:
    """A problem of `linear_attention`; the dims of models are rare, for their kernels."""
    kind = draw(st.sampled_from(LINEAR_KINDS))  # first: what Hypothesis draws last depends on the batch most
    given = draw(_fields(cp_sizes, dtypes))
    small = st.tuples(st.sampled_from([3, 2, 4, 1]), st.integers(1, 3))
    d_k, d_v = draw(st.sampled_from(_REAL_DIMS) if draw(st.integers(0, 7)) == 7 else small)
    return LinearAttention(
        **given,
        kind=kind,
        heads=draw(st.integers(1, 2)),
        shared=draw(st.integers(1, 2)),
        d_k=d_k,
        d_v=d_v,
        scale=draw(st.sampled_from([None, 0.5, -1])),
        initial_state=draw(st.booleans()),
        output_final_state=draw(st.booleans()),
    )


@st.composite
def convolutions(draw: DrawFn, cp_sizes: Seq[int] = FEW_SIZES, dtypes: Seq[str] = OFTEN_EXACT) -> CausalConv1d:
    """A problem of `causal_conv1d`."""
    return CausalConv1d(
        **draw(_fields(cp_sizes, dtypes)),
        channels=draw(st.integers(1, 3)),
        kernel_size=draw(st.integers(1, 6)),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)),
    )


# ---- tensors
#
# The global tensors of a problem of linear layers, and their exact results.
#
# Slots that are no real token hold NaN in what ranks get. So do the tokens of `spoiled`, the gradients of their
# results, and the document's initial state; the oracle has numbers there.


@dataclass(frozen=True)
class LinearTensors:
    """Global tensors, with numbers in every slot.

    Attributes:
        rows: the inputs with a row for each token, by argument, in the format of the batch; all have gradients.
        alike: the inputs that every rank has alike, by argument; their gradients are shares.
        dout: the gradient of the result.
        dfinal: the gradients of the final states on every rank [cp_size, b, h_v, d_k, d_v]; None without them.
    """

    rows: dict[str, torch.Tensor]
    alike: dict[str, torch.Tensor]
    dout: torch.Tensor
    dfinal: torch.Tensor | None


def build_linear(case: LinearCase, device: str = "cpu") -> LinearTensors:
    """The problem's tensors, equal for equal problems. Keys have length 1, so that states do not grow; decays are
    weak, so that a state is still there after many tokens."""
    draw = case.generator()
    lead, low = tuple(real_tokens(case.case, "q").shape), dtype_of(case.problem.dtype)
    state_dtype = wide_dtype(case.problem.dtype)
    gates = torch.float32 if case.wide else low

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    if isinstance(case, CausalConv1d):
        shapes = {"weight": (case.channels, case.kernel_size)} | ({"bias": (case.channels,)} if case.bias else {})
        x, dout = (some(*lead, case.channels).to(device, low) for _ in range(2))
        return LinearTensors({"x": x}, {n: some(*shape).to(device, gates) for n, shape in shapes.items()}, dout, None)
    assert isinstance(case, LinearAttention)
    heads_v = case.heads * case.shared
    rows = {
        "q": some(*lead, case.heads, case.d_k).to(low),
        "k": torch.nn.functional.normalize(some(*lead, case.heads, case.d_k), dim=-1).to(low),
        "v": some(*lead, heads_v, case.d_v).to(low),
        "g": -0.2 * some(*lead, heads_v, *{"kda": [case.d_k], "mamba": [case.d_v]}.get(case.kind, [])).abs().to(gates),
    }
    alike: dict[str, torch.Tensor] = {}
    if case.kind == "mamba":
        rows["g"] = -rows["g"]
        alike["A"] = -some(heads_v, case.d_k, case.d_v).abs().to(device, gates)
    elif case.kind != "mamba2":
        rows["beta"] = some(*lead, heads_v).sigmoid().to(gates)
    states = len(case.problem.sequences), heads_v, case.d_k, case.d_v
    if case.initial_state:
        alike["initial_state"] = some(*states).to(device, state_dtype)
    dfinal = some(case.cp_size, *states).to(device, state_dtype) if case.output_final_state else None
    dout = some(*lead, heads_v, case.d_v).to(device, low)
    return LinearTensors({name: x.to(device) for name, x in rows.items()}, alike, dout, dfinal)


def exact_linear(case: LinearCase, tensors: LinearTensors) -> dict[str, torch.Tensor]:
    """The oracle's results and gradients in float64, by name (out, final_state, dq, ...), of all ranks together."""
    leaves = {name: x.double().requires_grad_() for name, x in (tensors.rows | tensors.alike).items()}
    real = real_tokens(case.case, "q").to(tensors.dout.device)
    real = real[(..., *[None] * (tensors.dout.dim() - real.dim()))]
    lengths: dict[str, Any] = {"qkv_format": case.problem.qkv_format}
    lengths["cu_seqlens"] = torch.tensor(cumulative(case.problem, "len_q"))
    if case.problem.qkv_format == "thd":
        lengths["cu_seqlens_padded"] = torch.tensor(cumulative(case.problem, "slots_q"))
    with torch.enable_grad():
        if isinstance(case, LinearAttention):
            out, final = dense_linear_attention(**leaves, **case.options, **lengths)
        else:
            out, final = dense_causal_conv1d(**leaves, **case.options, **lengths), None
        loss = (out * tensors.dout.double().masked_fill(~real, 0.0)).sum()
        if final is not None and tensors.dfinal is not None:
            loss = loss + (final * tensors.dfinal.double().sum(dim=0)).sum()
    results = {"out": out.detach()}
    if final is not None and tensors.dfinal is not None:
        results["final_state"] = final.detach()
    grads = [torch.zeros_like(leaf) for leaf in leaves.values()]
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return results | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def judged_documents(case: LinearCase) -> torch.Tensor:
    """Which documents are judged: bool [b]."""
    return torch.arange(len(case.problem.sequences)) != case.spoiled


def judged_rows(case: LinearCase) -> torch.Tensor:
    """Which slots do not belong to the spoiled document: bool, in the format's axes, as `real_tokens` has them."""
    keep = [torch.full((one.slots_q,), n != case.spoiled) for n, one in enumerate(case.problem.sequences)]
    return marked_slots(case.case, "q", keep, tail=True)


# ---- playing and judging
#
# Playing a problem of linear layers on every rank, and judging the results.
#
# In float64 and float32 each value is judged. In low precision the root of the mean square of a result's error is, in
# units of the result's own and of the typical result's: a chunked kernel rounds what it multiplies.


LIMITS = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
LayerResults = dict[str, torch.Tensor]  # One rank's local results and gradients.
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]  # Found values, and exact values.


def play_layer(impl: Implementation, case: LinearCase, tensors: LinearTensors, cp: Any, rank: int) -> LayerResults:
    """One rank's forward and backward pass. cp: the implementation's `ContextParallel`."""
    plan = impl.make_plan(cp=cp, **plan_arguments(case.problem, str(tensors.dout.device)), linear=True)
    local = partial(_slice, case, rank=rank)
    leaves = {name: local(x).requires_grad_() for name, x in tensors.rows.items()}
    for name, x in tensors.alike.items():
        leaves[name] = x.clone()
        if name == "initial_state" and case.spoiled >= 0:
            leaves[name][case.spoiled] = torch.nan
        leaves[name].requires_grad_()
    roots, seeds = [], [local(tensors.dout)]
    with torch.enable_grad():
        if isinstance(case, LinearAttention):
            final = {"output_final_state": tensors.dfinal is not None}
            got = in_company(impl.linear_attention)(**leaves, cp=cp, plan=plan, **case.options, **final)
            roots += got if tensors.dfinal is not None else [got]
        else:
            roots.append(in_company(impl.causal_conv1d)(**leaves, cp=cp, plan=plan, **case.options))
    if tensors.dfinal is not None:
        seeds.append(tensors.dfinal[rank].clone())
        if case.spoiled >= 0:
            seeds[1][case.spoiled] = torch.nan
    seeds = [seed.to(root.dtype) for seed, root in zip(seeds, roots, strict=True)]
    grads = torch.autograd.grad(roots, list(leaves.values()), seeds, allow_unused=True)
    found: LayerResults = dict(zip(("out", "final_state"), (root.detach() for root in roots), strict=False))
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        if grad is None and leaf.numel():
            raise AssertionError(f"{name} has no gradient")
        found[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def _slice(case: LinearCase, x: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's slice, with NaN wherever nobody may read."""
    hidden = ~(real_tokens(case.case, "q") & judged_rows(case)).to(x.device)
    hidden = hidden[(..., *[None] * (x.dim() - hidden.dim()))]
    return take_slice(case.case, x.masked_fill(hidden, torch.nan), "q", rank)


def compare_linear(case: LinearCase, tensors: LinearTensors, ranks: list[LayerResults]) -> list[str]:
    """Findings: the form of each rank's results, zeros where there is no token, and values against exact ones."""
    found = [f"rank {n}: {finding}" for n, results in enumerate(ranks) for finding in _form(case, tensors, results, n)]
    if found:
        return found
    return _findings(case, judged_results(case, tensors, ranks))


def judged_results(case: LinearCase, tensors: LinearTensors, ranks: list[LayerResults]) -> Pairs:
    """The ranks' results together, by name, with the exact values. A spoiled document's rows are left out."""
    exact, keep, documents = exact_linear(case, tensors), judged_rows(case), judged_documents(case)
    judged: Pairs = {}
    for name in ranks[0]:
        local = [results[name] for results in ranks]
        if name.removeprefix("d") in tensors.alike:
            if name != "dinitial_state" and case.spoiled >= 0:
                continue  # the spoiled document is part of the sum
            total = torch.stack([x.double() for x in local]).sum(dim=0)
            pair = (total[documents], exact[name][documents]) if name == "dinitial_state" else (total, exact[name])
            judged[name] = pair
        elif name == "final_state":
            judged |= {f"{name} of rank {n}": (x[documents], exact[name][documents]) for n, x in enumerate(local)}
        else:
            judged[name] = assemble(case.case, local, "q")[keep], exact[name][keep]
    return judged


def _findings(case: LinearCase, judged: Pairs) -> list[str]:
    limit = LIMITS[case.problem.dtype]
    sizes = {name: _size(exact) for name, (_, exact) in judged.items()}
    typical = sum(sizes.values()) / max(len(sizes), 1)
    found: list[str] = []
    for name, (got, exact) in judged.items():
        if case.problem.dtype in ("float64", "float32"):
            found += worst(name, got, exact, limit * (1 + exact.abs()))
        elif not (error := _size(got.double() - exact)) <= (bound := limit * max(sizes[name], typical)):
            found.append(f"{name} has errors of {error:.2g} (root of the mean square), allowed {bound:.2g}")
    return found


def _size(x: torch.Tensor) -> float:
    """The root of the mean square."""
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def _form(case: LinearCase, tensors: LinearTensors, results: LayerResults, rank: int) -> list[str]:
    """Findings about shapes, dtypes, and rows that are no token of any document."""
    found: list[str] = []
    real = real_tokens(case.case, "q").to(tensors.dout.device, torch.int64)
    empty = take_slice(case.case, real, "q", rank) == 0
    inputs = {f"d{name}": x for name, x in (tensors.rows | tensors.alike).items()} | {"out": tensors.dout}
    for name, x in results.items():
        if name == "final_state":
            assert tensors.dfinal is not None
            found += shape_findings(name, x, tensors.dfinal.shape[1:], [tensors.dfinal.dtype])
            continue
        like, alike = inputs[name], name.removeprefix("d") in tensors.alike
        shape = like.shape if alike else (*empty.shape, *like.shape[empty.dim() :])
        wrong = shape_findings(name, x, shape, [like.dtype])
        if not wrong and not alike and not (x[empty] == 0).all():
            wrong = [f"{name} is not zero where there is no token"]
        found += wrong
    return found
