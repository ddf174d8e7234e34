"""The checks around a prepared model's calls. A call has a rank's slice with all that belongs to it, or raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.hugging_face.attention_dropout import shared_seed
from cp_fast.integrations.hugging_face.image_models import arguments_of_images, has_images, run_vision
from cp_fast.integrations.hugging_face.long_positions import give_longest, say_longest
from cp_fast.integrations.hugging_face.pooled_head import PooledCall, Pooling
from cp_fast.integrations.hugging_face.router_losses import Routing, routing_asked_for, with_router_loss
from cp_fast.integrations.hugging_face.slice_probe import Numbering, Probe, takes_cache
from cp_fast.integrations.hugging_face.task_head import SPANS, Head, LogitsTransform, SpanCall, part_of_the_mean
from cp_fast.integrations.hugging_face.token_mixers import (
    NAME,
    ROUTER_SWITCH,
    refuse_adapters,
    refuse_caches,
    refuse_switches,
)
from cp_fast.integrations.shared.drop_in import words_for
from cp_fast.integrations.token_batches import CpBatch
from cp_fast.runtime.handles import outside_of_graphs

__all__ = [
    "ALONE",
    "SILENT",
    "Edge",
    "ModelCall",
    "check_forward",
    "edge_of",
    "give_forward",
    "mark_layers",
    "put_around",
    "sequences_of",
    "take_forward",
    "take_off",
    "with_output",
]

SILENT = {  # Keywords that models pass on and that do not change attention or linear layers.
    *("position_ids", "cache_position", "use_cache", "num_items_in_batch", "shift_labels", "labels", "logits_to_keep"),
    *("output_hidden_states", "output_router_logits", "return_dict", "position_embeddings", "past_key_values"),
}
_KNOWN = {  # The edge checks these arguments, or a model takes them token by token.
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "cp_batch", "use_cache"),
    *("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "output_hidden_states", "return_dict"),
    *("output_router_logits", "output_attentions", "fused_lm_head"),
}
ALONE = 'for generate() and for whole sequences call model.set_attn_implementation("sdpa") first'


class ModelCall:
    """One call of a prepared model: what reaches its layers as `cp_batch`. Layers leave it behind as a mark.

    It is no dataclass, for the reason of `CpBatch`.

    Args:
        edge: of the model that was called.
        sequences: of the batch.
        targets, count: where the edge computes the loss: the targets, and how many all ranks have.
        pooled, spans: of a head that pools the logits of tokens, and of one whose labels are spans.
        routing: where the edge adds the loss of the routers.
        seed: of attention's dropout, int64 [].
    """

    def __init__(
        self, edge: Edge, sequences: CpBatch, targets: torch.Tensor | None = None, count: torch.Tensor | None = None
    ) -> None:
        self.edge, self.sequences, self.targets, self.count = edge, sequences, targets, count
        self.pooled: PooledCall | None = None
        self.spans: SpanCall | None = None
        self.routing: Routing | None = None
        self.seed: torch.Tensor | None = None

    def __deepcopy__(self, _: Any) -> ModelCall:
        return self


@dataclass(frozen=True, eq=False)
class Edge:
    """The findings of `prepare` about a model.

    Args:
        cp: the context that it was prepared with; a batch may have another.
        head: what the model makes of labels; None where it takes none; a text: why it can take none.
        numbering: how the model numbers the positions of a sequence.
        caches: its calls have an argument `use_cache`.
        blocks: the names of the modules whose layers are checked (`mark_layers`).
        inner: the model is a part of the one that was prepared, and is called by it or by the user.
        pools: how its logits are those of one token of each sequence; None where they are of all tokens.
        spans: it computes a loss of start_positions and end_positions.
        transform: what it does to the numbers of its output embeddings; a text: why that is not known.
        images: it has a vision part, whose rows it puts in the place of tokens.
        by_row: the name of a module that does another thing in each row of a batch.
        more: arguments of its calls that only models like this one take, and that are checked there.
        routing: how it adds a loss of its routers to that of its labels; a text: why that is not known.
    """

    cp: ContextParallel
    head: Head | str | None
    numbering: Numbering
    caches: bool
    blocks: tuple[str, ...] = ()
    inner: bool = False
    pools: Pooling | None = None
    spans: bool = False
    transform: LogitsTransform | str = "it has no logits of tokens"
    images: bool = False
    by_row: str = ""
    more: frozenset[str] = frozenset()
    routing: Routing | str = "it has no loss of labels"

    def __deepcopy__(self, _: Any) -> Edge:
        return self

    def enter(self, model: Any, by_place: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any] | None:
        """Check a call's arguments, and return them as the model wants them. None for a call without changes: the model
        runs alone, or it is a part of a model, whose edge has checked the call.

        Raises:
            TypeError, ValueError, NotImplementedError: what is given would be taken for something else.
        """
        name, sequences = type(model).__name__, given.get("cp_batch")
        if isinstance(sequences, ModelCall) or (self.inner and sequences is None):
            return None
        if model.config._attn_implementation != NAME:
            if sequences is not None:
                raise ValueError(
                    f"{name} is given cp_batch while its attention is {model.config._attn_implementation!r}, which "
                    f"would take a slice for the whole; call model.set_attn_implementation({NAME!r}) first"
                )
            return None
        if not isinstance(sequences, CpBatch):
            raise TypeError(f"{name} is given cp_batch={sequences!r}: call it with what shard_batch returns; {ALONE}")
        if by_place:
            raise TypeError(f"{name} is given {len(by_place)} arguments by place; give all by name: **shard_batch(...)")
        for argument in ("input_ids", "inputs_embeds"):
            x, shape = given.get(argument), sequences.shape
            if isinstance(x, torch.Tensor) and shape is not None and x.shape[:2] != shape:
                raise ValueError(
                    f"{name} is given {argument} {list(x.shape)}, and a cp_batch of [b, s/cp] = {list(shape)}: call it "
                    "with all that one shard_batch returned, and without adapters that add tokens"
                )
        refuse_switches(given, model.config)
        routing = routing_asked_for(self.routing, given, model.config)
        if given.get("position_ids") is None:
            raise TypeError(
                f"{name} is given no position_ids, and would number a slice's tokens from its own first: call it with "
                "all that shard_batch returns"
            )
        if (kept := given.get("logits_to_keep")) is not None and (isinstance(kept, torch.Tensor) or kept):
            raise NotImplementedError(
                f"logits_to_keep is {kept!r}, which cp_fast does not support: it would count the tokens of a slice"
            )
        if given.get("attention_mask") is not None:
            _check_mask(name, given["attention_mask"], sequences)
            given = {n: x for n, x in given.items() if n != "attention_mask"}
        given = ({"use_cache": False} if self.caches else {}) | given
        if self.pools:
            given.pop("margin", None)  # trl's RewardTrainer hands it on, and a model alone ignores it.
        self._refuse_unknown(name, given)
        given["position_ids"] = self._numbered(sequences, given)
        if sequences.mixes_rows:
            self._refuse_by_row(model)
        handed_on = self._with_labels(name, sequences, given)
        call: ModelCall = handed_on["cp_batch"]
        draw, seeded = shared_seed, (model, sequences, given["position_ids"].device)
        call.seed = outside_of_graphs(draw, *seeded) if torch.compiler.is_compiling() else draw(*seeded)
        call.routing = routing
        if routing is not None:
            handed_on[ROUTER_SWITCH] = False  # The edge computes it from the results of the model inside.
        if self.pools:
            call.pooled = PooledCall(model, self.pools, sequences, given.get("input_ids"))
        spans = {argument: handed_on.pop(argument, None) for argument in SPANS} if self.spans else {}
        if any(x is not None for x in spans.values()):
            call.spans = SpanCall(name, sequences, handed_on, **spans)
        return handed_on

    def _numbered(self, sequences: CpBatch, given: dict[str, Any]) -> torch.Tensor:
        """The model's numbers of a slice's positions. A model that leaves out padding by its id does so in rows, and
        reads the positions of a packed batch.
        """
        ids, positions = given.get("input_ids"), given["position_ids"]
        if self.numbering.without is not None and ids is not None and sequences.qkv_format != "thd":
            if torch.compiler.is_compiling():
                return outside_of_graphs(_numbers, self.numbering, sequences, ids, positions)
            return _numbers(self.numbering, sequences, ids, positions)
        return positions + self.numbering.first if self.numbering.first else positions

    def _refuse_by_row(self, model: nn.Module) -> None:
        """Raise for what acts by row, where a slice's row has tokens of several rows."""
        cure = "a row of a slice has tokens of several rows in layout 'balanced': take another layout, or packed rows"
        if self.by_row:
            raise NotImplementedError(f"{self.by_row} does another thing in each row of a batch; {cure}")
        for where, module in model.named_modules():
            for hook in module._forward_pre_hooks.values():
                names = getattr(hook, "keywords", {}).get("adapter_names")  # PEFT gives them to its layers.
                if len(set(names or ())) > 1:
                    raise NotImplementedError(f"adapter_names gives {where} an adapter for each row; {cure}")

    def leave(self, model: nn.Module, call: ModelCall, out: Any) -> Any:
        """The model's outputs, with the loss where its edge has the labels.

        Raises:
            RuntimeError: a layer's attention was not cp_fast's.
        """
        if torch.compiler.is_compiling():
            outside_of_graphs(_check_layers, model, call)
        else:
            _check_layers(model, call)
        if call.pooled is not None:
            out = with_output(out, "logits", call.pooled.pooled())
        elif call.spans is not None:
            out = _with_loss(out, call.spans.loss(out))
        elif call.targets is not None and call.count is not None:
            logits = out["logits"] if isinstance(out, Mapping) else out[0]
            out = _with_loss(out, part_of_the_mean(logits, call.targets, call.count))
        return out if call.routing is None else with_router_loss(model, call.routing, call.sequences, out)

    def labels_head(self, name: str) -> Head:
        """The head that takes the labels. name: the model's, for the error.

        Raises:
            TypeError, NotImplementedError: it takes no labels over ranks.
        """
        if self.head is None:
            around = ", or call the model around it by its hooks, model(...): PEFT's AdaLoRA does not"
            raise TypeError(
                f"{name} takes no labels; cp_fast.integrations.loss has losses of what it returns"
                f"{around if self.inner else ''}"
            )
        if isinstance(self.head, str):
            raise NotImplementedError(
                f"{self.head}. Leave labels away, and compute the loss from what the model returns "
                "(cp_fast.integrations.loss)"
            )
        return self.head

    def _refuse_unknown(self, name: str, given: Mapping[str, Any]) -> None:
        refuse_caches(name, given)
        for argument, x in given.items():
            if argument not in _KNOWN and argument not in self.more and x is not None and x is not False:
                raise NotImplementedError(
                    f"{argument} is {words_for(x)}, which cp_fast does not know in calls of {name} over ranks: it may "
                    "be what the model computes a loss of, or read by rows and places of the whole batch. Give it to "
                    "shard_batch if that has it; if not, leave it away, and compute what it is for from the outputs: "
                    'part["cp_batch"].unshard(...) makes them whole'
                )

    def _with_labels(self, name: str, sequences: CpBatch, given: dict[str, Any]) -> dict[str, Any]:
        labels, shifted = given.get("labels"), given.get("shift_labels")
        if labels is None and shifted is None:
            return given | {"cp_batch": ModelCall(self, sequences)}
        head = self.labels_head(name)
        if (shifted is not None) != head.shifts:
            how, other = ("shifted", "own") if shifted is not None else ("each token's own", "next")
            raise ValueError(
                f"labels are {how}, but {name} learns each token's {other}: call "
                "shard_batch(batch, cp=..., model=model)"
            )
        if given.get("num_items_in_batch") is None:
            raise ValueError(f"{name} is given labels without num_items_in_batch; shard_batch returns both")
        if head.native:
            return given | {"cp_batch": ModelCall(self, sequences)}
        targets: Any = shifted if head.shifts else labels
        count = torch.as_tensor(given["num_items_in_batch"])
        rest = {n: x for n, x in given.items() if n not in ("labels", "shift_labels", "num_items_in_batch")}
        return rest | {"cp_batch": ModelCall(self, sequences, targets, count)}


