"""Problems of the level `linear` as data: a batch of documents over a group, and one layer on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from conformance.case import Case
from conformance.levels.problem_text import LevelCase
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.values import check_choice

__all__ = ["ACTIVATIONS", "LINEAR_KINDS", "CausalConv1d", "LinearAttention", "LinearCase"]

LINEAR_KINDS = ("gated_delta_rule", "kda", "mamba2")
ACTIVATIONS = (None, "silu", "swish")


@dataclass(frozen=True)
class LinearCase(LevelCase):
    """The fields of both layers: the batch, its slices, and the values."""

    counts: ClassVar[tuple[str, ...]] = ("cp_size",)  # The fields that are positive integers.
    cp_size: int = 2
    documents: tuple[tuple[int, int], ...] = ((8, 8),)  # (tokens, slots) of each.
    qkv_format: str = "thd"
    layout: str | tuple[tuple[int, int, int, int], ...] = "dual_chunk"
    cp_comm_type: str = "p2p"
    a2a_size: int = 1
    tail: int = 0  # Slots behind the last document, for each rank; thd only.
    dtype: str = "float64"
    wide: bool = False  # g and beta, or weight and bias, are in float32 with a low dtype.
    spoiled: int = -1  # The document whose tokens are NaN on the ranks; the others may not know. -1: none.
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        _ = self.case
        for name in self.counts:
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a positive integer")
        if type(self.spoiled) is not int or not -1 <= self.spoiled < len(self.documents):
            raise ValueError(f"spoiled is {self.spoiled!r}; it must be the number of a document, or -1")

    @cached_property
    def case(self) -> Case:
        """The batch as a case of attention, for the places of its rows."""
        packed = self.qkv_format == "thd"
        full = all(tokens == slots for tokens, slots in self.documents)
        masked = not packed and (not full or self.layout == "balanced" or not isinstance(self.layout, str))
        problem = Problem(
            self.cp_size,
            tuple(Sequence(tokens, tokens, slots, slots) for tokens, slots in self.documents),
            self.cp_comm_type,  # pyright: ignore[reportArgumentType]
            self.a2a_size,
            self.layout,
            self.qkv_format,  # pyright: ignore[reportArgumentType]
            "padding_causal" if masked else "causal",
            heads_q=self.cp_size,
            heads_kv=self.cp_size,
            dtype=self.dtype,
        )
        return Case(problem, tail_q=self.tail * self.cp_size, tail_kv=self.tail * self.cp_size)

    @property
    def problem(self) -> Problem:
        """The batch."""
        return self.case.problem

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are no tensors."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearAttention(LinearCase):
    """One `linear_attention`, forward and backward."""

    counts: ClassVar[tuple[str, ...]] = ("cp_size", "heads", "shared", "d_k", "d_v")
    kind: str = "gated_delta_rule"
    heads: int = 1
    shared: int = 1  # Value heads for each head of q and k.
    d_k: int = 3
    d_v: int = 2
    scale: float | None = None
    initial_state: bool = False
    output_final_state: bool = False

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        super().__post_init__()
        check_choice("kind", self.kind, LINEAR_KINDS)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are no tensors."""
        return {"kind": self.kind, "scale": self.scale}


@dataclass(frozen=True)
class CausalConv1d(LinearCase):
    """One `causal_conv1d`, forward and backward."""

    counts: ClassVar[tuple[str, ...]] = ("cp_size", "channels", "kernel_size")
    channels: int = 2
    kernel_size: int = 4
    bias: bool = True
    activation: str | None = None

    def __post_init__(self) -> None:
        """Refuse a mistyped text."""
        super().__post_init__()
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}; it must be one of {ACTIVATIONS}")

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are no tensors."""
        return {"activation": self.activation}
