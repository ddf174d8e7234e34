"""A call of a linear or sparse layer: as an autograd function, or as one operator of torch.library.

The latter is so under torch.compile, and where selective checkpointing looks at operators and can save the results:

    cp_attention::causal_conv1d_forward    (x, weight, bias, plan, cp, qkv_format, activation) -> results
    cp_attention::causal_conv1d_backward   (these, results, gradients of results, hidden) -> gradients

Both are opaque to the compiler, which sees shapes alone. Tensors that the backward pass alone reads, of sizes that only
the kernels know, are hidden: they go from one to the other as a handle (`cp_fast.runtime.handles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cp_fast.api.checked_calls import agree_on_call, checking
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan
from cp_fast.layers.layers import Layer, LayerFunction, Run, begun
from cp_fast.runtime.handles import is_selective, new_handle, object_of, outside_of_graphs
from cp_ref.batches.tensors import raise_for_batched, refuse_transforms
from cp_ref.problems.call_checks import check_context
from cp_ref.schedules.values import is_dtensor

__all__ = ["called", "registered"]

Tensor = torch.Tensor
_LIBRARY = torch.library.Library("cp_attention", "FRAGMENT")


# ---- operators


class _Hidden:
    """The call and the hidden tensors of a forward pass that ran as an operator."""

    def __init__(self, call: Any, tensors: Sequence[Tensor | None]) -> None:
        self.call, self.tensors = call, tensors


def registered(layer: Layer) -> Layer:
    """The layer, with its operators."""
    ours, name = _Operators(layer), layer.name
    how = ", ".join(["Tensor plan, Tensor cp, str qkv_format", *(f"{kind} {x}" for x, kind in layer.options.items())])
    operands = ", ".join(f"Tensor{'?' if x.optional else ''} {x.name}" for x in layer.declared.operands)
    forward = f"{name}_forward" if layer.differentiable else name
    there = _defined(forward, ours.forward, ours.forward_shapes, f"({operands}, {how}) -> Tensor[]")
    if layer.differentiable:
        operands = ", ".join(f"Tensor? {x}" for x in layer.names)
        more = "Tensor[] results, Tensor[] grads, Tensor? hidden, bool[] wanted"
        schema = f"({operands}, {more}, {how}) -> Tensor[]"
        ours.back = _defined(f"{name}_backward", ours.backward, ours.backward_shapes, schema)
        _LIBRARY.impl(f"{name}_backward", raise_for_batched, "Batched")  # of `is_grads_batched`, in compiled graphs
        there.register_autograd(ours.differentiate, setup_context=ours.keep)
    layer.operator = getattr(torch.ops.cp_attention, forward).default
    return layer


def _defined(name: str, function: Any, shapes: Any, schema: str) -> Any:
    found: Any = torch.library.custom_op(f"cp_attention::{name}", function, mutates_args=(), schema=schema)
    found.register_fake(shapes)
    return found


class _Operators:
    """The bodies of a layer's two operators, what a compiler sees of them, and how autograd joins them."""

    back: Any

    def __init__(self, layer: Layer) -> None:
        self.layer, self.count = layer, len(layer.names)

    def options(self, values: Sequence[Any]) -> dict[str, Any]:
        """The options of a call by name."""
        return dict(zip(self.layer.options, values, strict=True))

    def forward(self, *given: Any) -> list[Tensor]:
        """The results and, of a layer that hides tensors, their handle."""
        layer, tensors, (plan, cp, _, *values) = self.layer, given[: self.count], given[self.count :]
        run = begun(layer, object_of(cp), object_of(plan), tensors, self.options(values))
        tensors = [None if x is None else x.detach() for x in tensors]
        results, hidden = run.forward(tensors)
        own = [x.contiguous() for x in _in_own_memory(results, tensors)]
        return [*own, new_handle(_Hidden(run.call, _in_own_memory(hidden, tensors)))] if layer.hides else own

    def forward_shapes(self, *given: Any) -> list[Tensor]:
        """Tensors like those of `forward`."""
        tensors, (_, cp, qkv_format, *values) = given[: self.count], given[self.count :]
        results = self.layer.shapes(tensors, qkv_format, self.options(values))
        return [*results, torch.empty_like(cp)] if self.layer.hides else results

    def backward(self, *given: Any) -> list[Tensor]:
        """The gradients of the operands that are wanted."""
        layer, tensors = self.layer, given[: self.count]
        results, grads, handle, wanted, plan, cp, _, *values = given[self.count :]
        plan, cp = object_of(plan), object_of(cp)
        if checking():
            agree_on_call(cp, plan, layer.backward_name, lambda: (None, ()))
        if layer.hides:
            call, hidden = (found := object_of(handle)).call, found.tensors
            run = Run(layer, plan, cp, call, 0, layer.tables(plan))
        else:
            run, hidden = begun(layer, cp, plan, tensors, self.options(values), ask=False), ()
        found = run.backward(tensors, results, hidden, grads)
        found = [x for x, wants in zip(found, wanted, strict=True) if wants]
        return [x.contiguous() for x in _in_own_memory(found, [*tensors, *grads])]

    def backward_shapes(self, *given: Any) -> list[Tensor]:
        """Tensors like those of `backward`; an operand that it does not read has the shape of the first result."""
        tensors, (_, grads, _, wanted, *_) = given[: self.count], given[self.count :]
        like = [grads[0] if x is None else x for x, wants in zip(tensors, wanted, strict=True) if wants]
        return [x.new_empty(x.shape) for x in like]

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        """Save what the backward pass reads."""
        layer, tensors, (plan, cp, *how) = self.layer, inputs[: self.count], inputs[self.count :]
        *results, handle = output if layer.hides else (*output, None)
        options = self.options(how[1:])
        without = layer.without_gradient(options)
        ctx.wanted = [
            x is not None and not operand.constant and operand.name not in without
            for operand, x in zip(layer.declared.operands, tensors, strict=True)
        ]
        ctx.how, ctx.asked = how, layer.declared.results(options)
        results = results if layer.reads_results else ()
        ctx.save_for_backward(plan, cp, handle, *layer.read_back(tensors), *results)
        ctx.mark_non_differentiable(*output[ctx.asked :])

    def differentiate(self, ctx: Any, grads: list[Tensor | None]) -> Any:
        """The gradients of all arguments of the forward operator."""
        plan, cp, handle, *saved = ctx.saved_tensors
        tensors, results = saved[: self.count], saved[self.count :]
        found = iter(self.back(*tensors, results, [*grads[: ctx.asked]], handle, ctx.wanted, plan, cp, *ctx.how))
        return *(next(found) if wanted else None for wanted in ctx.wanted), *(None for _ in (plan, cp, *ctx.how))


