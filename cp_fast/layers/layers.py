"""A linear or sparse layer on this rank, and the envelope of its calls, from arguments to results and gradients.

    begun           a call is read, checked, and agreed on by all ranks; nothing of it for a call of known kinds
    Run             its two passes, under the group's locks; errors of messages name the call
    LayerTables     its exchanges of rows, as programs (`cp_fast.compile.exchange_program`)
    LayerFunction   both passes to autograd

`cp_fast.layers.layer_operators` has the way in: `called`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from cp_fast.api.checked_calls import agree_on_call, checking
from cp_fast.api.fast_context import ContextParallel, call_key
from cp_fast.api.plan import Plan
from cp_fast.compile.exchange_program import RowMessages
from cp_fast.runtime.handles import hide_from_checkpointing
from cp_fast.runtime.row_exchange import RowExchange
from cp_ref.batches.tensors import differentiable_once, no_autocast
from cp_ref.calls import layer as calls
from cp_ref.calls.layer import LayerCall
from cp_ref.groups.agreement import agreed
from cp_ref.groups.group import Group
from cp_ref.schedules.problem import Problem

__all__ = ["Layer", "LayerFunction", "LayerTables", "Outputs", "Run", "begun"]

Tensor = torch.Tensor


Outputs = tuple[Sequence[Tensor], Sequence[Tensor | None]]
"""Results of a forward pass, and hidden tensors that the backward pass needs besides. The shapes of the results follow
from the arguments of the call.
"""


@dataclass(frozen=True, eq=False)
class LayerTables:
    """A rank's tables for layers of one batch, made when the first of them is called.

    Attributes:
        exchanges: those that its layers have asked for, by name.
    """

    problem: Problem
    rank: int
    device: torch.device
    exchanges: dict[str, RowExchange] = field(default_factory=dict[str, RowExchange], repr=False)

    def messages(self, name: str) -> RowMessages:
        """What an exchange sends, and the rows that this rank has and computes with."""
        raise NotImplementedError

    def exchange(self, name: str) -> RowExchange:
        """An exchange, made once."""
        found = self.exchanges.get(name)
        return found or self.exchanges.setdefault(name, self._new_exchange(name))

    @torch.inference_mode(False)
    def _new_exchange(self, name: str) -> RowExchange:
        return RowExchange(name, self.messages(name), self.device)


class Run(NamedTuple):
    """One call of a layer on this rank, checked.

    Attributes:
        number: of the call under `checked`; 0 for one that is not.
        tables: the layer's, of the plan's batch in the forward pass.
    """

    layer: Layer
    plan: Plan
    cp: ContextParallel
    call: Any
    number: int
    tables: Any

    @property
    def group(self) -> Group:
        """The group carries its messages."""
        return self.plan.batch.group(self.cp.comm)

    def of(self, tables: LayerTables) -> Run:
        """The run with exchanges of other tables of its batch."""
        return self if tables is self.tables else self._replace(tables=tables)

    def gather(
        self, name: str, *tensors: Tensor, meanwhile: Callable[[], None] | None = None, **others: Tensor
    ) -> list[Tensor]:
        """The rows that this rank computes with, of each tensor. An exchange of the layer's tables brings them.

        Args:
            name: of the exchange.
            tensors: the rank's own rows, of the exchange's first kind.
            meanwhile: work to do while the first messages travel.
            others: the rank's own rows of the other kinds, in their order, a tensor of each.
        """
        given = tensors, *zip(others.values(), strict=True)
        found = self.tables.exchange(name).gather(self.group, *given, meanwhile=meanwhile)
        return [x for some in found for x in some]

    def give_back(self, name: str, *tensors: Tensor) -> list[Tensor]:
        """Bring results for the rows that an exchange has gathered to their owners: for the rank's own rows, the sums
        of all ranks' results of each tensor. They may be formed in the memory of the given tensors.
        """
        (found,) = self.tables.exchange(name).give_back(self.group, tensors)
        return found

    def check_batch(self) -> None:
        """Raise where the plan was updated since."""
        if self.layer.tables(self.plan) is not self.tables:
            raise RuntimeError("the plan was updated between the forward and the backward pass of a call")

    def forward(self, tensors: Sequence[Tensor | None]) -> Outputs:
        """The layer's forward pass, with detached operands."""
        layer, first = self.layer, cast(Tensor, tensors[0])  # every layer has a first operand
        with hide_from_checkpointing(), self.cp.naming_errors(layer.forward_name), no_autocast(first.device):
            return layer.forward(self, *tensors)

    def backward(
        self,
        tensors: Sequence[Tensor | None],
        results: Sequence[Tensor],
        hidden: Sequence[Tensor | None],
        grads: Sequence[Tensor],
    ) -> Sequence[Tensor | None]:
        """The layer's backward pass: a gradient for each operand, None for none."""
        layer, device = self.layer, grads[0].device
        with hide_from_checkpointing(), self.cp.naming_errors(layer.backward_name), no_autocast(device):
            return layer.backward(self, tensors, results, hidden, grads)


