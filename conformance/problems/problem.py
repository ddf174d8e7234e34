"""The base of all problems: a text that reads back, and a way to play and judge it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch

from conformance.case import Case, text_of
from conformance.checks.budgets import same_bytes
from conformance.checks.reference import UnsupportedCase, describe_error, is_out_of_memory
from conformance.implementation import Implementation, Missing
from conformance.problems.capabilities import Capabilities
from cp_ref.schedules.problem import Problem
from cp_ref.schedules.values import parse_call

__all__ = [
    "CaseProblem",
    "LevelProblem",
    "NamedProblem",
    "Raised",
    "SuiteProblem",
    "call",
    "in_company",
    "parts_of",
    "shape_findings",
]


class SuiteProblem(Protocol):
    """A problem that the suite plays: one line of text. `conformance.case.Case`, the calls of lower levels and the
    entries of tables are such problems.

    text    `str(problem)`, which a failure prints and `--repro` takes; it begins with `begins`
    parse   reads it back
    draw    a function next to the class: a strategy, or the list of a table
    play    the results of the implementation, on all ranks
    judge   findings: sentences, none when all is well. A `Case` is judged by many tiers, the others by their `check`
    """

    begins: ClassVar[str]

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases of attention in it; none where it has no call of `attention`."""
        ...

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that `str` printed. Raises ValueError on anything else."""
        ...


class LevelProblem:
    """Base of the dataclasses that one level's problems are. A text begins with the class's name.

    Every field has a default; the text has those that differ from it, and `parse` reads it back. All of them have a
    `seed`.
    """

    begins: ClassVar[str]

    def __init_subclass__(cls) -> None:
        """A text begins with the class's name."""
        cls.begins = f"{cls.__name__}("

    def __str__(self) -> str:
        """One line that `parse` reads back."""
        return text_of(self)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that `str` printed. Raises ValueError on anything else."""
        try:
            _, unnamed, values = parse_call(text, [cls.__name__])
            if unnamed:
                raise ValueError("every field has to be named")
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot read a problem of {cls.__name__} from {text!r}: {error}") from error

    @property
    def cases(self) -> tuple[Case, ...]:
        """None: no call of `attention`."""
        return ()

    def inputs(self, device: str) -> dict[str, torch.Tensor]:
        """The tensors of the call, equal for equal problems."""
        raise NotImplementedError

    def play(self, impl: Implementation, inputs: dict[str, torch.Tensor]) -> Any:
        """The implementation's results for these inputs. Raises Raised and UnsupportedCase like `call`."""
        raise NotImplementedError

    def judge(self, inputs: dict[str, torch.Tensor], results: Any) -> list[str]:
        """Findings about the results for these inputs."""
        raise NotImplementedError

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Play and judge; and whether the call changed its inputs."""
        inputs = self.inputs(device)
        kept = {name: x.clone() for name, x in inputs.items()}
        results = self.play(impl, inputs)
        found = self.judge(kept, results)
        found += [f"{name} was changed" for name, x in inputs.items() if not same_bytes(x, kept[name])]
        return found

    def generator(self) -> torch.Generator:
        """The generator of the problem's random values, at its beginning."""
        return torch.Generator().manual_seed(self.seed)  # type: ignore[attr-defined]  # pyright: ignore


