"""Another release of the library, whose methods are not those that the kernels with scores replace."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from cp_fast.backends.fa4 import fa4_backend
from cp_fast.backends.fa4.fa4_backend import changed_hook


def release(changes: dict[str, str | None]) -> ModuleType:
    """A module with all methods; changes: other parameters of a method, or None for no method."""
    module = ModuleType("stand-in")
    for name, methods in fa4_backend._HOOKS.items():
        bodies: dict[str, Any] = {}
        for method, wanted in methods.items():
            parameters = changes.get(f"{name}.{method}", ", ".join(("self", *sorted(wanted))))
            if isinstance(wanted, tuple) and f"{name}.{method}" not in changes:
                parameters = ", ".join(("self", *wanted))
            if parameters is not None:
                bodies[method] = eval(f"lambda {parameters}: None")
        vars(module)[name] = type(name, (), bodies)
    return module


def test_all_methods_are_there() -> None:
    assert changed_hook(release({})) is None


@pytest.mark.parametrize("parameters", [None, "self, acc_S"])
@pytest.mark.parametrize(
    "hook", [f"{name}.{method}" for name, methods in fa4_backend._HOOKS.items() for method in methods]
)
def test_another_method_is_named(hook: str, parameters: str | None) -> None:
    assert changed_hook(release({hook: parameters})) == hook


def test_methods_whose_parameters_are_in_another_order_are_other_methods() -> None:
    hook = "FlashAttentionForwardSm90.apply_score_mod"
    wanted = fa4_backend._HOOKS["FlashAttentionForwardSm90"]["apply_score_mod"]
    assert changed_hook(release({hook: ", ".join(("self", *reversed(tuple(wanted))))})) == hook
