"""The inputs of scores besides q and k, as one record from a call to the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from cp_ref.contract.read_problem import check_one_document
from cp_ref.contract.room import Room
from cp_ref.contract.score_mod import ScoreMod, check_result, parameters_of
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import check_data, kind_of
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "PLAIN",
    "ScoreInputs",
    "kinds",
    "read_score_inputs",
]

_NO_TENSORS: Mapping[str, torch.Tensor] = MappingProxyType({})


class ScoreInputs(NamedTuple):
    """The inputs of scores; without any, scores depend on q and k alone.

    >>> ScoreInputs().features, ScoreInputs(dropout_p=0.5, dropout_seed=torch.tensor(3)).features
    (frozenset(), frozenset({<Feature.DROPOUT: 'dropout'>}))
    """

    alibi_slopes: torch.Tensor | None = None  # float32 [h_q], or [b, h_q] with a row for each document
    score_mod: ScoreMod | None = None
    aux_tensors: Mapping[str, torch.Tensor] = _NO_TENSORS  # those that score_mod takes by name
    dropout_p: float = 0.0
    dropout_seed: torch.Tensor | None = None  # int64 []

    @property
    def features(self) -> frozenset[Feature]:
        """The features that they require; none if they change nothing."""
        asked = {
            Feature.ALIBI: self.alibi_slopes is not None,
            Feature.SCORE_MOD: self.score_mod is not None,
            Feature.DROPOUT: self.dropout_p > 0,
        }
        return frozenset(feature for feature, wanted in asked.items() if wanted)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors, in a fixed order, for the backward pass: see `with_tensors`."""
        return self.alibi_slopes, self.dropout_seed, *self.aux_tensors.values()

    def with_tensors(self, *tensors: torch.Tensor | None) -> ScoreInputs:
        """The same with these tensors, in the order of `tensors`.

        >>> inputs = ScoreInputs(aux_tensors={"table": torch.ones(2)})
        >>> inputs.with_tensors(*inputs.tensors) == inputs
        True
        """
        slopes, seed, *aux = tensors
        named: dict[str, Any] = dict(zip(self.aux_tensors, aux, strict=True))
        return self._replace(alibi_slopes=slopes, dropout_seed=seed, aux_tensors=named or _NO_TENSORS)

    def without_dropout(self) -> ScoreInputs:
        """The same scores; dropout does not change them."""
        return self._replace(dropout_p=0.0, dropout_seed=None)


PLAIN = ScoreInputs()


def kinds(alibi_slopes: Any, aux_tensors: Any, dropout_seed: Any) -> tuple[tuple[str, object], ...]:
    """What the ranks agree on of a call's arguments, by name: dtypes and shapes, never the values of tensors.

    >>> kinds(torch.ones(2), {"table": torch.ones(3, 4)}, 7)
    (('alibi_slopes', 'float32[2]'), ('aux_tensors.table', 'float32[3, 4]'), ('dropout_seed', 7))
    """
    aux = {f"aux_tensors.{name}": x for name, x in cast("Mapping[str, Any]", aux_tensors or {}).items()}
    given = {"alibi_slopes": alibi_slopes, **aux, "dropout_seed": dropout_seed}
    return tuple((name, _kind(x)) for name, x in given.items() if x is not None)


def _kind(x: Any) -> object:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, torch.Tensor) else x


def read_score_inputs(
    problem: Problem,
    score_mod: ScoreMod | None,
    q: torch.Tensor,
    *,
    alibi_slopes: Any,
    aux_tensors: Any,
    dropout_seed: Any,
    room: Room | None = None,
) -> ScoreInputs:
    """The inputs of a call, checked: score_mod is tried on a few scores. No value on a GPU is read.

    Args:
        problem: has the digest of score_mod, and dropout_p.
        q: the call's, for its device.
        room: of a plan that is updated in place: then slopes [b, h_q] have a row for each of max_sequences.

    Raises:
        TypeError, ValueError: naming the argument, its value and the rule. Unsupported: a tensor requires a gradient.
        What score_mod raises.
    """
    slopes = _read_slopes(problem, alibi_slopes, q, room)
    if slopes is not None:
        check_one_document(problem, "alibi_slopes")
    aux = _read_aux_tensors(score_mod, aux_tensors, q)
    if score_mod is not None and (places := _some_places(problem, q.device)):
        rows = places[0].shape[0]
        scores = torch.linspace(-1.0, 3.0, 4 * rows, device=q.device).view(rows, 2, 2)
        check_result(score_mod, places, aux, scores)
    if (dropout_seed is None) != (problem.dropout_p == 0):
        given = "is None" if dropout_seed is None else "is given"
        raise ValueError(f"dropout_seed {given}, but dropout_p is {problem.dropout_p}; they belong together")
    return ScoreInputs(slopes, score_mod, aux, problem.dropout_p, _read_seed(dropout_seed, q))


