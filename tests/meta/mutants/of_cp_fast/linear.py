"""Bugs in linear attention and causal convolutions: tables of maps, their composition, chunks, gradients, halos."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from cp_fast.linear.affine_maps import Maps
from cp_ref.schedules.schedule import Scans
from tests.meta.mutants.model import Mutant, wrap

__all__ = ["MUTANTS"]

_COMPOSED, _BACKWARD = "cp_fast.linear.linear_passes.entering_states", "cp_fast.linear.linear_attention.backward_pass"


def _reversed_order(state_tables: Any, steps: Any, *arguments: Any) -> Any:
    """A scan composes the maps before its last fragment in reverse."""

    def changed(scans: Scans) -> Scans:
        order: list[int] = []
        for _, group in groupby(enumerate(scans.rows()), key=lambda numbered: numbered[1][0]):
            *before, last = [number for number, _ in group]
            order += [*before[::-1], last]
        return scans.take(np.array(order, dtype=np.int64))

    return state_tables([step._replace(scans=changed(step.scans)) for step in steps], *arguments)


def _no_own_maps(entering_states: Any, tables: Any, maps: Maps, *arguments: Any, **named: Any) -> Any:
    m, b, own = maps.m.clone(), maps.b.clone(), len(tables.chosen)
    b[:own] = 0
    m[:own] = 1 if m.dim() == 2 else torch.eye(m.shape[-1], dtype=m.dtype)
    return entering_states(tables, Maps(m, b), *arguments, **named)


def _not_transposed(entering_states: Any, *arguments: Any, **_: Any) -> Any:
    return entering_states(*arguments)


def _wrong_document(entering_states: Any, tables: Any, maps: Maps, states: Any, *arguments: Any, **named: Any) -> Any:
    return entering_states(tables, maps, None if states is None else states.roll(1, 0), *arguments, **named)


def _documents_touch(entering_states: Any, tables: Any, maps: Maps, states: Any, *arguments: Any, **named: Any) -> Any:
    """Zero times everybody's state: a NaN of one document reaches all."""
    found = entering_states(tables, maps, states, *arguments, **named)
    return found if found is None or states is None else found + 0 * states.sum()


def _half_a_decay(prepare: Any, *arguments: Any) -> Any:
    chunks = prepare(*arguments)
    return chunks._replace(decay=chunks.decay.sqrt())


def _one_ranks_dfinal(backward_pass: Any, plan: Any, *arguments: Any) -> Any:
    *others, dfinal = arguments
    return backward_pass(plan, *others, dfinal if dfinal is None or plan.rank == 0 else torch.zeros_like(dfinal))


def _halved(name: str) -> Any:
    def wrong(backward_pass: Any, *arguments: Any) -> Any:
        found = backward_pass(*arguments)
        gradient = getattr(found, name)
        return found._replace(**{name: None if gradient is None else gradient / 2})

    return wrap(wrong)


def _shorter_halo(halo_tables: Any, *arguments: Any) -> Any:
    """The oldest row counts as zero where it came from another rank."""
    tables = halo_tables(*arguments)
    slots = tables.reads.slots.clone()
    slots[:, 0][slots[:, 0] >= len(slots)] = tables.zeros
    return replace(tables, reads=tables.reads._replace(slots=slots))


def _halo_without_gradient(exchange_gradients: Any, tables: Any, *arguments: Any) -> Any:
    return exchange_gradients(replace(tables, backward=()), *arguments)


def _linear(text: str, target: str, change: Any, tier: str = "linear") -> Mutant:
    return Mutant(text, target, change, tier, "linear")


_CONVOLUTION = "linear-convolution"

MUTANTS: dict[str, Mutant] = {
    "state-tables-in-reverse": _linear(
        "maps are composed from the end", "cp_fast.linear.linear_plan.state_tables", wrap(_reversed_order)
    ),
    "own-slots-left-out": _linear("a rank's own maps do nothing", _COMPOSED, wrap(_no_own_maps)),
    "reverse-maps-not-transposed": _linear("M in place of M^T", _COMPOSED, wrap(_not_transposed)),
    "initial-states-shifted": _linear("the state of another document", _COMPOSED, wrap(_wrong_document)),
    "slots-touch": _linear("NaN of one document in all", _COMPOSED, wrap(_documents_touch)),
    "half-a-chunks-decay": _linear(
        "the decay of a chunk is its root", "cp_fast.linear.chunked.prepare", wrap(_half_a_decay)
    ),
    "final-gradient-of-rank-0": _linear("dfinal of the other ranks is lost", _BACKWARD, wrap(_one_ranks_dfinal)),
    "half-of-dg": _linear("half of dg", _BACKWARD, _halved("dg")),
    "half-of-dbeta": _linear("half of dbeta", _BACKWARD, _halved("dbeta")),
    "halo-tables-one-short": _linear(
        "the oldest row of a halo is zero", "cp_fast.linear.linear_plan.halo_tables", wrap(_shorter_halo), _CONVOLUTION
    ),
    "halo-gradients-not-sent": _linear(
        "dx of rows of other ranks is lost",
        "cp_fast.linear.convolution.causal_conv1d.exchange_gradients",
        wrap(_halo_without_gradient),
        _CONVOLUTION,
    ),
}
