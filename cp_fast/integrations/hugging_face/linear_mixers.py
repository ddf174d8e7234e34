"""Linear layers and convolutions of transformers over ranks: their own forward, with other functions in it.

A mixer of tokens projects, calls functions of its file by name, and projects again. The functions alone know more than
one token. `put_over_ranks` gives each mixer of one model a copy of its class's `forward`: the same code, whose names of
these functions mean those below. The class, its file, and other models in the process do not change.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from cp_fast.integrations.hugging_face.called_layers import note_call
from cp_fast.integrations.hugging_face.model_call import SILENT, sequences_of
from cp_fast.integrations.hugging_face.module_states import check_forward, give_forward, take_forward
from cp_fast.integrations.hugging_face.slice_probe import Probe
from cp_fast.integrations.hugging_face.token_mixers import refuse_caches
from cp_fast.integrations.shared.drop_in import refuse
from cp_fast.integrations.token_batches import CpBatch
from cp_fast.layers.causal_conv1d import causal_conv1d
from cp_fast.layers.linear_attention import linear_attention
from cp_ref.calls.linear_calls import Activation, LinearKind

__all__ = ["linear_mixers", "put_over_ranks", "take_back"]

# ---- the functions in which linear layers and convolutions mix tokens, over ranks
#
# Each has the name and the parameters of the function of transformers that it replaces. `cp_batch` reaches it as it
# reaches attention: as a keyword that models hand on.


_EPSILON = 1e-6  # of the length of q and k, as in flash-linear-attention


def causal_conv1d_fn(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    cp_batch: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """A causal convolution of each channel: [b, channels, s/cp] -> the same; weight [channels, kernel_size]."""
    sequences = _sequences("causal_conv1d_fn", cp_batch, kwargs)
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"activation is {activation!r} behind a convolution; cp_fast has 'silu'")
    x = hidden_states.transpose(1, 2).to(weight.dtype)
    if isinstance(sequences, Probe):
        out = x * weight[:, -1] + (0 if bias is None else bias)
        out = out if activation is None else F.silu(out)
    else:
        plan, how = sequences.linear_plan(x), cast(Activation | None, activation)
        out = causal_conv1d(_rows(sequences, x), weight, bias, cp=sequences.cp, plan=plan, activation=how)
        out = out.view_as(x)
    return out.to(hidden_states.dtype).transpose(1, 2)


def _delta_rule(name: str, kind: LinearKind) -> Callable[..., tuple[torch.Tensor, None]]:
    """A delta rule: q, k [b, s/cp, h, d_k], v [b, s/cp, h_v, d_v], beta [b, s/cp, h_v] -> out like v; g [b, s/cp, h_v],
    of Kimi's [b, s/cp, h, d_k].
    """

    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        *,
        cp_batch: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        states = {"initial_state": initial_state, "output_final_state": output_final_state}
        sequences = _sequences(name, cp_batch, kwargs | states)
        if use_qk_l2norm_in_kernel:
            query, key = _of_length_one(query), _of_length_one(key)
        return _recurrence(sequences, kind, query, key, value, g, beta), None

    return rule


def mamba2_chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    *,
    cp_batch: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Mamba-2: x [b, s/cp, h, d], dt [b, s/cp, h], A, D, dt_bias [h], B, C [b, s/cp, groups, states] -> out like x."""
    states = {"initial_states": initial_states, "return_final_states": return_final_states}
    sequences = _sequences("mamba2_chunk_scan", cp_batch, kwargs | states)
    x, wide = hidden_states, torch.promote_types(hidden_states.dtype, torch.float32)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).to(wide)
    v, g = (x.to(wide) * dt[..., None]).to(x.dtype), (A * dt).to(wide)
    out = _recurrence(sequences, "mamba2", C.to(x.dtype), B.to(x.dtype), v, g, None, scale=1.0).to(wide)
    return out if D is None else out + D[:, None] * x.to(wide)


def mamba2_split_conv1d_scan_combined(*_: Any, **__: Any) -> None:
    """Not taken: without it a mixer calls `causal_conv1d_fn` and `mamba2_chunk_scan`."""
    return


def one_token(*_: Any, **__: Any) -> Any:
    """Raise for a function that continues from a cache."""
    raise NotImplementedError("a linear layer continues from a cache, which cp_fast does not support over ranks")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": _delta_rule("torch_chunk_gated_delta_rule", "gated_delta_rule"),
    "chunk_kimi_delta_attention": _delta_rule("chunk_kimi_delta_attention", "kda"),
    "mamba2_chunk_scan": mamba2_chunk_scan,
}
OF_CACHES = (
    *("causal_conv1d_update", "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"),
    "mamba2_selective_state_update",
)


def _sequences(name: str, cp_batch: Any, others: dict[str, Any]) -> CpBatch | Probe:
    """The batch's sequences; raises for arguments that cannot be honoured."""
    sequences = sequences_of(name, cp_batch)
    refuse(name, **{keyword: value for keyword, value in others.items() if keyword not in SILENT})
    return sequences


def _rows(sequences: CpBatch, x: torch.Tensor) -> torch.Tensor:
    """[b, s/cp, ...] in the format of the batch."""
    return x[0] if sequences.qkv_format == "thd" else x


def _of_length_one(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPSILON)).to(x.dtype)


