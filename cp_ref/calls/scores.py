"""Scores that know where they are: ALiBi, score_mod and dropout. One definition for the oracle, for both packages and
for `conformance`.

The order of operations on a pair, query i and key j of one sequence:

    s = scale * q.k            softcap
    s = s + ALiBi              `alibi`
    s = score_mod(s, ...)      `score_mod`
    mask, softmax (sinks included)
    p = p * keep / (1 - dropout_p)      `philox`
    out = p v

i and j are slots of the sequence, h is the global query head, b the sequence's number in the batch. So no
score depends on the rank, the schedule or the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from cp_ref.batches.tensors import recording
from cp_ref.calls.score_mod import ScoreMod, check_result, modified_scores, parameters_of
from cp_ref.problems.arguments import ARGUMENTS, features_of
from cp_ref.problems.read_problem import check_one_document
from cp_ref.problems.room import Room
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import check_dtype, check_one_device, check_tensor, kind_of
from cp_ref.schedules.words import Feature, Unsupported

__all__ = [
    "NOT_GIVEN",
    "OF_A_CALL",
    "PLAIN",
    "ROUNDS",
    "PairScores",
    "ScorePlaces",
    "ScoreTensors",
    "alibi_bias",
    "kept_by_dropout",
    "philox4x32",
    "read_scores",
    "threshold",
]

# ---- the inputs of scores besides q and k: one record, from a call's arguments to the kernels


_NO_TENSORS: Mapping[str, torch.Tensor] = MappingProxyType({})
_AUX = "aux_tensors."  # in front of the names of aux tensors


class ScoreTensors(NamedTuple):
    """The inputs of a call's scores besides q and k; without any, scores depend on q and k alone.

    `attention` makes one of its arguments, in which nothing is checked, and which has no score_mod and no dropout_p:
    those belong to the problem. `read_scores` makes the one that kernels get.

    >>> ScoreTensors().features, ScoreTensors(dropout_p=0.5, dropout_seed=torch.tensor(3)).features
    (frozenset(), frozenset({<Feature.DROPOUT: 'dropout'>}))
    """

    alibi_slopes: torch.Tensor | None = None  # float32 [h_q], or [b, h_q] with a row for each sequence
    score_mod: ScoreMod | None = None
    aux_tensors: Mapping[str, torch.Tensor] = _NO_TENSORS  # those that score_mod takes by name
    dropout_p: float = 0.0
    dropout_seed: torch.Tensor | None = None  # int64 []

    @staticmethod
    def given(arguments: dict[str, Any]) -> ScoreTensors:
        """Those among the arguments of a call, which are removed there.

        >>> ScoreTensors.given({"dropout_seed": 3, "softcap": 2.0}).dropout_seed
        3
        """
        return ScoreTensors(**{name: arguments.pop(name, None) for name in OF_A_CALL})

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call again."""
        return {name: getattr(self, name) for name in OF_A_CALL}

    @property
    def features(self) -> frozenset[Feature]:
        """The features that they require; none if they change nothing."""
        return features_of(self)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors, in a fixed order, for the backward pass: see `with_tensors`."""
        return self.alibi_slopes, self.dropout_seed, *self.aux_tensors.values()

    def with_tensors(self, *tensors: torch.Tensor | None) -> ScoreTensors:
        """The same with these tensors, in the order of `tensors`.

        >>> inputs = ScoreTensors(aux_tensors={"table": torch.ones(2)})
        >>> inputs.with_tensors(*inputs.tensors) == inputs
        True
        """
        slopes, seed, *aux = tensors
        named: dict[str, Any] = dict(zip(self.aux_tensors, aux, strict=True))
        return self._replace(alibi_slopes=slopes, dropout_seed=seed, aux_tensors=named or _NO_TENSORS)

    def without_dropout(self) -> ScoreTensors:
        """The same scores; dropout does not change them."""
        return self._replace(dropout_p=0.0, dropout_seed=None)

    def for_kernels(
        self, problem: Problem, score_mod: ScoreMod | None, aux: Mapping[str, torch.Tensor], seed: torch.Tensor | None
    ) -> ScoreTensors:
        """The record of a call as kernels get it: with the problem's own fields."""
        return ScoreTensors(self.alibi_slopes, score_mod, aux, problem.dropout_p, seed)

    def with_folded_heads(self, batch: int) -> ScoreTensors:
        """The same with slopes of the heads of all sequences as heads of one: [h_q] or [b, h_q] -> [b * h_q]."""
        slopes = self.alibi_slopes
        return self if slopes is None else self._replace(alibi_slopes=slopes.expand(batch, -1).flatten())

    @property
    def named(self) -> dict[str, Any]:
        """All that there is, by name: tensors, and a seed that may be a number."""
        aux = {f"{_AUX}{name}": x for name, x in (self.aux_tensors or {}).items()}
        given = {"alibi_slopes": self.alibi_slopes, **aux, "dropout_seed": self.dropout_seed}
        return {name: x for name, x in given.items() if x is not None}

    @staticmethod
    def of_named(named: Mapping[str, Any]) -> ScoreTensors:
        """The inverse of `named`.

        >>> ScoreTensors.of_named({"aux_tensors.table": 1, "dropout_seed": 2})[2:]
        ({'table': 1}, 0.0, 2)
        """
        aux = {name.removeprefix(_AUX): x for name, x in named.items() if name.startswith(_AUX)}
        return ScoreTensors(named.get("alibi_slopes"), None, aux, 0.0, named.get("dropout_seed"))

    @property
    def kinds(self) -> tuple[tuple[str, object], ...]:
        """The values that the ranks agree on, by name: dtypes and shapes, never the values of tensors.

        >>> ScoreTensors(torch.ones(2), aux_tensors={"table": torch.ones(3, 4)}, dropout_seed=7).kinds
        (('alibi_slopes', 'float32[2]'), ('aux_tensors.table', 'float32[3, 4]'), ('dropout_seed', 7))
        """
        return tuple((name, _kind(x)) for name, x in self.named.items())