def _some_places(problem: Problem, device: torch.device) -> list[torch.Tensor]:
    """b, h, q_idx and kv_idx of some pairs, int32 tensors that broadcast to [rows, 2, 2]: of the first and last heads,
    queries and keys of every document. On a GPU of a document's first pair alone, as no value may travel there.
    Nothing if no document has a pair.
    """
    lengths = enumerate(zip(problem.lengths.len_q, problem.lengths.len_kv, strict=True))
    there = ((number, len_q - 1, len_kv - 1) for number, (len_q, len_kv) in lengths if len_q and len_kv)
    documents = list(there) if device.type == "cpu" else [*islice(there, 1)]
    if not documents:
        return []
    if device.type != "cpu":
        shapes, values = ((2, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)), (documents[0][0], 0, 0, 0)
        return [torch.full(x, n, dtype=torch.int32, device=device) for x, n in zip(shapes, values, strict=True)]
    b = [n for n, *_ in documents for _ in range(2)]
    h = [0, problem.heads_q - 1]
    i = [row for _, last, _ in documents for row in (0, last)]
    j = [[0, last] for *_, last in documents for _ in range(2)]
    shaped = ((b, (-1, 1, 1)), (h, (1, -1, 1)), (i, (-1, 1, 1)), (j, (-1, 1, 2)))
    return [torch.tensor(values, dtype=torch.int32, device=device).view(shape) for values, shape in shaped]


def _read_slopes(problem: Problem, slopes: Any, q: torch.Tensor, room: Room | None) -> torch.Tensor | None:
    if slopes is None:
        return None
    _check_tensor("alibi_slopes", slopes, q)
    documents = len(problem.lengths) if room is None else room.max_sequences
    if tuple(slopes.shape) not in ((problem.heads_q,), (documents, problem.heads_q)):
        raise ValueError(
            f"alibi_slopes has shape {list(slopes.shape)}; it must be [h_q] = [{problem.heads_q}] or [b, h_q] = "
            f"[{documents}, {problem.heads_q}]"
        )
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes has dtype {slopes.dtype}; it must be float32")
    return slopes


def _read_aux_tensors(score_mod: ScoreMod | None, given: Any, q: torch.Tensor) -> Mapping[str, torch.Tensor]:
    if not isinstance(given, Mapping | None):
        raise TypeError(f"aux_tensors is {kind_of(given)}; it must be a dict of tensors by name, or None")
    aux = dict(cast("Mapping[Any, Any]", given or {}))
    if score_mod is None:
        if aux:
            raise ValueError(f"aux_tensors has {_listed(aux)}, but there is no score_mod to take them")
        return _NO_TENSORS
    wanted = parameters_of(score_mod)
    missing = [name for name, needed in wanted.items() if needed and name not in aux]
    unknown = [name for name in aux if name not in wanted]
    if missing or unknown:
        raise ValueError(
            f"aux_tensors has {_listed(aux)}; score_mod {score_mod.__qualname__} takes {_listed(wanted)} by name"
        )
    for name, x in aux.items():
        _check_tensor(f"aux_tensors[{name!r}]", x, q)
    return {name: aux[name] for name in wanted if name in aux} or _NO_TENSORS


def _read_seed(seed: Any, q: torch.Tensor) -> torch.Tensor | None:
    if seed is None:
        return None
    if not isinstance(seed, bool) and isinstance(seed, Integral):
        seed = int(seed)
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"dropout_seed is {seed}; it must be from -2**63 to 2**63 - 1")
        return torch.full((), seed, dtype=torch.int64, device=q.device)  # a fill, which waits for nothing
    if not isinstance(seed, torch.Tensor):
        raise TypeError(f"dropout_seed is {kind_of(seed)}; it must be an int, or an int64 tensor of one element")
    _check_tensor("dropout_seed", seed, q)
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise ValueError(
            f"dropout_seed is a tensor {list(seed.shape)} of {seed.dtype}; it must be an int64 tensor of one element"
        )
    return seed.reshape(())


def _check_tensor(name: str, x: Any, q: torch.Tensor) -> None:
    """A plain tensor on q's device that no gradient is asked of."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {kind_of(x)}; it must be a tensor")
    if hasattr(x, "placements"):
        raise TypeError(f"{name} is a DTensor; give a plain tensor, the same on all ranks")
    check_data(name, x)
    if x.requires_grad:
        raise Unsupported(f"{name} that requires a gradient", {}, f"no gradient flows to it; give {name}.detach()")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q is on {q.device}; they must be on one device")


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "no tensors"
