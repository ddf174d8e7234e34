"""`linear_attention`: a linear layer of a hybrid model, on the slices of attention.

A pass has three parts: local kernels, the exchange of maps, and their composition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.kernels.linear.chunked import ChunkedKernels
from cp_fast.kernels.linear.fla.fla_kernels import FlaKernels
from cp_fast.kernels.linear.linear_kernels import LinearGradients, LinearInputs, LinearKernels, Maps
from cp_fast.kernels.linear.scan_kernels import ScanKernels
from cp_fast.kernels.this_gpu import NotInstalled
from cp_fast.layers.layer_operators import called, registered
from cp_fast.layers.layers import Layer, Outputs, Run
from cp_fast.layers.linear_plan import REVERSED_STATES, STATES, LinearTables, linear_tables
from cp_fast.layers.state_tables import StateTables
from cp_fast.log import log_once
from cp_ref.batches.tensors import wide_dtype
from cp_ref.calls import linear_calls
from cp_ref.calls.layer import LayerCall, public_function
from cp_ref.calls.linear_calls import LinearCall, columns_apart, columns_together
from cp_ref.groups.collectives import all_reduce_sum
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "LAYER",
    "LIBRARIES",
    "LinearLayer",
    "NoRowsBackward",
    "NoRowsForward",
    "Saved",
    "backward_pass",
    "choose_kernels",
    "features_of_call",
    "forward_pass",
    "linear_attention",
]

# ---- the choice of a library
#
# The choice of a library of linear attention, by the rule of `cp_fast.kernels.attention.choose_backend`.


LIBRARIES: tuple[LinearKernels, ...] = FlaKernels(), ScanKernels(), ChunkedKernels()
_NAMES = {"torch": ("torch",), "cpu": ("torch",)}  # by ContextParallel.backend; others mean all, in their order


def features_of_call(device: str, dtype: str, d_k: int, d_v: int) -> frozenset[Feature]:
    """Return the features that a call needs of a library. dtype: PyTorch's name without "torch.".

    >>> sorted(features_of_call("cpu", "float32", 128, 20))
    [<Feature.CPU: 'device cpu'>, <Feature.FLOAT32: 'float32'>, <Feature.HEAD_DIM_ODD: 'head dim not a multiple of 8'>]
    """
    conditions = {
        Feature.HEAD_DIM_OVER_128: max(d_k, d_v) > 128,
        Feature.HEAD_DIM_OVER_256: max(d_k, d_v) > 256,
        Feature.HEAD_DIM_ODD: d_k % 8 != 0 or d_v % 8 != 0,
    }
    always = {Feature(f"device {device}"), Feature(dtype)}
    return frozenset(always | {feature for feature, needed in conditions.items() if needed})


@cache
def choose_kernels(required: frozenset[Feature], backend: str, kind: str) -> LinearKernels:
    """The first library that has this kind and every feature, and works here. `ContextParallel.backend` "torch" or
    "cpu" takes plain PyTorch; "auto", and the name of a library of attention, take flash-linear-attention first.

    Raises:
        Unsupported: there is none; it names for every library the features that it lacks, or why it does not work.
    """
    names = _NAMES.get(backend)
    missing: dict[str, frozenset[Feature]] = {}
    reasons: list[str] = []
    missed: list[str] = []
    for library in LIBRARIES:
        if (names is not None and library.name not in names) or kind not in library.kinds:
            continue
        if lacking := required - library.features:
            missing[library.name] = lacking
        elif (reason := library.why_not()) is not None:
            reasons.append(f"{library.name} does not work here: {reason}")
            if isinstance(reason, NotInstalled):
                missed.append(f"{library.name}: {reason}")
        else:
            if missed:
                log_once(
                    f"linear attention runs on {library.name}; what this GPU prefers is not installed "
                    f"({'; '.join(missed)}); ContextParallel(backend={library.name!r}) takes it without a word"
                )
            return library
    raise Unsupported(f"linear attention with backend {backend!r}", missing, hint="\n  ".join(reasons))


# ---- the layer


class LinearLayer(Layer):
    """Linear attention: local kernels, the exchange of maps, and their composition."""

    declared = linear_calls.LINEAR
    tables = staticmethod(linear_tables)
    hides = True

    def read(self, cp: ContextParallel, plan: Any, tensors: Any, options: dict[str, Any], facts: Any) -> LayerCall:
        """The call, once there is a library for it."""
        call = super().read(cp, plan, tensors, options, facts)
        kernels_for(cast(LinearCall, call), cp, tensors[0].device)
        return call

    def shapes(self, tensors: Sequence[Any], qkv_format: str, options: dict[str, Any]) -> list[torch.Tensor]:
        """Out, and the final states if asked for."""
        q, _, v, *_, initial = tensors
        out = q.new_empty(v.shape)
        if not options["output_final_state"]:
            return [out]
        if initial is not None:
            documents = initial.shape[0]
        elif qkv_format == "thd":
            documents = torch.library.get_ctx().new_dynamic_size()
        else:
            documents = q.shape[0 if qkv_format == "bshd" else 1]
        return [out, q.new_empty(documents, v.shape[-2], q.shape[-1], v.shape[-1], dtype=wide_dtype(q.dtype))]

    def forward(self, run: Run, *tensors: Any) -> Outputs:
        """Out and the final states; hidden are the kernels' tensors, the maps and the entering states."""
        tables, call = run.tables, run.call
        *of_tokens, rates, initial = tensors
        first = of_tokens[0]
        kernels = kernels_for(call, run.cp, first.device)
        inputs = _packed(tables, call, of_tokens, rates)
        if initial is not None:
            initial = _states(call, initial.to(_state_dtype(call.dtype)))
        out, final, saved = forward_pass(run, kernels, inputs, initial, final=call.output_final_state)
        out = out.to(first.dtype).reshape(len(out), call.heads_v, call.d_v)
        out = tables.sequences.put(out, first)
        kept, maps, entering = saved
        results = (out,) if final is None else (out, _states_of_call(call, final))
        return results, (maps, entering, *kept)

    def backward(self, run: Run, tensors: Any, results: Any, hidden: Any, grads: Any) -> Any:
        """Gradients of all operands; that of initial_state is this rank's share."""
        tables, call, kernels = run.tables, run.call, kernels_for(run.call, run.cp, tensors[0].device)
        *of_tokens, rates, initial = tensors
        maps, entering, *kept = hidden
        dout, dfinal = grads[0], (*grads, None)[1]
        inputs = _packed(tables, call, of_tokens, rates)
        dpacked = _rows(tables, call, dout).to(inputs.v.dtype).view_as(inputs.v)
        dfinal = None if dfinal is None else _states(call, dfinal)
        found = backward_pass(run, kernels, inputs, Saved(tuple(kept), maps, entering), dpacked, dfinal)
        found = _gradients_of_call(call, found)
        of_inputs = [
            None if x is None or grad is None else tables.sequences.put(grad.to(x.dtype), x)
            for x, grad in zip(of_tokens, found[:5], strict=True)
        ]
        of_rest = [
            None if x is None or grad is None else grad.to(x.dtype)
            for x, grad in ((rates, found.dA), (initial, found.dinitial))
        ]
        return *of_inputs, *of_rest