def _numbers(numbering: Numbering, sequences: CpBatch, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return sequences.shard(numbering.of(sequences.unshard(ids))).to(positions.dtype)


def _check_mask(name: str, mask: torch.Tensor, sequences: CpBatch) -> None:
    """Raise unless a mask is the slice that says what cp_batch says already."""
    if not torch.equal(mask.cpu() != 0, sequences.documents >= 0):
        raise NotImplementedError(
            f"{name} is given attention_mask {list(mask.shape)}, which is not that of this rank's tokens; give it to "
            "shard_batch, which makes cp_batch of it"
        )


def with_output(out: Any, name: str, x: torch.Tensor) -> Any:
    """A model's outputs with another one of this name, which is the first of a tuple."""
    if not isinstance(out, Mapping):
        return (x, *out[1:])
    kind: Any = type(out)
    return kind(**{one: x if one == name else other for one, other in out.items()})


def _with_loss(out: Any, loss: torch.Tensor) -> Any:
    if not isinstance(out, Mapping):
        return (loss, *out)
    kind: Any = type(out)
    return kind(loss=loss, **{name: x for name, x in out.items() if name != "loss"})


def sequences_of(name: str, cp_batch: Any) -> CpBatch | Probe:
    """The sequences that reach a layer as the keyword `cp_batch`; name: of the layer or function, for the error.

    Raises:
        TypeError: there are none.
    """
    sequences = cp_batch.sequences if isinstance(cp_batch, ModelCall) else cp_batch
    if sequences is None and Probe.now() is not None:
        raise NotImplementedError(
            f"{name} is not given cp_batch: its model does not hand its keywords on to its layers, which cannot know "
            "the sequences of a batch"
        )
    if not isinstance(sequences, CpBatch | Probe):
        raise TypeError(f"{name} is given cp_batch={cp_batch!r}: call the model with what shard_batch returns; {ALONE}")
    return sequences


def check_forward(name: str, module: nn.Module) -> None:
    """Raise NotImplementedError for a forward that is neither its class's nor from `give_forward`."""
    mine = module.__dict__.get("forward")
    if mine is not None and not hasattr(mine, "cp_fast"):
        raise NotImplementedError(f"{name} has a forward of its own, as offloading or fused kernels give it")


def give_forward(module: nn.Module, forward: Any) -> None:
    """Give a module a forward in the place of its class's."""
    forward.cp_fast = True
    module.__dict__["forward"] = MethodType(forward, module)


def take_forward(module: nn.Module) -> bool:
    """Give a module its class's forward again; whether it had one from `give_forward`."""
    return hasattr(module.__dict__.get("forward"), "cp_fast") and bool(module.__dict__.pop("forward"))


def put_around(model: Any, edge: Edge) -> None:
    """Have the model's calls pass this edge, and direct calls of the models in it one without a head."""
    for where, module in model.named_modules():
        if module is not model and not hasattr(module, "set_attn_implementation"):
            continue
        if "_cp_fast_edge" not in module.__dict__:
            module.register_forward_pre_hook(_before, with_kwargs=True, prepend=True)
            module.register_forward_hook(_after, with_kwargs=True)
        give_longest(module)
        more = arguments_of_images(module) | frozenset(SPANS if module is model and edge.spans else ())
        mine = replace(edge, images=has_images(module), more=more)
        if module is not model:
            blocks = tuple(block.removeprefix(f"{where}.") for block in edge.blocks if block.startswith(f"{where}."))
            mine = replace(mine, head=None, pools=None, spans=False, caches=takes_cache(module), blocks=blocks)
            mine = replace(mine, inner=True, routing=Edge.routing)
        module.__dict__["_cp_fast_edge"] = mine


def take_off(model: nn.Module) -> None:
    """Check the model's calls no longer."""
    for module in model.modules():
        module.__dict__.pop("_cp_fast_layers", None)
        module.__dict__.pop("_cp_fast_call", None)
        if "_cp_fast_edge" in module.__dict__:
            module.__dict__["_cp_fast_edge"] = None
            say_longest(module, None)


def mark_layers(model: nn.Module, layers: set[nn.Module], heard: set[nn.Module]) -> tuple[str, ...]:
    """Mark the layers that mix tokens, and the blocks that hold them: the elements of a model's lists of modules.

    A model may leave a block out: one skips blocks at random, and a stage of a pipeline has some alone. A block that
    runs has to call its layers.

    Args:
        layers: attention and linear layers.
        heard: the modules that are given cp_batch, by which a block knows that it runs. Layers of others belong to the
            model, which always runs.

    Returns:
        The names of the blocks.
    """
    blocks: dict[str, list[str]] = {}
    for where, layer in model.named_modules():
        if layer in layers:
            layer.__dict__["_cp_fast_call"] = None
            names = where.split(".")
            above = [".".join(names[:i]) for i in range(len(names), 0, -1)]
            block = next(
                (name for name in above if _is_element(model, name) and model.get_submodule(name) in heard), ""
            )
            blocks.setdefault(block, []).append(where[len(block) :].lstrip("."))
    for where, names in blocks.items():
        block = model.get_submodule(where)
        block.__dict__["_cp_fast_layers"] = tuple(names)
        if "_cp_fast_entered" not in block.__dict__:
            block.register_forward_pre_hook(_enter_block, with_kwargs=True)
        block.__dict__["_cp_fast_entered"] = None
    return tuple(where for where in blocks if where)


def _is_element(model: nn.Module, where: str) -> bool:
    holder = model.get_submodule(where.rpartition(".")[0])
    return isinstance(holder, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _enter_block(block: Any, _: tuple[Any, ...], given: dict[str, Any]) -> None:
    block._cp_fast_entered = given.get("cp_batch")


def _check_layers(model: nn.Module, call: ModelCall) -> None:
    """At the end of a call, raise for a layer that did not call its attention or its linear functions. Raise for
    adapters that mix tokens too.
    """
    refuse_adapters(model)
    blocks = _layers_of_blocks(model)
    ran = [block for block in blocks if block is model or block.__dict__["_cp_fast_entered"] is call]
    odd: set[nn.Module] = set()
    for block in ran or blocks:
        layers = blocks[block]
        odd |= {layer for layer in layers if layer.__dict__["_cp_fast_call"] is not call}
        if len(layers) < len(names := block.__dict__["_cp_fast_layers"]):  # one has another module in its place
            odd |= {_at(block, name) or block for name in names} - layers or {block}
    for where in call.edge.blocks:
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


def _layers_of_blocks(model: nn.Module) -> dict[nn.Module, set[nn.Module]]:
    """The blocks that the model has now, and the layers in each. Each call looks, so nothing is walked twice."""
    found: dict[nn.Module, set[nn.Module]] = {}
    waiting = [(model, model)]
    while waiting:
        module, block = waiting.pop()
        if "_cp_fast_layers" in module.__dict__:
            block = module
            found[block] = set()
        if "_cp_fast_call" in module.__dict__ and block in found:
            found[block].add(module)
        waiting += [(inner, block) for inner in module._modules.values() if inner is not None]
    return found


def _at(module: nn.Module, where: str) -> nn.Module | None:
    try:
        return module.get_submodule(where)
    except AttributeError:
        return None


def edge_of(model: nn.Module) -> Edge:
    """A prepared model's edge, also through wrappers (DDP, FSDP, PEFT).

    Raises:
        ValueError: the model was not prepared. NotImplementedError: an adapter that came later mixes tokens.
    """
    refuse_adapters(model)
    edges = (module.__dict__.get("_cp_fast_edge") for module in model.modules())
    found = next((edge for edge in edges if edge is not None), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} was not prepared; call cp_fast.integrations.transformers.prepare(model, cp)"
        )
    return found


def _before(model: Any, by_place: tuple[Any, ...], given: dict[str, Any]) -> Any:
    edge = model.__dict__["_cp_fast_edge"]
    if not isinstance(given.get("cp_batch"), ModelCall):
        say_longest(model, None)
    handed_on = None if edge is None else edge.enter(model, by_place, given)
    if handed_on is not None:
        say_longest(model, given["cp_batch"].longest - 1, given["position_ids"].device)
        by_place, given = (), handed_on
    call = given.get("cp_batch")
    if edge is not None and isinstance(call, ModelCall):
        given = given | {ROUTER_SWITCH: True} if edge.inner and call.routing is not None else given
        given = run_vision(model, call.sequences, given) if edge.images else given
    return by_place, given


def _after(model: Any, _: tuple[Any, ...], given: dict[str, Any], out: Any) -> Any:
    edge, call = model.__dict__["_cp_fast_edge"], given.get("cp_batch")
    if edge is None or not isinstance(call, ModelCall) or call.edge is not edge:
        return out
    say_longest(model, None)
    return edge.leave(model, call, out)