def _recurrence(
    sequences: CpBatch | Probe,
    kind: LinearKind,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    if isinstance(sequences, Probe):
        return _of_own_token(q, k, v, g, beta)
    plan = sequences.linear_plan(q)
    q, k, v, g = (_rows(sequences, x) for x in (q, k, v, g))
    beta = None if beta is None else _rows(sequences, beta)
    out = linear_attention(q, k, v, g, beta, cp=sequences.cp, plan=plan, kind=kind, scale=scale)
    return out[None] if sequences.qkv_format == "thd" else out


def _of_own_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None
) -> torch.Tensor:
    """v, scaled by all that its own token has."""
    product = (q * k).sum(-1).repeat_interleave(v.shape[2] // q.shape[2], dim=2) / math.sqrt(q.shape[-1])
    decay = g if g.dim() == product.dim() else g.mean(-1)
    return v * (1 + torch.tanh(product + decay + (0 if beta is None else beta)))[..., None].to(v.dtype)


# ---- mixers


def _lightning(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    *,
    cp_batch: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """MiniMax's lightning attention, which is written out: Mamba-2 whose decay is a number for each head."""
    kwargs.pop("cache", None)  # It is None.
    sequences = _sequences("MiniMaxLightningAttention", cp_batch, kwargs | {_MASK: attention_mask})
    qkv = self.act_fn(self.qkv_proj(hidden_states)).unflatten(2, (self.num_attention_heads, -1))
    q, k, v = qkv.split(self.head_dim, dim=3)
    g = -self.slope_rate.flatten().expand(qkv.shape[:3]).to(torch.promote_types(qkv.dtype, torch.float32))
    out = self.norm(_recurrence(sequences, "mamba2", q, k, v, g, None, scale=1.0).flatten(2).to(v.dtype))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out), None


_MASK = "attention_mask"
_WRITTEN = {"transformers.models.minimax.modeling_minimax.MiniMaxLightningAttention": _lightning}
_REPLACED: dict[str, Callable[..., Any]] = {
    **FUNCTIONS,
    **dict.fromkeys(OF_CACHES, one_token),
    "mamba2_split_conv1d_scan_combined": mamba2_split_conv1d_scan_combined,
}
_LACKING = ("mamba_selective_scan",)  # Mamba-1


def linear_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model whose classes mix tokens by functions that cp_fast has, or are known, by name."""
    known = ((where, module, type(module)) for where, module in model.named_modules())
    return {where: module for where, module, kind in known if _functions(kind) & set(FUNCTIONS) or _written(kind)}


def _written(kind: type[nn.Module]) -> Callable[..., Any] | None:
    return _WRITTEN.get(f"{kind.__module__}.{kind.__qualname__}")


def put_over_ranks(model: nn.Module) -> None:
    """Give the mixers of a model the forward that takes slices. Calls without `cp_batch` run their own, as before.

    Raises:
        NotImplementedError: a mixer, named, has other functions than those that cp_fast knows, or another forward than
        its class.
    """
    for where, module in linear_mixers(model).items():
        name, kind = f"{where} ({type(module).__name__})", cast(Any, type(module))
        check_forward(name, module)
        for function in _functions(kind) & set(_LACKING):
            raise NotImplementedError(f"{name} calls {function}, which cp_fast does not have over ranks")
        for function in _functions(kind) & set(FUNCTIONS):
            _check_parameters(name, function, inspect.unwrap(kind.forward).__globals__[function])
        give_forward(module, _forward(kind.forward, _written(kind)))


def take_back(model: nn.Module) -> None:
    """Give the mixers their classes' forward again."""
    for module in linear_mixers(model).values():
        take_forward(module)


def _forward(theirs: Callable[..., Any], written: Callable[..., Any] | None) -> Callable[..., Any]:
    """A forward that runs the class's own, or its copy where the call has sequences over ranks.

    Args:
        written: in place of the copy.
    """
    ours = written or _with_functions(theirs, _REPLACED)

    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        sequences = named.get("cp_batch")
        if sequences is None:
            return theirs(self, *given, **named)
        refuse_caches(type(self).__name__, named)
        if isinstance(sequences, Probe):
            sequences.linear.add(self)
        note_call(self, sequences)
        return ours(self, *given, **named)

    return forward


def _with_functions(function: Any, functions: dict[str, Any]) -> Callable[..., Any]:
    """A function of the same code, in which names of its file mean other functions.

    >>> def shift(x): return x + 1
    >>> def twice(x): return shift(shift(x))
    >>> _with_functions(twice, {"shift": lambda x: x + 10})(0), twice(0)
    (20, 2)
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        names = {**function.__globals__, **functions}
        names.pop("__name__")  # torch.compile would use it to look names up in the file.
        return _copy(function, names, function.__closure__)
    changed = _with_functions(inner, functions)
    cells = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in function.__closure__ or ())
    if cells == function.__closure__:
        raise NotImplementedError(f"{function.__qualname__} is wrapped in a way that cp_fast cannot follow")
    return _copy(function, function.__globals__, cells)


def _copy(function: FunctionType, names: dict[str, Any], cells: Any) -> Callable[..., Any]:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _functions(kind: type[nn.Module]) -> set[str]:
    """The names that a module's forward looks up in its file."""
    plain = inspect.unwrap(kind.forward)
    return set(_names(plain.__code__)) & set(plain.__globals__) if isinstance(plain, FunctionType) else set()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _check_parameters(name: str, function: str, theirs: Any) -> None:
    """Raise where a function of this name takes other arguments than the one that is to replace it."""
    found, known = (
        [p.name for p in inspect.signature(f).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        for f in (inspect.unwrap(theirs), FUNCTIONS[function])
    )
    if found != known:
        raise NotImplementedError(f"{name} calls {function}({', '.join(found)}); cp_fast knows ({', '.join(known)})")
