"""Bugs in linear attention and causal convolutions: maps of the state, their order, their gradients, halos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cp_ref.linear.recurrence import AffineMap, Tokens
from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]

_LAYER, _BACKWARD = "cp_ref.linear.layers", "cp_ref.linear.layers._LinearAttention.backward"
_DG, _DBETA = 6, 7  # among the gradients of the backward pass


def _reversed_order(documents: Any, scans: Any) -> Iterator[tuple[int, list[Any]]]:
    """A scan composes the maps before its last fragment in reverse."""
    for document, spans in documents(scans):
        yield document, [*spans[:-1][::-1], spans[-1]]


def _no_own_maps(play_states: Any, direction: str, steps: Any, group: Any, own: Mapping[Any, Any], begin: Any) -> Any:
    heads, d_k, _ = begin.shape[1:]
    nothing = AffineMap(torch.eye(d_k, dtype=begin.dtype).repeat(heads, 1, 1), torch.zeros_like(begin[0]))
    return play_states(direction, steps, group, {span: lambda: nothing for span in own}, begin)


def _last_decay_lost(map_of: Any, tokens: Tokens) -> AffineMap:
    decay = tokens.g.clone()
    decay[-1] = 0
    return AffineMap(map_of(tokens._replace(g=decay)).matrix, map_of(tokens).shift)


def _not_transposed(map_back: Any, *arguments: Any) -> AffineMap:
    found = map_back(*arguments)
    return AffineMap(found.matrix.mT.contiguous(), found.shift)


def _wrong_document(play_states: Any, direction: str, steps: Any, group: Any, own: Any, begin: torch.Tensor) -> Any:
    return play_states(direction, steps, group, own, begin.roll(1, 0) if direction == "forward" else begin)


def _documents_touch(play_states: Any, direction: str, steps: Any, group: Any, own: Any, begin: torch.Tensor) -> Any:
    """Zero times everybody's state: a NaN of one document reaches all."""
    entering = play_states(direction, steps, group, own, begin)
    return {span: state + 0 * begin.sum() for span, state in entering.items()}


def _one_ranks_dfinal(backward: Any, ctx: Any, dout: torch.Tensor, dfinal: torch.Tensor) -> Any:
    return backward(ctx, dout, dfinal if ctx.cp.rank == 0 else torch.zeros_like(dfinal))


def _halved(number: int) -> Any:
    def wrong(backward: Any, *arguments: Any) -> Any:
        grads = list(backward(*arguments))
        grads[number] = None if grads[number] is None else grads[number] / 2
        return tuple(grads)

    return wrap(wrong)


def _shorter_halo(halo: Any, self: Any, kernel_size: int) -> Any:
    return halo(self, max(kernel_size - 1, 1))


def _halo_without_gradient(run: Any, direction: str, steps: Any, world: Any, comm: Any, compute: Any) -> None:
    """A tile adds nothing to the gradient of rows of other ranks."""

    def dropping(tile: Any) -> None:
        compute(tile)
        if direction == "backward":
            dx = world.tensors["dkv"][0]
            theirs = torch.ones(len(dx), dtype=torch.bool)
            for _, there in world.own_rows("kv"):
                theirs[there] = False
            dx[theirs] = 0

    run(direction, steps, world, comm, dropping)


def _linear(text: str, target: str, change: Any, tier: str = "linear") -> Mutant:
    return Mutant(text, target, change, tier, "linear")


_CONVOLUTION = "linear-convolution"

MUTANTS: dict[str, Mutant] = {
    "maps-in-reverse": _linear(
        "maps are composed from the end", "cp_ref.linear.recurrence._document_maps", wrap(_reversed_order)
    ),
    "own-maps-left-out": _linear("a rank's own maps do nothing", f"{_LAYER}.play_states", wrap(_no_own_maps)),
    "last-decay-lost": _linear("a map has not the last decay", f"{_LAYER}.map_of", wrap(_last_decay_lost)),
    "map-back-not-transposed": _linear("M in place of M^T", f"{_LAYER}._map_back", wrap(_not_transposed)),
    "state-of-another-document": _linear("initial states shifted", f"{_LAYER}.play_states", wrap(_wrong_document)),
    "documents-touch": _linear("NaN of one document in all", f"{_LAYER}.play_states", wrap(_documents_touch)),
    "dfinal-of-rank-0": _linear("dfinal of the other ranks is lost", _BACKWARD, wrap(_one_ranks_dfinal)),
    "dg-halved": _linear("half of dg", _BACKWARD, _halved(_DG)),
    "dbeta-halved": _linear("half of dbeta", _BACKWARD, _halved(_DBETA)),
    "convolution-halo-one-short": _linear(
        "the halo is one row short", "cp_ref.reference_plan.Plan.halo", wrap(_shorter_halo), _CONVOLUTION
    ),
    "convolution-halo-without-dx": _linear(
        "dx of rows of other ranks is lost",
        "cp_ref.linear.layers.run_rank_schedule",
        wrap(_halo_without_gradient),
        _CONVOLUTION,
    ),
}
