"""The options that describe a problem, for commands of both packages, and the arguments that they become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from cp_ref.schedules.planners.make_schedule import SCHEDULES
from cp_ref.schedules.values import FURTHEST, MOST, MOST_RANKS, check_choice, read_count
from cp_ref.schedules.words import AUTO, canonical_layout
from cp_ref.show.cli.terminal import readable_errors

if TYPE_CHECKING:
    import torch

    from cp_ref.schedules.problem import Problem
    from cp_ref.schedules.schedule import Schedule

__all__ = [
    "ProblemOptions",
    "check_number",
    "cumulative",
    "exchanging",
    "integers",
    "lengths",
    "read_dtype",
    "window",
    "with_options",
]


@dataclass(frozen=True)
class ProblemOptions:
    """The options as given; a command's class adds options and sets its defaults."""

    cp_comm_type: Annotated[str, Option(help="The schedule: p2p, all_gather, a2a, a2a+p2p or auto.")] = "p2p"
    cp_size: Annotated[int, Option(help="Number of ranks.", min=1)] = 4
    a2a_size: Annotated[int | None, Option(help="a2a+p2p only: how many ranks exchange heads, 2 unless given.")] = None
    seqlens: Annotated[str, Option(help="Lengths of the sequences, such as 10,6; thd unless said otherwise.")] = ""
    seqlens_kv: Annotated[str, Option(help="Key lengths where they differ (cross attention), one a sequence.")] = ""
    seqlen: Annotated[int | None, Option(help="Length of every sequence of a bshd or sbhd batch; 4 a rank.")] = None
    seqlen_kv: Annotated[int | None, Option(help="The same for keys where they differ.")] = None
    batch: Annotated[int | None, Option(help="Number of sequences of a bshd or sbhd batch; 1 unless given.")] = None
    qkv_format: Annotated[str, Option(help="bshd, sbhd or thd; thd where --seqlens is given, else bshd.")] = ""
    layout: Annotated[
        str, Option(help="Who owns which tokens: dual_chunk (or zigzag, the same), contiguous or balanced.")
    ] = "dual_chunk"
    mask: Annotated[str, Option(help="attn_mask_type, such as no_mask; causal unless given.")] = ""
    window: Annotated[str, Option(help="LEFT,RIGHT; -1 is unbounded.")] = "-1,-1"
    areas: Annotated[str, Option(help="Instead of mask and window, thd: a call of masks, as 'prefix_lm(4, 16)'.")] = ""
    heads_q: Annotated[int | None, Option(help="Query heads; 2 for each rank that exchanges heads.")] = None
    heads_kv: Annotated[int | None, Option(help="Key and value heads; 1 for each rank that exchanges heads.")] = None
    d_qk: Annotated[int, Option(help="Head dim of queries and keys.")] = 8
    d_v: Annotated[int | None, Option(help="Head dim of values; d_qk by default.")] = None
    dtype: Annotated[str, Option(help="float16, bfloat16, float32 or float64.")] = "float32"

    def __post_init__(self) -> None:
        """Raises ValueError where an option would be ignored, or for more ranks than commands plan."""
        read_count("--cp-size", self.cp_size, at_least=1, at_most=MOST_RANKS)
        object.__setattr__(self, "layout", canonical_layout(self.layout))
        lengths, packed = bool(self.seqlens), self.in_format == "thd"
        for option, value, ignored, instead in (
            ("--seqlen", self.seqlen, lengths and packed, "--seqlens has the lengths"),
            ("--seqlen-kv", self.seqlen_kv, packed, "thd takes --seqlens-kv"),
            ("--batch", self.batch, lengths, "--seqlens says how many sequences there are"),
            ("--mask", self.mask or None, bool(self.areas), "--areas says who sees whom"),
        ):
            if ignored and value is not None:
                raise ValueError(f"{option} is {value}, but {instead}; leave one of them out")

    def planned(self) -> tuple[Problem, Schedule]:
        """The problem and the schedule of all ranks, by the package's own `make_plan`.

        Raises:
            ValueError, TypeError: naming what is wrong. Unsupported: naming what is missing.
        """
        raise NotImplementedError

    def head_chunks(self, problem: Problem) -> tuple[int, ...]:
        """The kv heads of a rank that go one by one, if the package chooses to exchange heads so; else empty."""
        return ()

    @property
    def padded(self) -> int:
        """How many slots of padding the package adds so that lengths divide."""
        return 0

    @property
    def exchanging(self) -> int:
        """How many ranks exchange heads."""
        return exchanging(self.cp_comm_type, self.a2a_size, self.cp_size)

    @property
    def in_format(self) -> str:
        """The format of q, k and v."""
        return self.qkv_format or ("thd" if self.seqlens else "bshd")

    @property
    def lengths_q(self) -> list[int] | None:
        """One per sequence; None if not given."""
        if self.seqlens:
            return lengths("--seqlens", self.seqlens)
        return [self.length] * self.count if self.in_format == "thd" else None

    @property
    def lengths_kv(self) -> list[int] | None:
        """The same for keys; None if equal to those of queries."""
        return lengths("--seqlens-kv", self.seqlens_kv) if self.seqlens_kv else None

    @property
    def length(self) -> int:
        """The length of a sequence if no others are given."""
        return 4 * self.cp_size if self.seqlen is None else self.seqlen

    @property
    def count(self) -> int:
        """The number of sequences if no lengths are given."""
        return 1 if self.batch is None else self.batch

    @property
    def mask_type(self) -> str:
        """The mask, where there are no areas."""
        return self.mask or "causal"

    def said(self) -> dict[str, Any]:
        """The arguments of `attention` that describe the problem."""
        from cp_ref.batches import masks  # This and the next ones import PyTorch, and --help must not.

        q, kv = self.lengths_q, self.lengths_kv
        made: dict[str, Any] = {"qkv_format": self.in_format, "window_size": window(self.window)}
        made |= {"attn_mask_type": self.mask_type} if not self.areas else {"areas": masks.from_call(self.areas)}
        made |= {} if q is None else {"cu_seqlens_q": cumulative(q)}
        return made | ({} if kv is None else {"cu_seqlens_kv": cumulative(kv)})

    def sizes(self) -> dict[str, Any]:
        """The further arguments of `make_plan`, which `attention` reads from tensors."""
        heads_q = 2 * self.exchanging if self.heads_q is None else self.heads_q
        heads_kv = gcd(heads_q, self.exchanging) if self.heads_kv is None else self.heads_kv
        made: dict[str, Any] = {"heads_q": heads_q, "heads_kv": heads_kv, "d_qk": self.d_qk}
        made |= {"d_v": self.d_qk if self.d_v is None else self.d_v, "dtype": read_dtype(self.dtype)}
        if self.in_format == "thd":
            return made
        q = self.lengths_q
        made |= {"batch_size": self.count if q is None else len(q), "seqlen_q": self.length}
        return made | ({} if self.seqlen_kv is None else {"seqlen_kv": self.seqlen_kv})


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose first argument is a `ProblemOptions`, these options before the command's others; bad input
    ends it as in `readable_errors`.
    """
    first, *own = signature(command, eval_str=True).parameters.values()
    options = signature(first.annotation, eval_str=True).parameters.values()

    @wraps(command)
    def run(**given: Any) -> None:
        with readable_errors():
            command(first.annotation(**{p.name: given.pop(p.name) for p in options}), **given)

    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*options, *own)]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def exchanging(cp_comm_type: str, a2a_size: int | None, ranks: int) -> int:
    """How many ranks exchange heads: `a2a_size` of the problem, from --a2a-size (None where it is not given).

    >>> exchanging("a2a+p2p", None, 4), exchanging("a2a", None, 4), exchanging("p2p", None, 4)
    (2, 4, 1)
    """
    check_choice("cp_comm_type", cp_comm_type, (*SCHEDULES, "auto"))
    schedule = SCHEDULES[AUTO[0] if cp_comm_type == "auto" else cp_comm_type]
    if schedule.exchanging != "inner":
        if a2a_size is not None:
            raise ValueError(f"--a2a-size is {a2a_size}, but --cp-comm-type is {cp_comm_type}; only a2a+p2p takes it")
        return schedule.a2a_size(ranks, 1)
    size, unless = (2, " unless it is given") if a2a_size is None else (a2a_size, "")
    if size < 1 or ranks % size:
        raise ValueError(f"--a2a-size is {size}{unless}; it must divide the number of ranks, {ranks}")
    return size


def integers(option: str, text: str, rule: str) -> list[int]:
    """Integers separated by commas; ValueError naming the option, its value and the rule.

    >>> integers("--window", "128,0", "LEFT,RIGHT")
    [128, 0]
    """
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        said = repr(text) if len(text) <= 80 else f"{text[:40]!r}... of {len(text)} characters"
        raise ValueError(f"{option} is {said}; it must be {rule}") from None


def lengths(option: str, text: str) -> list[int]:
    """Sequence lengths separated by commas.

    >>> lengths("--seqlens", "100, 200")
    [100, 200]
    """
    rule = "lengths of at least 0 separated by commas, such as 100,200"
    values = integers(option, text, rule)
    if min(values) < 0:
        raise ValueError(f"{option} is {text!r}; it must be {rule}")
    for value in values:
        read_count(option, value, at_least=0)
    read_count(f"the sum of {option}", sum(values), at_least=0, at_most=FURTHEST)
    return values


def window(text: str) -> tuple[int, int]:
    """LEFT,RIGHT as two integers.

    >>> window("128,0")
    (128, 0)
    """
    rule = "LEFT,RIGHT, two integers such as 128,0; -1 is unbounded"
    sides = integers("--window", text, rule)
    if len(sides) != 2:
        raise ValueError(f"--window is {text!r}; it must be {rule}")
    return sides[0], sides[1]


def read_dtype(name: str) -> torch.dtype:
    """A dtype by its name.

    >>> read_dtype("float16")
    torch.float16
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype is {name!r}; it must be one of float16, bfloat16, float32, float64")
    return dtype


def cumulative(sizes: list[int]) -> torch.Tensor:
    """Cumulative lengths as the API takes them, int32 [b + 1]; int64 where they are too large for that.

    >>> cumulative([5, 8]).tolist()
    [0, 5, 13]
    """
    import torch

    ends = [*accumulate(sizes, initial=0)]
    return torch.tensor(ends, dtype=torch.int32 if ends[-1] <= MOST else torch.int64, device="cpu")


def check_number(option: str, number: int, count: int) -> None:
    """Check that it is one of `count` heads, ranks and the like, numbered from 0."""
    if not 0 <= number < count:
        raise ValueError(f"{option} is {number}; it must be 0 to {count - 1}")