OF_A_CALL = tuple(name for name in ScoreTensors._fields if name not in ARGUMENTS)  # the others are the problem's
PLAIN = ScoreTensors()
NOT_GIVEN = ScoreTensors.given({})  # of a call without arguments


def _kind(x: Any) -> object:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, torch.Tensor) else x


def read_scores(
    problem: Problem, score_mod: ScoreMod | None, q: torch.Tensor, given: ScoreTensors, room: Room | None = None
) -> ScoreTensors:
    """The inputs of a call, checked: score_mod is tried on a few scores. No value on a GPU is read.

    Args:
        problem: has the digest of score_mod, and dropout_p.
        q: the call's, for its device.
        given: as the caller gave it.
        room: of a plan that is updated in place: then slopes [b, h_q] have a row for each of max_sequences.

    Raises:
        TypeError, ValueError: naming the argument, its value and the rule. Unsupported: a tensor requires a gradient.
        What score_mod raises.
    """
    dropout_seed: Any = given.dropout_seed
    if given.alibi_slopes is not None:
        _check_slopes(problem, given.alibi_slopes, q, room)
    aux = _read_aux_tensors(score_mod, given.aux_tensors, q)
    if score_mod is not None and (places := _some_places(problem, q.device)):
        rows = places[0].shape[0]
        scores = torch.linspace(-1.0, 3.0, 4 * rows, device=q.device).view(rows, 2, 2)
        check_result(score_mod, places, aux, scores)
    if (dropout_seed is None) != (problem.dropout_p == 0):
        found = "is None" if dropout_seed is None else "is given"
        raise ValueError(f"dropout_seed {found}, but dropout_p is {problem.dropout_p}; they belong together")
    return given.for_kernels(problem, score_mod, aux, _read_seed(dropout_seed, q))