class Layer:
    """A layer of this package: what one rank computes of a declared layer, and its messages.

    Attributes:
        tables: gives its tables of a plan's batch.
        reads: the operands that the backward pass reads.
        reads_results: whether it reads the results of the forward pass too.
        hides: whether the forward pass has hidden tensors (`Outputs`).
        differentiable: whether there is a backward pass.
        as_operator: whether it may be one operator: the shapes of its results follow from those of its operands.
        operator: the forward pass as an operator (`cp_fast.layers.layer_operators.registered`).
    """

    declared: calls.Layer
    tables: Callable[[Plan], Any]
    reads: frozenset[str] | None = None  # None: all
    reads_results = False
    hides = False
    differentiable = True
    as_operator = True
    operator: Any

    def __init__(self, **more_options: str) -> None:
        """more_options: the types of the options that `cast_operands` adds."""
        self.options = {**self.declared.options, **more_options}
        self.name = self.declared.name
        self.forward_name = f"{self.name}, forward" if self.differentiable else self.name
        self.backward_name = f"{self.name}, backward"
        self.names = tuple(operand.name for operand in self.declared.operands)
        self.unread = tuple(i for i, name in enumerate(self.names) if self.reads is not None and name not in self.reads)

    # ---- what a layer says of itself

    def read_back(self, tensors: Sequence[Any]) -> list[Any]:
        """The operands, None in place of those that the backward pass does not read."""
        found = [*tensors]
        for place in self.unread:
            found[place] = None
        return found

    def cast_operands(self, tensors: Sequence[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the operands after the layer's casts, and the options. It may add `more_options`."""
        return self.declared.cast(tensors), options

    def facts(self, tensors: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
        """Return the tensors' further facts that decide about the call, besides their shapes."""
        return ()

    def read(
        self, cp: ContextParallel, plan: Any, tensors: Sequence[Any], options: dict[str, Any], facts: tuple[Any, ...]
    ) -> LayerCall:
        """The call, once its arguments are checked. Sends nothing."""
        return self.declared.read(cp, plan, Plan, **dict(zip(self.names, tensors, strict=True)), **options)

    def forward(self, run: Run, *tensors: Any) -> Outputs:
        """Compute the results in the user's format, given the operands."""
        raise NotImplementedError

    def backward(
        self,
        run: Run,
        tensors: Sequence[Any],
        results: Sequence[Tensor],
        hidden: Sequence[Any],
        grads: Sequence[Tensor],
    ) -> Sequence[Tensor | None]:
        """A gradient for each operand.

        Args:
            tensors: the operands; None for those that are not in `reads`.
            results, hidden: of the forward pass.
            grads: of the results that the caller has.
        """
        raise NotImplementedError

    def without_gradient(self, options: dict[str, Any]) -> Sequence[str]:
        """The operands that `backward` gives no gradient to, besides constants."""
        return ()

    def shapes(self, tensors: Sequence[Any], qkv_format: str, options: dict[str, Any]) -> list[Tensor]:
        """Tensors of the shapes and dtypes of the results."""
        raise NotImplementedError


# ---- the ranks agree


def begun(
    layer: Layer, cp: ContextParallel, plan: Any, tensors: Sequence[Any], options: dict[str, Any], *, ask: bool = True
) -> Run:
    """A call, once all ranks have read theirs and agree, under `checked` on the same call. Nothing is read of a call of
    the same kinds again.

    ask: whether to agree; a call that has begun before is only read.
    """
    facts = layer.facts(tensors, options)
    key, number = None, 0
    if isinstance(plan, Plan) and isinstance(cp, ContextParallel) and not _captured(plan) and not (ask and checking()):
        key = call_key(cp, (layer.name, *options.values(), *facts), tensors)
    if key is None or (call := plan.batch.calls.layers.get(key)) is None:

        def read() -> LayerCall:
            if _captured(plan):
                raise ValueError(
                    "a linear or sparse layer is captured in a CUDA graph with a plan that can be updated, but its "
                    "launches have sizes of this batch; make a plan for each batch, without max_sequences"
                )
            return layer.read(cp, plan, tensors, options, facts)

        def noted() -> tuple[LayerCall, Any]:
            return (found := read()), vars(found).items()

        with hide_from_checkpointing():
            if not ask:
                call = read()
            elif checking() and isinstance(plan, Plan):
                call, number = agree_on_call(cp, plan, f"{layer.name}, forward", noted)
            else:
                known = plan.agreed if isinstance(plan, Plan) else None  # a plan asks once about each kind of call
                call = agreed(cp, "an agreement on the call of a layer", read, lambda found: found, known)
        if key is not None:
            plan.batch.calls.layers.find(key, lambda: call)
    return Run(layer, plan, cp, call, number, layer.tables(plan))


def _captured(plan: Any) -> bool:
    """Whether a CUDA graph is captured with a plan that can be updated."""
    updated = isinstance(plan, Plan) and plan.batch.room is not None
    return updated and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# ---- autograd


class LayerFunction(torch.autograd.Function):
    """From the operands of a layer to the results that the caller asked for."""

    @staticmethod
    def forward(ctx: Any, run: Run, count: int, *given: Tensor | None) -> tuple[Tensor, ...]:
        results, hidden = run.forward([x.detach() if x is not None and x.requires_grad else x for x in given])
        ctx.run, ctx.behind = run, len(given)
        if run.layer.reads_results:
            ctx.behind += len(results)
            hidden = *(x.detach() for x in results), *hidden
        ctx.save_for_backward(*run.layer.read_back(given), *hidden)
        return (*results[:count],)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        run: Run = ctx.run
        if run.number:
            with hide_from_checkpointing():
                of_call = [("of_call", run.number)]
                agree_on_call(run.cp, run.plan, run.layer.backward_name, lambda: (run.check_batch(), of_call))
        run.check_batch()
        saved, first, behind = ctx.saved_tensors, len(run.layer.names), ctx.behind
        return None, None, *run.backward(saved[:first], saved[first:behind], saved[behind:], grads)
