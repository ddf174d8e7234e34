"""Functions of scores, written in PyTorch, and their derivatives as expressions.

PyTorch itself traces the function and its autograd (`make_fx` over fake tensors): every operator that would run is
written down. `aten_operations` has the meaning of each for one element; any other operator is refused by name. A
function is traced for dtypes and shapes, never for values, so the tensors of later calls may differ. The trace has its
own thread. PyTorch keeps hooks of saved tensors, dispatch modes, autocast and excluded dispatch keys for each thread.
So a call under activation checkpointing, or inside an operator of a compiled graph, is traced like any other.

Reference: Reed et al., "torch.fx: Practical Program Capture and Transformation for Deep Learning in Python", MLSys
2022.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import torch
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from cp_fast.kernels.attention.fa4.scores.aten_operations import DOCUMENTED, TracedValues, translate
from cp_fast.kernels.attention.fa4.scores.expressions import Expression, NoExpression
from cp_ref.schedules.words import Unsupported

__all__ = [
    "TracedScores",
    "trace_scores",
]

PLACES = ("b", "h", "q_idx", "kv_idx", "diagonal")

ScoreFunction = Callable[..., torch.Tensor]


class TracedScores(NamedTuple):
    """A function of one score, and its derivative."""

    modified: Expression  # of score and places
    pulled_back: Expression  # the score's gradient, of grad, score and places
    sizes: tuple[tuple[str, tuple[int, ...]], ...] = ()  # captured tensors: all sizes but the first

    @property
    def digest(self) -> str:
        """Equal where all that decides a kernel is."""
        return f"{self.modified.digest} {self.pulled_back.digest} {self.sizes}"

    @property
    def captured(self) -> tuple[str, ...]:
        """The names of the captured tensors, in one order."""
        return tuple(dict.fromkeys(self.modified.captured + self.pulled_back.captured))


def trace_scores(
    function: ScoreFunction, captured: Mapping[str, torch.Tensor], name: str = "score_mod"
) -> TracedScores:
    """Trace a function.

    Args:
        function: of score (float32), the five `PLACES` (int32), which broadcast against the score, and the captured
            tensors as keyword arguments.
        captured: only their dtypes and shapes count.
        name: of the function, for errors.

    Raises:
        Unsupported: it has an operation that no expression has, or it looks at a value on the host.

    >>> def halved(score, b, h, q_idx, kv_idx, diagonal):
    ...     return score / 2 - (q_idx - kv_idx)
    >>> traced = trace_scores(halved, {})
    >>> [node.op for node in traced.modified.nodes]
    ['leaf', 'leaf', 'leaf', 'constant', 'div', 'sub', 'convert', 'sub']
    >>> [node.op for node in traced.pulled_back.nodes]
    ['leaf', 'constant', 'div']
    """

    def both(
        score: torch.Tensor, grad: torch.Tensor, places: tuple[torch.Tensor, ...], tensors: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def own(x: torch.Tensor) -> torch.Tensor:  # The function may write to its arguments.
            return function(x.clone(), *(one.clone() for one in places), **tensors).to(x.dtype)

        result, pull_back = cast(Any, torch.func.vjp(own, score))
        return result, pull_back(grad)[0]

    def traced() -> GraphModule:
        score = torch.empty(_SHAPE, dtype=torch.float32)
        places = tuple(torch.empty(_SHAPE, dtype=torch.int32) for _ in PLACES)
        tensors = {key: torch.empty(x.shape, dtype=x.dtype) for key, x in captured.items()}
        trace = make_fx(torch.func.functionalize(both), decomposition_table=cast(Any, core_aten_decompositions()))
        return trace(score, score.clone(), places, tensors)

    try:
        module = _in_a_thread(traced)
    except Exception as error:  # PyTorch raises errors of many types where a value would be looked at.
        raise Unsupported(
            f"{name} on backend 'fa4', which compiles it,",
            {},
            f"it cannot be traced without values: {type(error).__name__}: {str(error).splitlines()[0]}",
        ) from error
    return _read(module, ("score", "grad", *PLACES), list(captured), name)


def _in_a_thread(traced: Callable[[], GraphModule]) -> GraphModule:
    """Its result, from a thread with none of this one's hooks and modes."""

    def run() -> GraphModule:
        with FakeTensorMode():
            return traced()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result()


_SHAPE = (2, 3)  # No place has a size of 1, so that a captured tensor of several elements does not broadcast.


def _read(module: GraphModule, leaves: tuple[str, ...], captured: list[str], name: str) -> TracedScores:
    """The expressions of a traced module whose inputs are the leaves and then the captured tensors."""
    values = TracedValues(module)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, leaf in zip(inputs, leaves, strict=False):
        values.give_leaf(node, leaf)
    for node, tensor in zip(inputs[len(leaves) :], captured, strict=True):
        values.give_tensor(node, tensor)
    results: list[Node] = []
    try:
        for node in module.graph.nodes:
            if node.op == "output":
                results = list(node.args[0])
            elif node.op != "placeholder":
                translate(values, node)
        modified, pulled_back = (values.writer.expression(values.number_of(one)) for one in results)
    except NoExpression as found:
        raise Unsupported(
            f"{name} on backend 'fa4', which compiles it,",
            {},
            f"it has {found}; it may have {DOCUMENTED}. backend='torch' runs any function",
        ) from None
    traced = TracedScores(modified, pulled_back)
    shapes = {name: tuple(node.meta["val"].shape) for node, name in zip(inputs[len(leaves) :], captured, strict=True)}
    return traced._replace(sizes=tuple((name, shapes[name][1:]) for name in traced.captured))
