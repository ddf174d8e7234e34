"""Auxiliary losses of routers, which balance the experts of a model: over ranks as in one process.

With `output_router_logits` a model adds such a loss to that of its labels. It is n * sum_e(f_e p_e) over n experts: f_e
is how often an expert was chosen, p_e its mean probability, both of all tokens and all layers. The counts have no
gradient. So when the ranks have added them up, the rest is a sum over tokens. Each rank has the part of its tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from cp_fast.integrations.hugging_face.slice_probe import Seen
from cp_fast.integrations.hugging_face.task_head import same_loss
from cp_fast.integrations.hugging_face.token_mixers import ROUTER_SWITCH
from cp_fast.integrations.token_batches import CpBatch
from cp_fast.runtime.handles import outside_of_graphs
from cp_ref.batches.tensors import wide_dtype
from cp_ref.groups.collectives import all_reduce_sum

__all__ = ["Routing", "routing_asked_for", "routing_of", "with_router_loss"]

_FUNCTION = "load_balancing_loss_func"  # Each module of transformers has its own.
_COEFFICIENT = "aux_loss_coef"  # Names of coefficients end so.
_TRIED = 3.0  # It is far above a loss's rounding.
_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # of a model that is run


@dataclass(frozen=True)
class Routing:
    """How a model adds its routers' loss to that of its labels.

    Args:
        top_k: how many experts a token chooses.
        entry: the name of the coefficient, which is looked up in each call.
        of_config: it is one of the text model's configuration; if not, of the model.
    """

    top_k: int
    entry: str
    of_config: bool

    def holder(self, model: Any) -> Any:
        """Return the object that has the coefficient."""
        return model.config.get_text_config() if self.of_config else model


def routing_asked_for(known: Routing | str, given: Mapping[str, Any], config: Any) -> Routing | None:
    """How to add the routers' loss, where a call asks for it, or else the configuration for all calls; None where not.

    Args:
        known: of the model; a text: why it is not.

    Raises:
        NotImplementedError: it is asked for and not known.
    """
    asked = given.get(ROUTER_SWITCH)
    place = "model.config" if asked is None else "the call"
    if not (getattr(config.get_text_config(), ROUTER_SWITCH, False) if asked is None else asked):
        return None
    if isinstance(known, str):
        raise NotImplementedError(
            f"{ROUTER_SWITCH} is True in {place}, which cp_fast does not support here: {known}. Set it to False; a "
            "loss of your own may take the routers' logits from hooks on them"
        )
    return known


def routing_of(model: Any, seen: Seen) -> Routing | str:
    """See in a few runs how the model uses its routers' logits. Return a text where that stays unknown: it says why.

    The model's loss must be the one of this file, for logits of all tokens, and its own function the same for a mask.
    """
    name, ids = type(model).__name__, seen.rows.ids
    if not hasattr(model.config.get_text_config(), ROUTER_SWITCH):
        return f"{name} has no such switch"
    arguments = {n: x for n, x in seen.arguments.items() if n != ROUTER_SWITCH}
    try:
        out = model(input_ids=ids, **arguments, **{ROUTER_SWITCH: True})
        gates, aux = _gates(out), out.get("aux_loss")
        plain = model(input_ids=ids, labels=ids, **arguments, **{ROUTER_SWITCH: False}).get("loss")
        with _inner_switched_on(model):
            kept = _gates(model(input_ids=ids, **arguments, **{ROUTER_SWITCH: False}))
    except _ERRORS as error:
        return f"{name} computes no loss of routers: {error}"
    if aux is None or plain is None:
        return f"{name} returns no aux_loss, and no loss of labels to add it to"
    if not gates or len(kept) != len(gates) or any(gate.shape[:-1] != (ids.numel(),) for gate in gates):
        return f"{name} returns no router_logits [b * s, experts] of its layers"
    formula = f"{name}'s routers have another loss than transformers' load balancing loss"
    tokens = torch.ones(ids.numel(), dtype=torch.bool, device=ids.device)
    ks = range(1, gates[0].shape[-1] + 1)
    top_k = next((k for k in ks if same_loss(aux, _loss(gates, k, tokens))), None)
    theirs = _own_function(model)
    if top_k is None or theirs is None:
        return formula
    tokens[::3] = False
    if not same_loss(theirs(gates, gates[0].shape[-1], top_k, tokens.long()[None]), _loss(gates, top_k, tokens)):
        return formula
    for routing in _coefficients(model, top_k):
        with _set_to(routing.holder(model), routing.entry, _TRIED):
            loss = model(input_ids=ids, labels=ids, **arguments, **{ROUTER_SWITCH: True}).get("loss")
        if same_loss(loss, plain + _TRIED * aux):
            return routing
    return f"{name} has no ...{_COEFFICIENT} by which it adds its routers' loss to that of its labels"


def with_router_loss(model: Any, routing: Routing, sequences: CpBatch, out: Any) -> Any:
    """A model's outputs with this rank's part of the routers' loss as aux_loss, and in its loss. Collective.

    Raises:
        NotImplementedError: the outputs have no names.
    """
    if not isinstance(out, Mapping) or not (gates := _gates(out)):
        raise NotImplementedError(
            f"{type(model).__name__} returns no router_logits by name, of which its routers' loss is computed: call it "
            "without return_dict=False, and without fused_lm_head of TRL"
        )
    part = outside_of_graphs if torch.compiler.is_compiling() else _call
    aux = part(_part_of_the_loss, gates, routing.top_k, sequences)
    named, loss = {"aux_loss": aux}, out.get("loss")
    if loss is not None:
        named["loss"] = loss + getattr(routing.holder(model), routing.entry) * aux.to(loss.device)
    kind: Any = type(out)
    return kind(**{**out, **named})


def _call(function: Any, *given: Any) -> Any:
    return function(*given)


def _part_of_the_loss(gates: tuple[torch.Tensor, ...], top_k: int, sequences: CpBatch) -> torch.Tensor:
    """This rank's part; those of all ranks that share a step add up to the mean loss of their contexts."""
    tokens = (sequences.documents >= 0).flatten().to(gates[0].device)
    return _loss(gates, top_k, tokens, sequences) / sequences.contexts


