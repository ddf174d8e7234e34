"""The tensors that a call gives for scores which depend on places: alibi_slopes, aux_tensors, dropout_seed."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from cp_fast.api.plan import Plan
from cp_fast.backends import BACKENDS, features_of
from cp_fast.dispatch.selective_checkpointing import unseen
from cp_ref.contract.score_inputs import ScoreInputs, kinds, read_score_inputs
from cp_ref.schedules.words import Feature, Unsupported

__all__ = ["ScoreArguments"]

_AUX = "aux."  # In front of the names of aux tensors.


class ScoreArguments(NamedTuple):
    """These arguments of `attention`, as the caller gave them. Nothing in them has been checked."""

    alibi_slopes: Any = None
    aux_tensors: Any = None
    dropout_seed: Any = None

    @staticmethod
    def taken_from(arguments: dict[str, Any]) -> ScoreArguments:
        """Those among the arguments of a call, which are removed there.

        >>> ScoreArguments.taken_from({"dropout_seed": 3, "softcap": 2.0}).dropout_seed
        3
        """
        return ScoreArguments(*(arguments.pop(name, None) for name in ScoreArguments._fields))

    @staticmethod
    def of_inputs(inputs: ScoreInputs | None) -> ScoreArguments:
        """Those that checked inputs were read from."""
        if inputs is None:
            return ScoreArguments()
        return ScoreArguments(inputs.alibi_slopes, dict(inputs.aux_tensors), inputs.dropout_seed)

    def read(self, plan: Plan, q: torch.Tensor) -> ScoreInputs | None:
        """The inputs of a call's scores with a plan; None where scores depend on q and k alone.

        Raises:
            ValueError, TypeError: naming the argument, its value and the rule. Unsupported: the plan's kernel library
            lacks alibi_slopes.
        """
        if self.empty and plan.problem.position_free_scores:
            return None
        if (known := self.known(plan, q)) is not None:
            return known
        inputs = read_score_inputs(plan.problem, plan.score_mod, q, room=plan.room, **self._asdict())
        if missing := inputs.features - plan.backend.features:
            able = " or ".join(f"backend={b.name!r}" for b in BACKENDS if missing <= features_of(b))
            hint = f"make the plan with a ContextParallel of {able}"
            raise Unsupported("this call", {f"the plan's backend {plan.backend.name!r}": missing}, hint)
        if not inputs.features:
            return None
        plan.backend.check_score_inputs(plan.problem.scores, inputs)
        if self.travel:
            plan.scores.find(self.signature(q.device), lambda: tuple(inputs.aux_tensors))
        return inputs

    def known(self, plan: Plan, q: torch.Tensor) -> ScoreInputs | None:
        """The inputs, if the plan's last calls had equal kinds of arguments: then their checks are made, and score_mod
        was tried. None if not, or if there are none.
        """
        if (names := plan.scores.get(self.signature(q.device))) is None:
            return None
        aux, seed = {name: self.aux_tensors[name] for name in names}, self.dropout_seed
        with unseen():
            seed = seed.reshape(()) if isinstance(seed, torch.Tensor) else self._seed(q.device)
        return ScoreInputs(self.alibi_slopes, plan.score_mod, aux, plan.problem.dropout_p, seed)

    def _seed(self, device: torch.device | None) -> torch.Tensor | None:
        """The seed as a tensor. A fill, which waits for nothing."""
        seed = self.dropout_seed
        return torch.full((), seed, dtype=torch.int64, device=device) if isinstance(seed, int) else seed

    @property
    def empty(self) -> bool:
        """Whether the call has none of them. An operator of torch.library gets them as other objects: only their values
        count.

        >>> ScoreArguments(aux_tensors={}).empty, ScoreArguments(dropout_seed=0).empty
        (True, False)
        """
        slopes, aux, seed = self
        return slopes is None and seed is None and (aux is None or (type(aux) is dict and not aux))

    @property
    def features(self) -> frozenset[Feature]:
        """The features that no plan knows of."""
        return frozenset() if self.alibi_slopes is None else frozenset({Feature.ALIBI})

    # ---- for caches, and for other ranks

    def signature(self, device: torch.device) -> tuple[object, ...]:
        """All that their checks for tensors on a device read; if it cannot be compared, unlike any other."""
        if self.empty:
            return ()
        if not self.travel:
            return (object(),)
        tensors, names = self._replace(dropout_seed=None).packed()
        kinds = [(type(x), x.dtype, x.shape, x.device, x.requires_grad, x.layout) for x in tensors]
        seed = self.dropout_seed
        more = (seed.dtype, seed.shape, seed.device) if isinstance(seed, torch.Tensor) else ()
        return device, names, *kinds, type(seed), *more

    def kinds(self) -> tuple[tuple[str, object], ...]:
        """Names, dtypes and shapes, but no value: the ranks agree on these before a new plan. Only of checked ones."""
        found = dict(kinds(**self._asdict()))
        if self.seed:  # Every step has another.
            del found["dropout_seed"]
        return tuple(sorted(found.items()))

    @property
    def seed(self) -> tuple[tuple[str, object], ...]:
        """The seed, if the host knows it."""
        return (("dropout_seed", self.dropout_seed),) if isinstance(self.dropout_seed, int) else ()

    def values(self) -> tuple[tuple[str, object], ...]:
        """The same with digests of all values, which the host reads: the ranks agree on these before a checked call."""
        if not self.travel:
            return ()  # Their check says what is wrong.
        given: dict[str, Any] = {"alibi_slopes": self.alibi_slopes, "dropout_seed": self.dropout_seed}
        given |= {f"aux_tensors.{name}": x for name, x in (self.aux_tensors or {}).items()}
        digests = {f"values of {name}": _digest(x) for name, x in given.items() if isinstance(x, torch.Tensor)}
        return *kinds(**self._asdict()), *sorted(digests.items())

    # ---- for operators of torch.library, which take tensors and text

    @property
    def travel(self) -> bool:
        """Whether they are tensors with names, which need no look at their types."""
        aux, seed = self.aux_tensors, self.dropout_seed
        named = {} if aux is None else aux
        return (
            isinstance(named, dict)
            and all(isinstance(name, str) and " " not in name for name in named)
            and all(x is None or _has_shape(x) for x in (self.alibi_slopes, *named.values()))
            and (seed is None or _has_shape(seed) or (type(seed) is int and -(2**63) <= seed < 2**63))
        )

    def packed(self, device: torch.device | None = None) -> tuple[list[torch.Tensor], str]:
        """The tensors, and their names."""
        named = {"alibi_slopes": self.alibi_slopes, "dropout_seed": self._seed(device)}
        named |= {f"{_AUX}{name}": x for name, x in (self.aux_tensors or {}).items()}
        there = {name: x for name, x in named.items() if x is not None}
        return list(there.values()), " ".join(there)

    @staticmethod
    def unpacked(tensors: list[torch.Tensor], names: str) -> ScoreArguments:
        """The inverse of `packed`.

        >>> tensors, names = ScoreArguments(aux_tensors={"table": torch.ones(2)}, dropout_seed=5).packed()
        >>> names, ScoreArguments.unpacked(tensors, names).aux_tensors
        ('dropout_seed aux.table', {'table': tensor([1., 1.])})
        """
        named = dict(zip(names.split(" "), tensors, strict=False))
        aux = {name.removeprefix(_AUX): x for name, x in named.items() if name.startswith(_AUX)}
        return ScoreArguments(named.get("alibi_slopes"), aux or None, named.get("dropout_seed"))


def _has_shape(x: Any) -> bool:
    """Whether it is a tensor with a shape, which nested tensors lack."""
    return isinstance(x, torch.Tensor) and not x.is_nested


def _digest(x: torch.Tensor) -> str:
    """A tensor's values, in a word."""
    values = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return blake2b(values, digest_size=8).hexdigest()