def _in_own_memory(found: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Tensors that share no memory with those that were given, nor with each other, as results of operators must be."""
    memory = {x.untyped_storage().data_ptr() for x in given if x is not None and x.numel()}
    own = list[Any]()
    for x in found:
        if x is not None and x.numel():
            x = x.clone() if x.untyped_storage().data_ptr() in memory else x
            memory.add(x.untyped_storage().data_ptr())
        own.append(x)
    return own


# ---- a call


def called(layer: Layer, cp: Any, plan: Any, tensors: Sequence[Any], **options: Any) -> tuple[Tensor, ...]:
    """The results of a call of a layer. tensors: its operands, in order."""
    check_context(cp, ContextParallel)
    compiling = torch.compiler.is_compiling()
    if compiling and not _fits_operator(layer, plan, tensors, options):
        return outside_of_graphs(called, layer, cp, plan, tensors, **options)
    if not compiling:
        refuse_transforms()
    given, options = layer.cast_operands(tensors, options)
    if compiling or (not layer.hides and is_selective() and _fits_operator(layer, plan, given, options)):
        results = layer.operator(*given, plan.handle, cp.handle, plan.problem.qkv_format, *options.values())
        return tuple(results[: layer.declared.results(options)])
    run = begun(layer, cp, plan, given, options)
    if not layer.differentiable:
        return (*run.forward(given)[0],)
    return LayerFunction.apply(run, layer.declared.results(options), *given)


_TYPES = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int)}


def _fits_operator(layer: Layer, plan: Any, tensors: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether a call's arguments are of the types of the layer's operator; all else is checked when it runs."""
    if not isinstance(plan, Plan) or not layer.as_operator:
        return False
    for operand, x in zip(layer.declared.operands, tensors, strict=True):
        if not (operand.optional and x is None) and (not isinstance(x, Tensor) or is_dtensor(x)):
            return False
    return all(_fits(layer.options[name], x) for name, x in options.items())


def _fits(kind: str, x: Any) -> bool:
    if x is None:
        return kind.endswith("?")
    return isinstance(x, _TYPES[kind.rstrip("?")]) and (kind == "bool") == isinstance(x, bool)