def _some_places(problem: Problem, device: torch.device) -> list[torch.Tensor]:
    """b, h, q_idx and kv_idx of some pairs, int32 tensors that broadcast to [rows, 2, 2]: of the first and last heads,
    queries and keys of every sequence. On a GPU of a sequence's first pair alone, as no value may travel there.
    Nothing if no sequence has a pair.
    """
    lengths = enumerate(zip(problem.lengths.len_q, problem.lengths.len_kv, strict=True))
    there = ((number, len_q - 1, len_kv - 1) for number, (len_q, len_kv) in lengths if len_q and len_kv)
    sequences = list(there) if device.type == "cpu" else [*islice(there, 1)]
    if not sequences:
        return []
    if device.type != "cpu":
        shapes, values = ((2, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)), (sequences[0][0], 0, 0, 0)
        return [torch.full(x, n, dtype=torch.int32, device=device) for x, n in zip(shapes, values, strict=True)]
    b = [n for n, *_ in sequences for _ in range(2)]
    h = [0, problem.heads_q - 1]
    i = [row for _, last, _ in sequences for row in (0, last)]
    j = [[0, last] for *_, last in sequences for _ in range(2)]
    shaped = ((b, (-1, 1, 1)), (h, (1, -1, 1)), (i, (-1, 1, 1)), (j, (-1, 1, 2)))
    return [torch.tensor(values, dtype=torch.int32, device=device).view(shape) for values, shape in shaped]


def _check_slopes(problem: Problem, slopes: Any, q: torch.Tensor, room: Room | None) -> None:
    _check_tensor("alibi_slopes", slopes, q)
    sequences = len(problem.lengths) if room is None else room.max_sequences
    if tuple(slopes.shape) not in ((problem.heads_q,), (sequences, problem.heads_q)):
        raise ValueError(
            f"alibi_slopes has shape {list(slopes.shape)}; it must be [h_q] = [{problem.heads_q}] or [b, h_q] = "
            f"[{sequences}, {problem.heads_q}]"
        )
    check_dtype("alibi_slopes", slopes, "float32")
    check_one_document(problem, "alibi_slopes")


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
    check_tensor(name, x)
    if hasattr(x, "placements"):
        raise TypeError(f"{name} is a DTensor; give a plain tensor, the same on all ranks")
    if x.requires_grad:
        raise Unsupported(f"{name} that requires a gradient", {}, f"no gradient flows to it; give {name}.detach()")
    check_one_device(name, x, "q", q)


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "no tensors"


# ---- what becomes of scores


def alibi_bias(
    slopes: torch.Tensor,
    sequence: torch.Tensor,
    head: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    shift: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The addition of ALiBi to scores: -slope * |i + shift - j|.

    Args:
        slopes: float32 [h_q], or [b, h_q] with a row for each sequence.
        sequence, head, q_idx, kv_idx: int32 or int64 tensors that broadcast against a block of scores.
        shift: len_kv - len_q of the sequence, in real tokens.
        dtype: of the scores.

    Returns:
        dtype, of the broadcast shape.

    >>> i, j, zero = torch.arange(2)[:, None], torch.arange(3), torch.zeros((), dtype=torch.int64)
    >>> alibi_bias(torch.tensor([0.5]), zero, zero, i, j, torch.tensor(1), torch.float32).tolist()
    [[-0.5, -0.0, -0.5], [-1.0, -0.5, -0.0]]
    """
    slope = slopes[head.long()] if slopes.dim() == 1 else slopes[sequence.long(), head.long()]
    return -slope.to(dtype) * (q_idx + shift - kv_idx).abs().to(dtype)


ROUNDS = 7
_LOW = 0xFFFFFFFF
_FACTORS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key after each round

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor], rounds: int = ROUNDS) -> Words:
    """The four random words of a counter under a key.

    Args:
        counter, key: int64 tensors that broadcast, each value of 32 bits, from 0 to 2**32 - 1.
        rounds: 7 here; 10 is the generator of most libraries.

    Returns:
        Four int64 tensors of the same kind.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox4x32((zero, zero, zero, zero), (zero, zero))]  # Random123's known answer
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        high0, low0 = _product(c0, _FACTORS[0])
        high1, low1 = _product(c2, _FACTORS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def kept_by_dropout(
    sequence: torch.Tensor,
    head: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    seed: torch.Tensor,
    dropout_p: float,
) -> torch.Tensor:
    """Which pairs dropout keeps.

    Args:
        sequence, head, q_idx, kv_idx: int32 or int64 tensors that broadcast against a block of scores.
        seed: int64, one element; its 64 bits are the key.
        dropout_p: the probability of dropping a pair.

    Returns:
        bool, of the broadcast shape.

    >>> zero = torch.zeros(1, dtype=torch.int32)  # keys 0 and 8 have the first two words of the example above
    >>> kept_by_dropout(zero, zero, zero, torch.tensor([0, 8]), torch.tensor(0), 0.3).int().tolist()
    [1, 0]
    """
    b, h, i, j = (x.long() for x in (sequence, head, q_idx, kv_idx))
    seed = seed.reshape(())
    counter = (j >> 4) * 8 + (j & 7), (i >> 4) * 8 + (i & 7), h, b
    first, second, third, fourth = philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW))
    high_i, high_j = (i & 8) != 0, (j & 8) != 0
    word = torch.where(high_i, torch.where(high_j, fourth, third), torch.where(high_j, second, first))
    return word >= threshold(dropout_p)


