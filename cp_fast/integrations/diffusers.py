"""diffusers: transformers of video and images whose tokens are spread over ranks.

    from cp_fast.integrations import diffusers as cp_diffusers

    pipeline = WanPipeline.from_pretrained(...)
    cp_diffusers.use(pipeline.transformer, context)  # in place of enable_parallelism
    frames = pipeline(prompt, generator=torch.Generator("cpu").manual_seed(0)).frames  # the same on all ranks

Every rank calls the model with the same arguments, and gets the whole output. In between, each rank has its share of
all tokens. Needs diffusers 0.42; only `use` imports it.
"""

from __future__ import annotations

import functools
import importlib
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.diffusion.cut_points import Plan, plan_of
from cp_fast.integrations.diffusion.joint_attention import Seen, attend_over_ranks, lengths
from cp_fast.integrations.diffusion.stream_probe import Learned, Probe, learn
from cp_fast.integrations.diffusion.token_cuts import (
    SlicedCall,
    Window,
    checkpoint_inside,
    current,
    gather,
    hook,
    inside,
    outer,
    unhook,
)
from cp_fast.integrations.shared.drop_in import refuse
from cp_ref.calls.declared import replaced
from cp_ref.groups.agreement import merged
from cp_ref.problems.call_checks import check_context
from cp_ref.schedules.values import kind_of

__all__ = ["use"]

Model = TypeVar("Model", bound=nn.Module)


def use(model: Model, cp: Any, *, plan: Any = None) -> Model:
    """Run a transformer of diffusers over ranks, in training and in inference; returns the same model.

    Every rank calls it with the same arguments, and gets the whole output. Inside, the tokens of video, image, audio
    and text are cut where the model's plan says so, and its attention becomes `cp_fast`'s. Cross attention to a text
    that every rank has whole does not change. The first call of a kind (of other arguments, or of tensors with other
    numbers of axes) runs the model some times more without gradients, on slices and with attention that passes each
    token on alone: it learns what each attention joins, and raises if something else mixes tokens.

    Gradients are those of the sum of all ranks' losses. So if every rank computes the same loss from the output, divide
    it by the number of ranks, and add gradients up; or have a wrapper average them over the ranks (DDP, FSDP), and
    divide by nothing.

    Args:
        model: a transformer of diffusers, or PEFT's PeftModel of one; before FSDP, DDP or torch.compile wrap it, and in
            place of `enable_parallelism`. Called again it takes the new context.
        cp: a `ContextParallel`: its group, schedule and backend count; tokens are cut one slice after the other,
            whatever its layout. Or the `ContextParallelConfig` that `enable_parallelism` would get: `ring_degree` means
            p2p, `ulysses_degree` a2a, both a2a+p2p.
        plan: where tokens are cut, in the form of a model's `_cp_plan`, for a model that has none.

    Raises:
        NotImplementedError: the model has no plan; its forward was replaced, as offloading does. Calls raise it for
        what cannot be right over ranks, with the name of the module or argument. ValueError, TypeError: an argument is
        wrong. Calls raise ValueError on all ranks if the ranks' arguments differ.
    """
    if callable(getattr(model, "get_base_model", None)):
        use(cast(Any, model).get_base_model(), cp, plan=plan)
        return model
    theirs = importlib.import_module("diffusers")
    if not isinstance(model, theirs.ModelMixin):
        raise TypeError(f"model is a {type(model).__name__}; use takes a transformer of diffusers, and no pipeline")
    if isinstance(cp, theirs.ContextParallelConfig):
        cp = _context_of(cp, next(model.parameters()).device)
    check_context(cp, ContextParallel)
    name = type(model).__name__
    if getattr(model, "_parallel_config", None) is not None:
        raise ValueError(f"{name} has diffusers' own parallelism; call use in place of enable_parallelism")
    rows = plan_of(model, plan)
    before: _State | None = model.__dict__.get("_cp_fast_state")
    unhook(model)
    if "forward" in model.__dict__:
        raise NotImplementedError(f"{name} has a forward of its own, as offloading gives it; call use before")
    context = replaced(cp, layout="contiguous")
    state = _State(context, rows, outer(rows), dict(before.attention) if before else {})
    _take_attention(model, state)
    hook(model, rows)
    model.__dict__["_cp_fast_state"] = state
    forward: Any = functools.wraps(type(model).forward)(torch.compiler.disable(_forward))
    forward.cp_fast = True
    model.__dict__["forward"] = MethodType(forward, model)
    return model


