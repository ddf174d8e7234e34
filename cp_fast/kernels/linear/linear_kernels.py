"""The interface of a library of linear attention: what one rank computes for its fragments, between two exchanges.

A fragment is rows of one document that lie together in a rank's buffer. On the recurrent state it acts as one affine
map, `S_out = M @ S_in + B`, and its adjoint is `dS_in = M^T @ dS_out + D`. All fragments of a rank lie one after the
other in tensors without padding, n rows together, as the sequences of a varlen kernel.

    legend   n = rows, f = fragments, c = chosen fragments, h = heads of q and k, h_v = heads of v and of states
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from cp_fast.layers.state_tables import StateTables
from cp_ref.calls.linear_calls import LinearKind
from cp_ref.schedules.words import Feature

__all__ = [
    "BackwardRun",
    "ForwardRun",
    "FragmentRows",
    "LinearGradients",
    "LinearInputs",
    "LinearKernels",
    "Maps",
    "apply",
    "compose_in_waves",
]

# ---- affine maps
#
# Affine maps of the recurrent state, `S_out = M @ S_in + B`, for every head of several fragments.
#
# The maps of mamba2 are multiples of the identity: there M has one number for a head. Those of mamba are diagonal: M
# has one number for each row of a state. Each column of a state decays by itself in mamba, so it is a head of its own,
# with a state of one column: h_v counts these heads.


class Maps(NamedTuple):
    """The maps of n fragments.

    >>> maps = Maps(torch.full((1, 1), 0.5), torch.ones(1, 1, 2, 3))
    >>> apply(maps.m, torch.ones(1, 1, 2, 3)) + maps.b
    tensor([[[[1.5000, 1.5000, 1.5000],
              [1.5000, 1.5000, 1.5000]]]])
    """

    m: torch.Tensor  # [n, h_v, d_k, d_k]; one factor [n, h_v] for mamba2; factors of rows [n, h_v, d_k] for mamba
    b: torch.Tensor  # [n, h_v, d_k, d_v]


def apply(m: torch.Tensor, state: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """M @ S, or M^T @ S, for every fragment and head: m as in `Maps`, state [n, h_v, d_k, d_v]."""
    if m.dim() < 4:
        return m.view(*m.shape, *[1] * (4 - m.dim())) * state
    return (m.mT if transposed else m) @ state


def compose_in_waves(
    tables: StateTables, maps: Maps, states: torch.Tensor | None, fragments: int, *, transposed: bool
) -> torch.Tensor:
    """See `LinearKernels.compose`: the i-th maps of all scans are applied at once."""
    now = None if states is None else states[tables.documents]
    entering = maps.b.new_zeros(fragments, *maps.b.shape[1:])
    for read, maps_of in tables.waves:
        if read is not None and now is not None:
            entering[read[0]] = now[read[1]]
        if maps_of is None:
            break
        slots, scans = maps_of
        after = maps.b[slots]
        if now is None:
            now = after.new_zeros(len(tables.documents), *after.shape[1:])
        else:
            after = after + _product(maps.m[slots], now[scans], transposed=transposed)
        now[scans] = after
    return entering


def _product(m: torch.Tensor, state: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """In float64 on a GPU, where a product of float32 may be one of TF32."""
    if m.device.type != "cuda":
        return apply(m, state, transposed=transposed)
    return apply(m.double(), state.double(), transposed=transposed).to(state.dtype)


# ---- the interface


@dataclass(frozen=True, eq=False)
class FragmentRows:
    """The fragments of a rank's rows: fragment i is rows `cu[i]:cu[i + 1]`. None is empty.

    >>> len(FragmentRows((0, 3, 5), torch.device("cpu")))
    2
    """

    cu: tuple[int, ...]
    device: torch.device
    mapped: tuple[tuple[int, ...], ...] = ()  # those whose maps each pass needs: what cutting a fragment is worth

    def __len__(self) -> int:
        return len(self.cu) - 1

    @cached_property
    def tables(self) -> dict[Any, Any]:
        """The tables that libraries derive from `cu`, by keys of their own: made once for all layers."""
        return {}


class LinearInputs(NamedTuple):
    """The rows of all fragments of a rank, contiguous. For mamba d_v is 1, and h_v counts columns of states."""

    q: torch.Tensor  # [n, h, d_k]
    k: torch.Tensor  # [n, h, d_k]
    v: torch.Tensor  # [n, h_v, d_v]
    g: torch.Tensor  # [n, h_v], for kda [n, h_v, d_k]: the logarithm of the decay
    beta: torch.Tensor | None  # [n, h_v]; None for mamba2 and mamba
    scale: float
    kind: LinearKind
    A: torch.Tensor | None = None  # [h_v, d_k], of mamba: A * g is the logarithm of the decay


class LinearGradients(NamedTuple):
    """Gradients of the inputs, each of the input's shape and of any float dtype, and of the fragments' initial
    states.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor | None
    dinitial: torch.Tensor | None  # [f, h_v, d_k, d_v]; None where the initial states are None
    dA: torch.Tensor | None = None


class ForwardRun(Protocol):
    """The forward pass over a rank's fragments. Kernels that need no state run when it is made."""

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """The tensors to keep for the backward pass, besides inputs and initial states."""
        ...

    def maps(self, chosen: Sequence[int]) -> Maps:
        """The maps (M, B) of the chosen fragments."""
        ...

    def run(self, initial: torch.Tensor | None, *, final: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Out [n, h_v, d_v] and, if asked for, the final states [f, h_v, d_k, d_v].

        initial: the fragments' initial states [f, h_v, d_k, d_v], or None for zeros.
        """
        ...


class BackwardRun(Protocol):
    """The backward pass over a rank's fragments. Kernels that need no gradient of a state run when it is made, or in
    `meanwhile`.
    """

    def reverse_maps(self, chosen: Sequence[int], dfinal: torch.Tensor | None) -> torch.Tensor:
        """D of the chosen fragments [c, h_v, d_k, d_v]. With `dfinal`, the gradients of their final states, of D's
        shape, M^T @ dfinal is added.
        """
        ...

    def meanwhile(self) -> None:
        """Compute something that later methods need, while messages travel; it may be left out."""
        ...

    def run(self, dfinal: torch.Tensor | None) -> LinearGradients:
        """The gradients, given those of the final states [f, h_v, d_k, d_v]; None for zeros."""
        ...


class LinearKernels(Protocol):
    """A library of linear attention."""

    name: str
    features: frozenset[Feature]  # devices, dtypes and head dims
    kinds: frozenset[LinearKind]

    def why_not(self) -> str | None:
        """None if the library works on this machine, else the reason in one line."""
        ...

    def forward(self, inputs: LinearInputs, fragments: FragmentRows) -> ForwardRun:
        """Begin a forward pass."""
        ...

    def backward(
        self,
        inputs: LinearInputs,
        fragments: FragmentRows,
        kept: Sequence[torch.Tensor],
        initial: torch.Tensor | None,
        dout: torch.Tensor,
    ) -> BackwardRun:
        """Begin a backward pass: the forward pass's inputs, kept tensors and initial states, and dout [n, h_v, d_v],
        contiguous and of v's dtype.
        """
        ...

    def compose(
        self, tables: StateTables, maps: Maps, states: torch.Tensor | None, fragments: int, *, transposed: bool
    ) -> torch.Tensor:
        """The states that enter the rank's fragments [fragments, h_v, d_k, d_v].

        Args:
            maps: by slot.
            states: those that documents begin with [documents, h_v, d_k, d_v]; None for zeros.
            transposed: the maps are M^T @ S + B.
        """
        ...