def threshold(dropout_p: float) -> int:
    """The least word that is kept.

    >>> threshold(0.25) == 2**30
    True
    """
    return round(dropout_p * 2**32)


def _product(a: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of a product. int64 wraps at 2**64, so all 64 bits are there."""
    product = a * factor
    return (product >> 32) & _LOW, product & _LOW


class ScorePlaces(NamedTuple):
    """Where the pairs of a block of scores are: int32 tensors that broadcast against the block.

    kv_idx varies along the last axis alone, and the others do not vary there.
    """

    sequence: torch.Tensor  # its number in the batch
    head: torch.Tensor  # global query head
    q_idx: torch.Tensor  # slot of the query in the sequence
    kv_idx: torch.Tensor  # slot of the key in the sequence
    shift: torch.Tensor  # len_kv - len_q of the sequence


class PairScores(NamedTuple):
    """The inputs of a call's scores, and the pairs of one block.

    >>> i, j, zero = torch.arange(2)[:, None], torch.arange(2), torch.zeros((), dtype=torch.int32)
    >>> def squared(score, b, h, q_idx, kv_idx):
    ...     return score**2
    >>> block = PairScores(ScoreTensors(score_mod=squared), ScorePlaces(zero, zero, i, j, zero))
    >>> block.modified(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[1.0, 4.0], [9.0, 16.0]]
    >>> block.pulled_back(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2, 2)).tolist()
    [[2.0, 4.0], [6.0, 8.0]]
    """

    inputs: ScoreTensors
    pairs: ScorePlaces

    def modified(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores after the softcap -> scores before the mask."""
        scores = self._with_alibi(scores)
        if self.inputs.score_mod is None:
            return scores
        return modified_scores(self.inputs.score_mod, scores, self.pairs[:4], self.inputs.aux_tensors).to(scores.dtype)

    def pulled_back(self, scores: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of `modified(scores)` -> that of the scores: by autograd of score_mod, computed again. The
        caller hides masked pairs afterwards, whose derivative may be NaN.
        """
        if self.inputs.score_mod is None:
            return grad
        with torch.enable_grad(), recording():
            leaf = scores.detach().requires_grad_()
            result = self.modified(leaf)
            if not result.requires_grad:  # it does not depend on the scores
                return torch.zeros_like(grad)
            return torch.autograd.grad(result, leaf, grad, materialize_grads=True)[0]

    def dropout(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The factors of the probabilities, 0 or 1 / (1 - dropout_p); None without dropout."""
        inputs = self.inputs
        if inputs.dropout_p == 0 or inputs.dropout_seed is None:
            return None
        kept = kept_by_dropout(*self.pairs[:4], inputs.dropout_seed, inputs.dropout_p)
        return kept.to(dtype) / (1 - inputs.dropout_p)

    def _with_alibi(self, scores: torch.Tensor) -> torch.Tensor:
        slopes = self.inputs.alibi_slopes
        return scores if slopes is None else scores + alibi_bias(slopes, *self.pairs, scores.dtype)
