"""States of this package on the modules of a prepared model, hooks, and forwards in the place of their classes'.

All states of a module lie in one dict, by their class, so a module has at most one of each. They go with the module
into its copies. Each class of states belongs to one file, which says what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeVar

from torch import nn

__all__ = [
    "check_forward",
    "drop_state",
    "give_forward",
    "hook_once",
    "known_state",
    "put_state",
    "state_of",
    "states_of",
    "take_forward",
]

State = TypeVar("State")
_STATES = "_cp_fast"  # The one attribute that a module gets.


def state_of(module: nn.Module, kind: type[State]) -> State | None:
    """A module's state of a kind; None where it has none.

    >>> layer = nn.Linear(2, 2)
    >>> put_state(layer, "seen")
    >>> state_of(layer, str), state_of(layer, int)
    ('seen', None)
    """
    states = module.__dict__.get(_STATES)
    return None if states is None else states.get(kind)


def states_of(module: nn.Module) -> Mapping[type[Any], Any]:
    """All states of a module, by their class."""
    return module.__dict__.get(_STATES, {})


def known_state(module: nn.Module, kind: type[State]) -> State:
    """A module's state of a kind, where it has one."""
    return module.__dict__[_STATES][kind]


def put_state(module: nn.Module, state: Any) -> None:
    """Give a module a state, in the place of one of its kind."""
    module.__dict__.setdefault(_STATES, {})[type(state)] = state


def drop_state(module: nn.Module, kind: type[Any]) -> None:
    """Take a module's state of a kind, if it has one."""
    module.__dict__.get(_STATES, {}).pop(kind, None)


def hook_once(
    module: nn.Module,
    before: Callable[..., Any],
    after: Callable[..., Any] | None = None,
    *,
    first: bool = False,
    named: bool = True,
    always: bool = False,
) -> None:
    """Call functions before and after a module's forward. A module that calls them already does not change.

    Args:
        first: `before` is called before other hooks.
        named: `after` is given the arguments by name too.
        always: `after` is called where the forward raises too.
    """
    if before in module._forward_pre_hooks.values():
        return
    module.register_forward_pre_hook(before, with_kwargs=True, prepend=first)
    if after is not None:
        module.register_forward_hook(after, with_kwargs=named, always_call=always)


def check_forward(name: str, module: nn.Module) -> None:
    """Raise NotImplementedError for a forward that is neither its class's nor from `give_forward`."""
    mine = module.__dict__.get("forward")
    if mine is not None and not hasattr(mine, "cp_fast"):
        raise NotImplementedError(f"{name} has a forward of its own, as offloading or fused kernels give it")


def give_forward(module: nn.Module, forward: Any) -> None:
    """Give a module a forward in the place of its class's."""
    forward.cp_fast = True
    module.__dict__["forward"] = MethodType(forward, module)


def take_forward(module: nn.Module) -> bool:
    """Give a module its class's forward again; whether it had one from `give_forward`."""
    return hasattr(module.__dict__.get("forward"), "cp_fast") and bool(module.__dict__.pop("forward"))
