"""The table of the arguments that say what attention is: `attention`, `make_plan`, `supports` and `dense_attention`
have them from here.

A row is a name, a type and an `Argument`: default, reader, feature. Four things are made from the rows: the signatures
(`takes`), the arguments of a `Problem` (`read_problem`), those of a call with a plan (`check_settled`), and the
features of a call. The docstring of `attention` explains each argument. So a new argument of a problem is a row, a
field of `Problem`, an entry there, and its use where scores are computed.

The types are text, since nothing here imports torch. The rows are read when this file is imported;
`from __future__ import annotations` would prevent that.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict, TypeVar, cast

from cp_ref.schedules.values import read_choice, read_dropout, read_number, read_window
from cp_ref.schedules.words import MASKS, QKV_FORMATS, SOFTMAX_TYPES, Feature

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from cp_ref.calls.score_mod import ScoreMod
    from cp_ref.schedules.words import AttnMaskType, QKVFormat, SoftmaxType

__all__ = [
    "ARGUMENTS",
    "NONE_OF",
    "OF_PLACES",
    "SCORE_OPTIONS",
    "Argument",
    "CallArguments",
    "ProblemArguments",
    "features_of",
    "problem_arguments",
    "takes",
]

F = TypeVar("F", bound=Callable[..., Any])
Reader = Callable[[str, Any], Any]  # of an argument's name and value: checks it, and gives what a `Problem` has


class Argument(NamedTuple):
    """The rest of a row, after the name and the type.

    Attributes:
        default: the value of a call that does not give it.
        read: None for a tensor, which is read with others.
        feature: the feature that a call with another value asks for.
        of_scores: whether it is an option of scores.
        of_places: whether scores then depend on places of pairs, so that every pair has to be of one document.
        after: of a tensor that belongs to a call: the row that it follows in signatures.
    """

    default: Any = None
    read: Reader | None = None
    feature: Feature | None = None
    of_scores: bool = False
    of_places: bool = False
    after: str = ""


def _or_none(read: Reader) -> Reader:
    return lambda name, value: None if value is None else read(name, value)


def _window(_: str, value: Any) -> Any:
    return read_window(value)


def _digest(_: str, value: Any) -> Any:
    """The digest that `with_digest` has put in the function's place."""
    return value or ""


class ProblemArguments(TypedDict, total=False):
    """The arguments that make a problem, of which every function with such arguments reads its own."""

    qkv_format: Annotated["QKVFormat", Argument("bshd", partial(read_choice, choices=QKV_FORMATS))]
    attn_mask_type: Annotated["AttnMaskType | None", Argument(None, _or_none(partial(read_choice, choices=MASKS)))]
    window_size: Annotated["tuple[int, int]", Argument((-1, -1), _window, Feature.WINDOW)]
    areas: Annotated["torch.Tensor | None", Argument(feature=Feature.AREAS)]
    cu_seqlens_q: Annotated["torch.Tensor | None", Argument()]
    cu_seqlens_kv: Annotated["torch.Tensor | None", Argument()]
    cu_seqlens_q_padded: Annotated["torch.Tensor | None", Argument()]
    cu_seqlens_kv_padded: Annotated["torch.Tensor | None", Argument()]
    softmax_scale: Annotated[
        "float | None", Argument(None, _or_none(partial(read_number, positive=True)), of_scores=True)
    ]
    softcap: Annotated["float", Argument(0.0, partial(read_number, positive=False), Feature.SOFTCAP, of_scores=True)]
    softmax_type: Annotated[
        "SoftmaxType", Argument("vanilla", partial(read_choice, choices=SOFTMAX_TYPES), of_scores=True)
    ]
    score_mod: Annotated["ScoreMod | None", Argument(None, _digest, Feature.SCORE_MOD, of_scores=True, of_places=True)]
    dropout_p: Annotated["float", Argument(0.0, read_dropout, Feature.DROPOUT, of_scores=True, of_places=True)]


class CallArguments(ProblemArguments, total=False):
    """And the tensors that a call gives to the scores of its problem."""

    softmax_offset: Annotated["torch.Tensor | None", Argument(after="softmax_type")]
    alibi_slopes: Annotated["torch.Tensor | None", Argument(feature=Feature.ALIBI, after="softmax_offset")]
    aux_tensors: Annotated["Mapping[str, torch.Tensor] | None", Argument(after="score_mod")]
    dropout_seed: Annotated["int | torch.Tensor | None", Argument(after="dropout_p")]


def _rows(table: Any) -> dict[str, tuple[str, Argument]]:
    """The type and the record of each argument, in the order of signatures."""
    written, order = table.__annotations__, list[str]()
    for name, row in written.items():
        (one,) = row.__metadata__
        order.insert(order.index(one.after) + 1 if one.after else len(order), name)
    return {name: (written[name].__origin__.__forward_arg__, *written[name].__metadata__) for name in order}


def takes(table: Any) -> Callable[[F], F]:
    """A decorator of a function that takes the rows of a table as `**arguments`: its signature names them, before the
    first parameter with a default.

    >>> class Sizes(TypedDict, total=False):
    ...     rows: Annotated["int", Argument(1)]
    >>> @takes(Sizes)
    ... def made(x: int, *, device: str = "cpu", **sizes: Any) -> None: ...
    >>> str(inspect.signature(made))
    "(x: int, *, rows: 'int' = 1, device: str = 'cpu') -> None"
    """

    def decorate(function: F) -> F:
        signature, kind = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
        *parameters, _ = signature.parameters.values()
        place = next((n for n, p in enumerate(parameters) if p.default is not p.empty), len(parameters))
        parameters[place:place] = [
            inspect.Parameter(name, kind, default=one.default, annotation=words)
            for name, (words, one) in _rows(table).items()
        ]
        cast(Any, function).__signature__ = signature.replace(parameters=parameters)
        return function

    return decorate


ARGUMENTS = {name: one for name, (_, one) in _rows(ProblemArguments).items()}
SCORE_OPTIONS = {name: one.read for name, one in ARGUMENTS.items() if one.of_scores and one.read is not None}
NONE_OF = {name: one.read(name, one.default) for name, one in ARGUMENTS.items() if one.read is not None}
"""The value that a `Problem` has for an argument that is not given."""

OF_PLACES = {name: NONE_OF[name] for name, one in ARGUMENTS.items() if one.of_places}
_DEFAULTS = {name: one.default for name, one in ARGUMENTS.items()}
_FEATURES = [(name, one.feature, NONE_OF.get(name)) for name, (_, one) in _rows(CallArguments).items() if one.feature]


def features_of(record: Any) -> frozenset[Feature]:
    """The features that a problem, its scores or the tensors of a call ask for: those of the rows among its fields that
    do not have their defaults.

    >>> from cp_ref.schedules.problem import ScoreSpec
    >>> features_of(ScoreSpec(0.5, softcap=30.0))
    frozenset({<Feature.SOFTCAP: 'softcap'>})
    """
    given = ((feature, getattr(record, name, None), none) for name, feature, none in _FEATURES)
    return frozenset(feature for feature, x, none in given if x is not None and (none is None or x != none))


def problem_arguments(given: dict[str, Any], of: str = "attention") -> dict[str, Any]:
    """The arguments of a function that make the problem, with defaults.

    Raises:
        TypeError: one that it does not have.

    >>> problem_arguments({"softmax_scale": 1.0})["window_size"]
    (-1, -1)
    """
    for name in given:
        if name not in _DEFAULTS:
            raise TypeError(f"{of}() got an unexpected keyword argument {name!r}")
    return {**_DEFAULTS, **given}