def in_company(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Call a layer's function as a model of several layers does: calls of the same plan with other values come before
    it, and between its passes. A plan holds no state of a call.
    """

    def other(x: Any) -> Any:
        of_values = isinstance(x, torch.Tensor) and x.is_floating_point()
        return (x.detach() * 0.5).requires_grad_(x.requires_grad) if of_values else x

    def called(*tensors: Any, **more: Any) -> Any:
        others, of_others = [other(x) for x in tensors], {name: other(x) for name, x in more.items()}
        layer(*others, **of_others)
        found = layer(*tensors, **more)
        layer(*others, **of_others)
        return found

    return called


@dataclass(frozen=True)
class CaseProblem(LevelProblem):
    """Base of the problems that are a case of attention and a few fields more: it has the batch and the values."""

    case: Case

    def __str__(self) -> str:
        """One line that `parse` reads back."""
        return text_of(self, self.case)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that `str` printed. Raises ValueError on anything else."""
        try:
            _, (case,), values = parse_call(text, [cls.__name__])
            return cls(case=Case.parse(str(case)), **values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot read a problem of {cls.__name__} from {text!r}: {error}") from error

    @property
    def problem(self) -> Problem:
        """The batch."""
        return self.case.problem

    @property
    def cp_size(self) -> int:
        """The size of the group that it needs."""
        return self.problem.cp_size

    @property
    def seed(self) -> int:
        """Of all its values."""
        return self.case.seed


@dataclass(frozen=True)
class NamedProblem:
    """Base of the entries of tables: a problem with a name. Its text is the table's word and the name."""

    word: ClassVar[str] = ""
    begins: ClassVar[str] = ""
    name: str

    def __init_subclass__(cls) -> None:
        """A text begins with the table's word."""
        cls.begins = f"{cls.word} "

    def __post_init__(self) -> None:
        """Refuse a mistyped name."""
        if self.name not in (names := self.names()):
            raise ValueError(f"there is no {self.word} {self.name!r}; there are: {', '.join(names)}")

    def __str__(self) -> str:
        """One line that `parse` reads back."""
        return self.begins + self.name

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that `str` printed. Raises ValueError on anything else."""
        word, _, name = text.strip().partition(" ")
        if word != cls.word:
            raise ValueError(f"cannot read an entry of the table {cls.word!r} from {text!r}")
        return cls(name.strip())

    @classmethod
    def names(cls) -> Collection[str]:
        """All names of the table."""
        raise NotImplementedError

    @classmethod
    def items(cls, capabilities: Capabilities) -> list[str]:
        """Those that are played of an implementation."""
        return list(cls.names())

    @property
    def cases(self) -> tuple[Case, ...]:
        """The problems that it plays."""
        return ()

    def check(self, impl: Implementation, device: str = "cpu") -> list[str]:
        """Findings. Raises UnsupportedCase where the implementation has none of it."""
        raise NotImplementedError


class Raised(Exception):
    """The implementation raised what it should not have."""


def call(impl: Implementation, fn: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """`fn(*arguments, **options)`.

    Raises:
        UnsupportedCase: it raised the implementation's `Unsupported`, or NotImplementedError.
        Raised: it raised anything else; but for Missing, and for what says that memory is out.
    """
    try:
        return fn(*arguments, **options)
    except (impl.Unsupported, NotImplementedError) as refusal:
        raise UnsupportedCase(str(refusal)) from refusal
    except (Exception, SystemExit) as error:
        if isinstance(error, Missing) or is_out_of_memory(error):
            raise
        raise Raised(f"{getattr(fn, '__name__', 'it')} raised {describe_error(error)}") from error


def parts_of(name: str, returned: Any, *parts: str) -> tuple[torch.Tensor, ...]:
    """The tuple of tensors that a function returned, named `parts`. Raises Raised for anything else."""
    found = [type(x).__name__ for x in returned] if isinstance(returned, tuple | list) else []
    if len(found) != len(parts) or not all(isinstance(x, torch.Tensor) for x in returned):
        what = f"({', '.join(found)})" if found else type(returned).__name__
        raise Raised(f"{name} returned {what}; it must return tensors ({', '.join(parts)})")
    return tuple(returned)


def shape_findings(name: str, got: Any, shape: Sequence[int] | torch.Size, dtypes: Sequence[torch.dtype]) -> list[str]:
    """Findings about a result's type, shape and dtype."""
    if not isinstance(got, torch.Tensor):
        return [f"{name} is a {type(got).__name__}; it must be a tensor"]
    found = []
    if list(got.shape) != list(shape):
        found.append(f"{name} has shape {list(got.shape)}, but should have {list(shape)}")
    if got.dtype not in dtypes:
        found.append(f"{name} has dtype {got.dtype}, but should have {' or '.join(map(str, dict.fromkeys(dtypes)))}")
    return found