def _context_of(config: Any, device: torch.device) -> ContextParallel:
    """The context of a ContextParallelConfig."""
    if not config.convert_to_fp32:
        raise ValueError("convert_to_fp32 is False; partial results are added up in float32 here")
    mesh = config.mesh or init_device_mesh(device.type, config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    ring, ulysses = (mesh[name] for name in ("ring", "ulysses"))
    if ulysses.size() == 1:
        return ContextParallel(ring.get_group(), "p2p")
    if ring.size() == 1:
        return ContextParallel(ulysses.get_group(), "a2a")
    return ContextParallel((ulysses.get_group(), ring.get_group()), "a2a+p2p")


# ---- a model in use


@dataclass(eq=False)
class _State:
    """A model in use.

    Attributes:
        cp: its context, with layout "contiguous".
        plan: where its tokens are cut.
        cut: cuts the arguments of the model itself.
        attention: the kernels that each layer had before, by its name with "*" for numbers, which whole keys keep.
        learned: what was seen of each kind of call.
    """

    cp: ContextParallel
    plan: Plan
    cut: Callable[..., Any]
    attention: dict[str, Any] = field(default_factory=dict)
    learned: dict[Any, Learned] = field(default_factory=dict)


def _where(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _processors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The processors that hand their attention to diffusers' dispatcher, by their layers' names."""
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is not None and hasattr(processor, "_attention_backend"):
            yield name, processor


def _take_attention(model: nn.Module, state: _State) -> None:
    """Have every layer's attention call `_attend` with the layer's name."""
    names: dict[int, str] = {}
    for name, processor in _processors(model):
        where = _where(name)
        if names.setdefault(id(processor), where) != where:
            raise NotImplementedError(
                f"{names[id(processor)]} and {where} of {type(model).__name__} share one attention processor; give "
                "each its own"
            )
        mine, theirs = _backend_of(where), processor._attention_backend
        if theirs != mine:
            state.attention[where] = theirs
        processor._attention_backend = mine
    if not names:
        raise NotImplementedError(
            f"{type(model).__name__} has no attention that goes by diffusers' attention dispatcher"
        )


class _Everything(set[str]):
    """The arguments of `_attend`, for the dispatcher: it drops no others in silence."""

    def __contains__(self, _: object) -> bool:
        return True


@functools.cache
def _backend_of(where: str) -> Any:
    """A backend of diffusers' attention dispatcher that knows its layer's name. It is one more value than those of
    AttentionBackendName, so none of them changes.
    """
    dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    kind, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    backend = str.__new__(kind, f"cp_fast: {where}")
    backend._name_ = backend._value_ = f"cp_fast: {where}"
    registry.register(backend)(functools.partial(torch.compiler.disable(_attend), where))
    registry._supported_arg_names[backend] = _Everything()
    return backend


def _attend(
    where: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
    **more: Any,
) -> torch.Tensor:
    """One layer's attention, as diffusers' dispatcher calls it: [b, rows, h, d]."""
    q, k, v = query, key, value
    call = current()
    if not isinstance(call, _Spread | Probe):
        raise RuntimeError(
            f"the attention of {where} runs outside of a call of the model that use was called with. Call the whole "
            "model; checkpoint its blocks by its enable_gradient_checkpointing()"
        )

    def local() -> torch.Tensor:
        dispatch = importlib.import_module("diffusers.models.attention_dispatch")
        how: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        how |= {"enable_gqa": enable_gqa, "attention_kwargs": more, "backend": call.kernels.get(where)}
        return dispatch.dispatch_attention_fn(q, k, v, **how)

    if isinstance(call, Probe):
        return call.attend(where, q, k, v, local)
    seen = call.seen(where, q.shape[1], k.shape[1])
    if seen.keys is None:
        return local()
    refuse(f"the attention of {where}", dropout_p=dropout_p, **more)
    if q.shape[2] != k.shape[2] and not enable_gqa:
        raise ValueError(f"{where} has {q.shape[2]} query heads and {k.shape[2]} kv heads without enable_gqa")
    return attend_over_ranks(where, seen, call, q, k, v, attn_mask, is_causal, scale)


# ---- a call


class _Spread(SlicedCall):
    """A call over ranks."""

    learned: Learned
    kernels: dict[str, Any]

    def seen(self, where: str, queries: int, keys: int) -> Seen:
        """How a layer's attention with so many rows joins its streams."""

        def fits(streams: tuple[str, ...] | None, rows: int) -> bool:
            return streams is None or lengths(streams, self) == rows

        known = self.learned.attention.get(where, [])
        fitting = [seen for seen in known if fits(seen.queries, queries) and fits(seen.keys, keys)]
        if len(fitting) != 1:
            why = "as no call before it" if not fitting else "as several that are made of other streams"
            raise NotImplementedError(f"{where} has {queries} queries and {keys} keys, {why}")
        return fitting[0]

    def whole(self, x: torch.Tensor, axis: int, where: str) -> torch.Tensor:
        return gather(x, axis, self.streams[self.learned.gathers[where]], self.cp)


def _forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The model's forward, with its tokens cut."""
    if isinstance(current(), SlicedCall):
        raise RuntimeError(f"{type(model).__name__} is called inside of a call of a model over ranks")
    state: _State = model.__dict__["_cp_fast_state"]
    entries = _agreed(model, state, args, kwargs)
    modules = list(model.modules())
    checkpoint_inside(modules)

    def run() -> Any:
        given, named = _copied(args), _copied(kwargs)
        given, named = state.cut(model, given, named)
        return type(model).forward(model, *given, **named)

    kind = tuple(entry.kind for entry in entries)
    if kind not in state.learned:
        mine = Probe(state.cp, Window(state.cp.rank, state.cp.size), kernels=state.attention)
        state.learned[kind] = merged(
            state.cp, "a first call", lambda: learn(model, run, mine), lambda found: _same(model, found)
        )
    call = _Spread(state.cp, Window(state.cp.rank, state.cp.size), kernels=state.attention)
    call.learned = state.learned[kind]
    with inside(call):
        out = run()
    call.check()
    return out


def _same(model: nn.Module, found: list[Learned]) -> Learned:
    if any(one != found[0] for one in found):
        raise RuntimeError(f"the ranks have different models, all of them {type(model).__name__}")
    return found[0]


def _copied(given: Any) -> Any:
    """Containers without those that a model may change."""
    if isinstance(given, dict):
        return {name: _copied(value) for name, value in given.items()}
    return type(given)(map(_copied, given)) if type(given) in (list, tuple) else given


class _Entry(NamedTuple):
    """One argument of a call, or of a container among them.

    kind: what it has in common in calls of a kind. value: equal on all ranks.
    """

    name: str
    kind: tuple[Any, ...]
    value: Any


def _agreed(model: nn.Module, state: _State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Entry]:
    """A call's arguments, once all ranks have the same. Collective."""
    name = type(model).__name__

    def read() -> list[_Entry]:
        _check(model, state)
        modules = zlib.crc32(repr([(where, type(one).__qualname__) for where, one in model.named_modules()]).encode())
        entries = [_Entry("module", (modules,), modules), _Entry("gradients", (), torch.is_grad_enabled())]
        entries += [x for n, value in enumerate(args) for x in _entries(f"argument {n}", value)]
        entries += [x for key in sorted(kwargs) for x in _entries(key, kwargs[key])]
        sums = torch.stack([_checksum(x.value) for x in entries if isinstance(x.value, torch.Tensor)]).tolist()
        return [
            x._replace(value=(x.value.requires_grad, tuple(x.value.shape), sums.pop(0)))
            if isinstance(x.value, torch.Tensor)
            else x
            for x in entries
        ]

    def merge(everyone: list[list[_Entry]]) -> list[_Entry]:
        for rank, theirs in enumerate(everyone):
            for mine, other in zip(everyone[0], theirs, strict=False):
                if mine != other:
                    what = mine.name if mine.name == other.name else f"{mine.name} and {other.name}"
                    raise ValueError(
                        f"rank 0 and rank {rank} call {name} with another {what}; every rank has to give the whole "
                        "batch, the same on all: the noise too, so seed generators alike"
                    )
            if len(theirs) != len(everyone[0]):
                raise ValueError(f"rank 0 and rank {rank} call {name} with other arguments")
        return everyone[0]

    return merged(state.cp, f"a call of {name}", read, merge) if state.cp.size > 1 else read()


def _entries(name: str, value: Any) -> Iterator[_Entry]:
    if isinstance(value, torch.Tensor):
        yield _Entry(name, (name, value.ndim, str(value.dtype), value.device.type), value)
    elif isinstance(value, dict):
        for key in value:
            yield from _entries(f"{name}[{key!r}]", value[key])
    elif isinstance(value, list | tuple) and any(isinstance(x, torch.Tensor | dict | list | tuple) for x in value):
        for number, x in enumerate(value):
            yield from _entries(f"{name}[{number}]", x)
    else:
        numbers = isinstance(value, int | float) and not isinstance(value, bool)
        plain = value is None or isinstance(value, int | float | str | bool | list | tuple | torch.dtype)
        said = repr(value) if plain else kind_of(value)
        yield _Entry(name, (name, (kind_of(value), value != 0) if numbers else said), said)


def _checksum(x: torch.Tensor) -> torch.Tensor:
    """A number of the values' bits and places: int64 []."""
    x = x.detach().contiguous().reshape(-1)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = x.view(torch.int64 if x.element_size() == 16 else sizes[x.element_size()]).to(torch.int64)
    places = torch.arange(1, len(bits) + 1, device=x.device)
    return (bits * (places * 2654435761 % 2147483647)).sum() + len(bits)


def _check(model: nn.Module, state: _State) -> None:
    """Raise for what was changed since `use`, and for what cannot be right."""
    name = type(model).__name__
    for where, processor in _processors(model):
        if getattr(processor._attention_backend, "value", None) != f"cp_fast: {_where(where)}":
            raise RuntimeError(
                f"{where} of {name} has another processor or attention backend than use gave it; set these first, and "
                "call use again"
            )
    if getattr(model, "is_cache_enabled", False):
        raise NotImplementedError(
            f"{name} has a cache, which skips blocks by what a rank's own tokens say; call its disable_cache()"
        )
    for where, module in model.named_modules():
        rate = getattr(module, "p", 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and rate:
            raise NotImplementedError(
                f"{where} of {name} drops out with p={rate}; ranks would drop other values than one process does. Set "
                "it to 0 (of LoRA: lora_dropout=0)"
            )