def _loss(
    gates: tuple[torch.Tensor, ...], top_k: int, tokens: torch.Tensor, sequences: CpBatch | None = None
) -> torch.Tensor:
    """The load balancing loss, as a scalar of float32 or wider.

    Args:
        gates: of each layer, [b * s, experts].
        tokens: bool [b * s], False for padding.
        sequences: of a slice, whose part of the loss this is.

    >>> gates = (torch.tensor([[4.0, 0.0], [4.0, 0.0]]),)  # both tokens choose the first expert, by 0.982
    >>> _loss(gates, 1, torch.tensor([True, True]))
    tensor(1.9640)
    """
    device, experts = gates[0].device, gates[0].shape[-1]
    sums = torch.zeros(experts, dtype=wide_dtype(gates[0].dtype), device=device)
    counts = torch.zeros(experts, dtype=torch.int64, device=device)
    for gate in gates:
        weights = gate.to(device).softmax(-1)
        chosen = weights.topk(top_k, dim=-1).indices
        counts = counts.scatter_add(0, chosen.flatten(), tokens.long().repeat_interleave(top_k))
        sums = sums + weights.to(sums.dtype).masked_fill(~tokens[:, None], 0).sum(0)
    total = torch.cat([counts, len(gates) * tokens.sum()[None]])
    if sequences is not None:
        total = all_reduce_sum(sequences.cp.comm, total)
    rows = total[-1].clamp(min=1).to(sums.dtype)
    return experts * (total[:-1] / rows * (sums / rows)).sum()


def _gates(out: Any) -> tuple[torch.Tensor, ...]:
    found = out.get("router_logits")
    gates = tuple(found) if isinstance(found, (tuple, list)) else ()
    return gates if all(isinstance(gate, torch.Tensor) for gate in gates) else ()


def _own_function(model: nn.Module) -> Any:
    """transformers' function, of the module that the model's class comes from."""
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    return next((vars(module)[_FUNCTION] for module in modules if module and _FUNCTION in vars(module)), None)


def _coefficients(model: Any, top_k: int) -> Iterator[Routing]:
    """Yield the candidates for the coefficient, by their names."""
    for of_config, names in ((False, vars(model)), (True, model.config.get_text_config().to_dict())):
        yield from (Routing(top_k, name, of_config) for name in names if name.endswith(_COEFFICIENT))


@contextmanager
def _set_to(holder: Any, entry: str, value: float) -> Iterator[None]:
    before = getattr(holder, entry)
    try:
        setattr(holder, entry, value)
        yield
    finally:
        setattr(holder, entry, before)


@contextmanager
def _inner_switched_on(model: Any) -> Iterator[None]:
    """The model without its head returns its routers' logits, whatever the head asks it for."""
    inner = cast(nn.Module, model.base_model)
    handle = inner.register_forward_pre_hook(
        lambda _, given, named: (given, named | {ROUTER_SWITCH: True}), with_kwargs=True
    )
    try:
        yield
    finally:
        handle.remove()
