"""Which layers of a prepared model take part in a call: one that does not has taken a slice for the whole.

A model may leave a block out: one skips blocks at random, and a stage of a pipeline has some alone. A block that runs
has to call its layers. Its layers and blocks keep the last call that came to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from cp_fast.integrations.hugging_face.model_call import ModelCall
from cp_fast.integrations.hugging_face.module_states import (
    drop_state,
    hook_once,
    known_state,
    put_state,
    state_of,
    states_of,
)
from cp_fast.integrations.hugging_face.token_mixers import NAME, refuse_adapters

__all__ = ["check_layers", "forget_layers", "models_in", "note_call", "note_layers"]


@dataclass(eq=False)
class _Layer:
    """A layer that mixes tokens. call: the last one in which it called its attention or its linear functions."""

    call: ModelCall | None = None


@dataclass(eq=False)
class _Block:
    """A module with such layers: the model, or an element of its lists of modules.

    Attributes:
        layers: their names in it.
        call: the last one that came to it.
    """

    layers: tuple[str, ...]
    call: Any = None


@dataclass(frozen=True, eq=False)
class _Model:
    """A prepared model, or one inside it. blocks: the names of the blocks in it."""

    blocks: tuple[str, ...]


def models_in(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """A model and the models of transformers inside, by name."""
    return [(n, m) for n, m in model.named_modules() if m is model or hasattr(m, "set_attn_implementation")]


def note_layers(model: nn.Module, layers: set[nn.Module], heard: set[nn.Module]) -> None:
    """Note the layers that mix tokens, and the blocks that hold them.

    Args:
        layers: attention and linear layers.
        heard: the modules that are given cp_batch, by which a block knows that it runs. Layers of others belong to the
            model, which always runs.
    """
    blocks: dict[str, list[str]] = {}
    for where, layer in model.named_modules():
        if layer in layers:
            put_state(layer, _Layer())
            names = where.split(".")
            above = [".".join(names[:i]) for i in range(len(names), 0, -1)]
            block = next(
                (name for name in above if _is_element(model, name) and model.get_submodule(name) in heard), ""
            )
            blocks.setdefault(block, []).append(where[len(block) :].lstrip("."))
    for where, names in blocks.items():
        block = model.get_submodule(where)
        put_state(block, _Block(tuple(names)))
        hook_once(block, _enter_block)
    for where, inside in models_in(model):
        before = f"{where}." if where else ""
        put_state(inside, _Model(tuple(name[len(before) :] for name in blocks if name and name.startswith(before))))


def forget_layers(model: nn.Module) -> None:
    """Forget what `note_layers` has noted."""
    for module in model.modules():
        drop_state(module, _Layer)
        drop_state(module, _Block)
        drop_state(module, _Model)


def note_call(layer: nn.Module, cp_batch: Any) -> None:
    """Note that a layer takes part in a call. cp_batch: what has reached it; no call where the model was passed by."""
    if isinstance(cp_batch, ModelCall):
        if (noted := state_of(layer, _Layer)) is None:
            put_state(layer, _Layer(cp_batch))
        else:
            noted.call = cp_batch


def check_layers(model: nn.Module, call: ModelCall) -> None:
    """At the end of a call, raise for a layer that did not call its attention or its linear functions. Raise for
    adapters that mix tokens too.
    """
    refuse_adapters(model)
    blocks = _layers_of_blocks(model)
    ran = [block for block in blocks if block is model or known_state(block, _Block).call is call]
    odd: set[nn.Module] = set()
    for block in ran or blocks:
        layers, names = blocks[block], known_state(block, _Block).layers
        odd |= {layer for layer, noted in layers.items() if noted.call is not call}
        if len(layers) < len(names):  # one has another module in its place
            odd |= {_at(block, name) or block for name in names} - layers.keys() or {block}
    for where in known_state(model, _Model).blocks:
        found = _at(model, where)
        if found not in blocks and found is not None and blocks.keys().isdisjoint(found.modules()):
            odd |= {found} if next(found.parameters(), None) is not None else set()
    if not odd:
        return
    where, first = next((name, module) for name, module in model.named_modules() if module in odd)
    mine = getattr(getattr(first, "config", None), "_attn_implementation", NAME)
    why = "" if mine == NAME else f", whose configuration has attn_implementation {mine!r},"
    raise RuntimeError(
        f"{where or 'the model'} ({type(first).__name__}){why} did not call the attention or the linear layer that "
        f"prepare saw in {type(model).__name__}: it had a slice for the whole. Layers that are changed after prepare "
        "need another prepare(model, cp), which says what it cannot run"
    )


def _enter_block(block: nn.Module, _: tuple[Any, ...], given: dict[str, Any]) -> None:
    if (noted := state_of(block, _Block)) is not None:
        noted.call = given.get("cp_batch")


def _layers_of_blocks(model: nn.Module) -> dict[nn.Module, dict[nn.Module, _Layer]]:
    """The blocks that the model has now, and the layers in each. Each call looks, so nothing is walked twice."""
    found: dict[nn.Module, dict[nn.Module, _Layer]] = {}
    waiting = [(model, model)]
    while waiting:
        module, block = waiting.pop()
        states = states_of(module)
        if _Block in states:
            block = module
            found[block] = {}
        if _Layer in states and block in found:
            found[block][module] = states[_Layer]
        waiting += [(inner, block) for inner in module._modules.values() if inner is not None]
    return found


def _is_element(model: nn.Module, where: str) -> bool:
    holder = model.get_submodule(where.rpartition(".")[0])
    return isinstance(holder, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _at(module: nn.Module, where: str) -> nn.Module | None:
    try:
        return module.get_submodule(where)
    except AttributeError:
        return None