LAYER = registered(LinearLayer())
linear_attention = public_function(linear_calls.linear_attention, called, LAYER, __name__)


def kernels_for(call: LinearCall, cp: ContextParallel, device: torch.device) -> LinearKernels:
    """The library of a call. Raises Unsupported."""
    return _kernels_for(device.type, call.dtype, call.d_k, call.d_v, cp.backend, call.kind)


@cache
def _kernels_for(device: str, dtype: str, d_k: int, d_v: int, backend: str, kind: str) -> LinearKernels:
    return choose_kernels(features_of_call(device, dtype, d_k, d_v), backend, kind)


def _packed(tables: LinearTables, call: LinearCall, tensors: Sequence[Any], rates: Any) -> LinearInputs:
    q, k, v, g, beta = (None if x is None else _rows(tables, call, x) for x in tensors)
    assert q is not None and k is not None and v is not None and g is not None  # noqa: PT018
    if rates is None:
        return LinearInputs(q, k, v, g, beta, call.scale, call.kind)
    v, g, rates = v.flatten(1)[..., None], g.flatten(1), columns_apart(rates)[..., 0]
    return LinearInputs(q, k, v, g, None, call.scale, "mamba", rates)


def _rows(tables: LinearTables, call: LinearCall, x: torch.Tensor) -> torch.Tensor:
    """Packed rows. Padding among them is zero where a sum over all rows is computed, as for A's gradient."""
    rows = tables.sequences
    return rows.zeroed(rows.take(x)) if call.kind == "mamba" else rows.take(x)


