"""The tensors that scores depend on besides q and k: of a call, checked, compared by the ranks, and for operators."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch

from cp_fast.api.plan import Plan
from cp_fast.kernels.attention.choose_backend import BACKENDS, features_of
from cp_fast.runtime.handles import hide_from_checkpointing
from cp_ref.batches.tensors import bytes_of
from cp_ref.calls.scores import ScoreTensors, read_scores
from cp_ref.schedules.words import Unsupported

__all__ = [
    "agreed_kinds",
    "can_travel",
    "checked_scores",
    "is_empty",
    "kinds_and_digests",
    "known_scores",
    "note_checked",
    "packed_scores",
    "scores_key",
    "seed_on_host",
    "unpacked_scores",
]


def checked_scores(plan: Plan, given: ScoreTensors, q: torch.Tensor) -> ScoreTensors | None:
    """The inputs of a planned call's scores, in addition to q and k; None where the scores depend on q and k alone.

    Raises:
        ValueError, TypeError: naming the argument, its value and the rule. Unsupported: the plan's kernel library lacks
        a feature.
    """
    if is_empty(given) and plan.problem.position_free_scores:
        return None
    if (known := known_scores(plan, given, q)) is not None:
        return known
    found = read_scores(plan.problem, plan.score_mod, q, given, plan.room)
    if missing := found.features - plan.backend.features:
        able = " or ".join(f"backend={b.name!r}" for b in BACKENDS if missing <= features_of(b))
        hint = f"make the plan with a ContextParallel of {able}"
        raise Unsupported("this call", {f"the plan's backend {plan.backend.name!r}": missing}, hint)
    if not found.features:
        return None
    plan.backend.check_score_inputs(plan.problem.scores, found)
    note_checked(plan, given, found, q)
    return found


def note_checked(plan: Plan, given: ScoreTensors, found: ScoreTensors, q: torch.Tensor) -> None:
    """Note with the plan that these are checked."""
    if can_travel(given):
        plan.batch.calls.scores.find(scores_key(given, q.device), lambda: tuple(found.aux_tensors))


def known_scores(plan: Plan, given: ScoreTensors, q: torch.Tensor) -> ScoreTensors | None:
    """The checked inputs of scores, if one of the plan's last calls had equal kinds of arguments. Then their checks
    have been made, and score_mod was tried. None for a new kind, and for a call without such inputs.
    """
    if (names := plan.batch.calls.scores.get(scores_key(given, q.device))) is None:
        return None
    with hide_from_checkpointing():
        seed = _seed(given, q.device)
    aux = {name: given.aux_tensors[name] for name in names}
    return given.for_kernels(plan.problem, plan.score_mod, aux, seed)


def _seed(given: ScoreTensors, device: torch.device | None) -> torch.Tensor | None:
    """The seed as a tensor []. A fill, which waits for nothing."""
    seed: Any = given.dropout_seed
    if isinstance(seed, torch.Tensor):
        return seed.reshape(())
    return torch.full((), seed, dtype=torch.int64, device=device) if isinstance(seed, int) else seed


def is_empty(given: ScoreTensors) -> bool:
    """Whether the call has none of them. An operator of torch.library gets them as other objects: only their values
    count.
    """
    slopes, _, aux, _, seed = given
    return slopes is None and seed is None and (aux is None or (isinstance(aux, Mapping) and not aux))


def scores_key(given: ScoreTensors, device: torch.device) -> tuple[object, ...]:
    """All that their checks for tensors on a device read; if it cannot be compared, unlike any other."""
    if is_empty(given):
        return ()
    if not can_travel(given):
        return (object(),)
    named, seed = given.named, given.dropout_seed
    named.pop("dropout_seed", None)
    kinds = [(type(x), x.dtype, x.shape, x.device, x.requires_grad, x.layout) for x in named.values()]
    more = (seed.dtype, seed.shape, seed.device) if isinstance(seed, torch.Tensor) else ()
    return device, *named, *kinds, type(seed), *more


def agreed_kinds(given: ScoreTensors) -> tuple[tuple[str, object], ...]:
    """Names, dtypes and shapes, but no value: the ranks agree on these before a new plan. Only of checked ones."""
    found = dict(given.kinds)
    if seed_on_host(given):  # every step has another
        del found["dropout_seed"]
    return tuple(sorted(found.items()))


def seed_on_host(given: ScoreTensors) -> tuple[tuple[str, object], ...]:
    """The seed, if the host knows it."""
    seed: Any = given.dropout_seed
    return (("dropout_seed", seed),) if isinstance(seed, int) else ()


def kinds_and_digests(given: ScoreTensors) -> tuple[tuple[str, object], ...]:
    """Kinds, with digests of all values, which the host reads: the ranks agree on these before a checked call."""
    if not can_travel(given):
        return ()  # their check says what is wrong
    digests = {f"values of {name}": _digest(x) for name, x in given.named.items() if isinstance(x, torch.Tensor)}
    return *given.kinds, *sorted(digests.items())


def can_travel(given: ScoreTensors) -> bool:
    """Whether they are tensors with names, which need no look at their types: operators of torch.library take these."""
    slopes, _, aux, _, seed = given
    named: Any = {} if aux is None else aux
    return (
        isinstance(named, dict)
        and all(isinstance(name, str) and " " not in name for name in named)
        and all(x is None or _has_shape(x) for x in (slopes, *named.values()))
        and (seed is None or _has_shape(seed) or (type(seed) is int and -(2**63) <= seed < 2**63))
    )


def packed_scores(given: ScoreTensors | None, device: torch.device | None = None) -> tuple[list[torch.Tensor], str]:
    """The tensors, and their names, for an operator of torch.library."""
    if given is None:
        return [], ""
    named = given._replace(dropout_seed=_seed(given, device)).named
    return list(named.values()), " ".join(named)


def unpacked_scores(tensors: list[torch.Tensor], names: str) -> ScoreTensors:
    """The inverse of `packed_scores`.

    >>> tensors, names = packed_scores(ScoreTensors(aux_tensors={"table": torch.ones(2)}, dropout_seed=5))
    >>> names, unpacked_scores(tensors, names).aux_tensors
    ('aux_tensors.table dropout_seed', {'table': tensor([1., 1.])})
    """
    return ScoreTensors.of_named(dict(zip(names.split(" "), tensors, strict=False)))


def _has_shape(x: Any) -> bool:
    """Whether it is a tensor with a shape, which nested tensors lack."""
    return isinstance(x, torch.Tensor) and not x.is_nested


def _digest(x: torch.Tensor) -> str:
    """A tensor's values, in a word."""
    return blake2b(bytes_of(x), digest_size=8).hexdigest()
