"""Conformance: plays an implementation of context-parallel attention against the oracle, on problems drawn by
Hypothesis.

python -m conformance --impl cp_fast --profile quick
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.case import Case
    from conformance.checks.baselines import eager_attention
    from conformance.checks.budgets import Row, compare
    from conformance.implementation import Implementation, load
    from conformance.runner.run_tiers import replay

__all__ = ["Case", "Implementation", "Row", "compare", "eager_attention", "load", "replay"]

_WHERE = {
    "Case": "case",
    "Implementation": "implementation",
    "Row": "checks.budgets",
    "compare": "checks.budgets",
    "eager_attention": "checks.baselines",
    "load": "implementation",
    "replay": "runner.run_tiers",
}


def __getattr__(name: str) -> Any:
    """On first use: the pytest plugin is part of this package, and must not import torch into everybody's tests."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