def _states(call: LinearCall, x: torch.Tensor) -> torch.Tensor:
    """The call's states [b, h_v, d_k, d_v], as those of the heads that kernels know."""
    return columns_apart(x) if call.kind == "mamba" else x


def _states_of_call(call: LinearCall, x: torch.Tensor) -> torch.Tensor:
    """`_states` undone."""
    return columns_together(x, call.d_v) if call.kind == "mamba" else x


def _gradients_of_call(call: LinearCall, found: LinearGradients) -> LinearGradients:
    """The gradients of the call's own tensors: packed rows, states and A."""
    if call.kind != "mamba":
        return found
    assert found.dA is not None
    dv, dg = (x.reshape(len(x), call.heads_v, call.d_v) for x in (found.dv, found.dg))
    dinitial = None if found.dinitial is None else columns_together(found.dinitial, call.d_v)
    return found._replace(dv=dv, dg=dg, dinitial=dinitial, dA=columns_together(found.dA[..., None], call.d_v))


def _state_dtype(dtype: str) -> torch.dtype:
    """Of states: float64 for float64, else float32."""
    return torch.float64 if dtype == "float64" else torch.float32


# ---- a rank without rows
#
# The passes of a rank without tokens: nothing to launch, and maps of others may go through it.


class _NoRows:
    """Empty tensors of the right shapes."""

    def __init__(self, inputs: LinearInputs) -> None:
        self._inputs = inputs
        d_k, (_, h_v, d_v) = inputs.q.shape[-1], inputs.v.shape
        dtype = torch.float64 if inputs.v.dtype == torch.float64 else torch.float32
        m = (0, h_v, *{"mamba2": (), "mamba": (d_k,)}.get(inputs.kind, (d_k, d_k)))
        self._maps = Maps(inputs.v.new_empty(m, dtype=dtype), inputs.v.new_empty(0, h_v, d_k, d_v, dtype=dtype))


class NoRowsForward(_NoRows):
    """See `ForwardRun`."""

    kept: tuple[torch.Tensor, ...] = ()

    def maps(self, chosen: Sequence[int]) -> Maps:
        """None."""
        return self._maps

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """No rows, no states."""
        return self._inputs.v, self._maps.b if final else None


class NoRowsBackward(_NoRows):
    """See `BackwardRun`."""

    def reverse_maps(self, chosen: Sequence[int], dfinal: torch.Tensor | None) -> torch.Tensor:
        """None."""
        return self._maps.b

    def meanwhile(self) -> None:
        """Nothing."""

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        """No rows, no states."""
        q, k, v, g, beta, *_ = self._inputs
        rates = self._inputs.A
        return LinearGradients(q, k, v, g, beta, self._maps.b, None if rates is None else torch.zeros_like(rates))


# ---- both passes


class Saved(NamedTuple):
    """The tensors that the backward pass needs besides the inputs."""

    kept: tuple[torch.Tensor, ...]  # of the kernels
    maps: torch.Tensor  # M of the fragments that have one
    entering: torch.Tensor | None  # the fragments' initial states


