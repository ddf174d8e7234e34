"""Where a model's tokens are cut, and where they become whole again: its plan, as rows.

A model of diffusers has a plan, `_cp_plan`: which arguments and outputs of which modules have a row for each token.
`read_plan` makes rows of it. `OWN_PLANS` has the models whose plan does not say enough for attention over ranks in
training: there, every stream of tokens is cut, and a text that is only read by cross attention stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from cp_ref.schedules.values import kind_of

__all__ = [
    "OWN_PLANS",
    "Count",
    "Cut",
    "Gather",
    "Plan",
    "Reach",
    "Row",
    "is_stream",
    "modules_of",
    "plan_of",
    "read_plan",
]


@dataclass(frozen=True)
class Cut:
    """A tensor that is cut. where: the module, "*" for any number. of: its argument, or the number of its output.

    Attributes:
        axis: of the tokens.
        axes: how many the tensor has; another tensor is not one a token, and stays whole. None: any number.
    """

    where: str
    of: str | int
    axis: int
    axes: int | None = None


@dataclass(frozen=True)
class Count:
    """An argument that says how many of a stream's last tokens are of one kind: a rank gets the count in its slice."""

    where: str
    of: str
    stream: str


@dataclass(frozen=True)
class Gather:
    """The outputs of a module that become whole: the axis of the tokens of each one, None where it stays."""

    where: str
    axes: tuple[int | None, ...]


@dataclass(frozen=True)
class Reach:
    """A parameter that a module leaves out where its slice has no token of one kind: a rank then has a gradient of 0,
    and sums over ranks find one on each.
    """

    where: str
    of: str


Row = Cut | Count | Gather | Reach
Plan = tuple[Row, ...]


def _cuts(where: str, **axes: tuple[int, int]) -> Plan:
    return tuple(Cut(where, name, axis, count) for name, (axis, count) in axes.items())


_ROWS = (1, 3)  # [b, tokens, channels]
_STEPS = (1, 2)  # time steps [b, tokens]


def _both_outputs(*where: str) -> Plan:
    """Cosines and sines, [b, tokens, d] or [b, h, tokens, d]."""
    return tuple(Cut(name, output, -2) for name in where for output in (0, 1))


# Of LTX and LTX 2 diffusers' plan cuts the text, whose cross attention then needs messages, and leaves the audio and
# the time steps of tokens whole. Of Helios it cuts each attention and feed-forward apart, which sends everything three
# times a block. Cosmos 3 has no plan, but two functions in its forward that cut and gather.
OWN_PLANS: dict[str, Plan] = {
    "LTXVideoTransformer3DModel": (
        *_cuts("", hidden_states=_ROWS, timestep=_STEPS),
        *_both_outputs("rope"),
        Gather("proj_out", (1,)),
    ),
    "LTX2VideoTransformer3DModel": (
        *_cuts("", hidden_states=_ROWS, audio_hidden_states=_ROWS, timestep=_STEPS, audio_timestep=_STEPS),
        *_cuts("", video_keyframes_mask=_ROWS),
        *_both_outputs("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope"),
        Gather("proj_out", (1,)),
        Gather("audio_proj_out", (1,)),
    ),
    "HeliosTransformer3DModel": (
        *_cuts("blocks.0", hidden_states=_ROWS),
        *_cuts("blocks.*", temb=(1, 4), rotary_emb=_ROWS),
        Count("blocks.*", "original_context_length", "hidden_states"),
        Reach("blocks.*.attn1", "history_key_scale"),
        Gather("blocks.-1", (1,)),
    ),
    "Cosmos3OmniTransformer": (),
}


def plan_of(model: nn.Module, given: Any) -> Plan:
    """The plan of a model, or the one that is given, as rows.

    Raises:
        NotImplementedError: it has none. ValueError, TypeError: the one that is given does not fit the model.
    """
    kinds = [kind.__name__ for kind in type(model).__mro__]
    if given is not None:
        rows = read_plan(given)
    elif found := [OWN_PLANS[kind] for kind in kinds if kind in OWN_PLANS]:
        rows = found[0]
    elif getattr(model, "_cp_plan", None) is not None:
        rows = read_plan(model._cp_plan)
    else:
        raise NotImplementedError(
            f"{type(model).__name__} has no _cp_plan, which says where its tokens are cut; give use one as plan="
        )
    for row in rows:
        if not modules_of(model, row.where):
            raise ValueError(f"plan names {row.where!r}, which {type(model).__name__} has not")
    if not hasattr(model, "_cp_shard_fn") and not any(isinstance(row, Cut) and is_stream(row) for row in rows):
        raise ValueError(f"the plan of {type(model).__name__} cuts no argument whose name ends with hidden_states")
    return rows


def read_plan(plan: Any) -> Plan:
    """The rows of a plan of diffusers.

    >>> from types import SimpleNamespace as Entry
    >>> cut = Entry(split_dim=1, expected_dims=3, split_output=False)
    >>> for row in read_plan({"": {"hidden_states": cut}, "proj_out": Entry(gather_dim=1, expected_dims=3)}):
    ...     print(row)
    Cut(where='', of='hidden_states', axis=1, axes=3)
    Gather(where='proj_out', axes=(1,))
    """
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan is {kind_of(plan)}; it must be a dict as _cp_plan of diffusers' models")
    rows: list[Row] = []
    for where, entry in plan.items():
        if isinstance(entry, Mapping):
            for of, cut in entry.items():
                if not hasattr(cut, "split_dim") or isinstance(of, int) != cut.split_output:
                    raise TypeError(
                        f"plan[{where!r}][{of!r}] is {cut!r}; it must be a ContextParallelInput, of an argument by "
                        "name, or with split_output=True of an output by number"
                    )
                rows.append(Cut(where, of, cut.split_dim, cut.expected_dims))
        else:
            outputs = entry if isinstance(entry, list | tuple) else (entry,)
            if not all(x is None or hasattr(x, "gather_dim") for x in outputs):
                raise TypeError(f"plan[{where!r}] is {entry!r}; it must be a ContextParallelOutput, or several")
            rows.append(Gather(where, tuple(None if x is None else x.gather_dim for x in outputs)))
    return tuple(rows)


def is_stream(cut: Cut) -> bool:
    """Whether a tensor is a stream of tokens, and not what goes with one, as positions do."""
    return isinstance(cut.of, str) and cut.of.endswith("hidden_states")


def modules_of(model: nn.Module, where: str) -> list[nn.Module]:
    """The modules of a name with "*" for any number; the last element of a list is number -1.

    >>> model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ReLU(), nn.Tanh()])})
    >>> modules_of(model, "blocks.*"), modules_of(model, "blocks.-1"), modules_of(model, "proj_out")
    ([ReLU(), Tanh()], [Tanh()], [])
    """
    pattern = re.compile(re.escape(where).replace(r"\*", r"\d+").replace(r"\-1", r"\d+"))
    found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return found[-1:] if "-1" in where else found