def entering_states(
    tables: StateTables,
    maps: Maps,
    states: torch.Tensor | None,
    fragments: int,
    kernels: LinearKernels,
    *,
    transposed: bool = False,
) -> torch.Tensor | None:
    """The states that enter the rank's fragments; None where all are zero. See `LinearKernels.compose`."""
    if states is None and not tables.composes:
        return None
    return kernels.compose(tables, maps, states, fragments, transposed=transposed)


def forward_pass(
    run: Run,
    kernels: LinearKernels,
    inputs: LinearInputs,
    initial_state: torch.Tensor | None,
    *,
    final: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, Saved]:
    """Out [n, h_v, d_v] of this rank's packed rows, the final states of all documents if asked for, and what to save.

    initial_state: [b, h_v, d_k, d_v] in the states' dtype, or None.
    """
    tables: LinearTables = run.tables
    fragments, (pass_tables, _) = tables.fragments, tables.passes
    running = kernels.forward(inputs, fragments) if len(fragments) else NoRowsForward(inputs)
    maps = running.maps(pass_tables.chosen)
    everywhere = Maps(*run.gather(STATES, *maps))
    entering = entering_states(pass_tables, everywhere, initial_state, len(fragments), kernels)
    out, states = running.run(entering, final=final)
    saved = Saved(tuple(running.kept), maps.m, entering)
    if not final:
        return out, None, saved
    assert states is not None
    finals = states.new_zeros(len(tables.problem.lengths.len_q), *states.shape[1:])
    _, _, ending, documents = tables.ends
    finals[documents] = states[ending]
    finals = all_reduce_sum(run.group, finals)
    if initial_state is not None:
        finals[tables.empty] = initial_state[tables.empty]
    return out, finals, saved


def backward_pass(
    run: Run,
    kernels: LinearKernels,
    inputs: LinearInputs,
    saved: Saved,
    dout: torch.Tensor,
    dfinal: torch.Tensor | None,
) -> LinearGradients:
    """The gradients of the packed rows and, in `dinitial` [b, h_v, d_k, d_v], this rank's share of the initial states';
    None where the kernels had none.

    dfinal: this rank's gradient of the final states of all documents [b, h_v, d_k, d_v]; None where the call had none.
    """
    tables: LinearTables = run.tables
    fragments, (_, pass_tables) = tables.fragments, tables.passes
    begin, begun, ending, ended = tables.ends
    if len(fragments):
        running = kernels.backward(inputs, fragments, saved.kept, saved.entering, dout)
    else:
        running = NoRowsBackward(inputs)
    total = None if dfinal is None else all_reduce_sum(run.group, dfinal)
    at_ends = None
    if total is not None:
        at_ends = total.new_zeros(len(fragments), *total.shape[1:])
        at_ends[ending] = total[ended]
    d = running.reverse_maps(pass_tables.chosen, None if at_ends is None else at_ends[pass_tables.chosen_index])
    own = _chosen_maps(tables, saved.maps), d
    everywhere = Maps(*run.gather(REVERSED_STATES, *own, meanwhile=running.meanwhile))
    leaving = entering_states(pass_tables, everywhere, None, len(fragments), kernels, transposed=True)
    if at_ends is not None:
        leaving = at_ends if leaving is None else leaving + at_ends
    gradients = running.run(leaving)
    if gradients.dinitial is None:
        return gradients
    b = len(tables.problem.lengths.len_q)
    share = gradients.dinitial.new_zeros(b, *gradients.dinitial.shape[1:])
    share[begun] = gradients.dinitial[begin].to(share.dtype)
    if dfinal is not None:
        share[tables.empty] = dfinal[tables.empty].to(share.dtype)
    return gradients._replace(dinitial=share)


def _chosen_maps(tables: LinearTables, maps: torch.Tensor) -> torch.Tensor:
    """M of the fragments that the backward pass chooses, zero where the forward pass has none."""
    if tables.forward_maps is None:
        return maps
    there, here = tables.forward_maps
    found = maps.new_zeros(len(tables.passes[1].chosen), *maps.shape[1:])
    if len(there):
        found[there] = maps[here]
    return found
