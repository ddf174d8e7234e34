"""The command line: `explain`, `record` and `compare`, each in its own module, imported when it runs."""

from __future__ import annotations

from cp_ref.contract.cli.lazy_commands import lazy_commands

__all__ = ["app"]


app = lazy_commands(
    "Context-parallel attention, step by step: see how it works, and find where two runs part.",
    {
        "explain": ("cp_ref.cli.explain", "Walk through a problem: who owns, sends and computes what, step by step."),
        "record": ("cp_ref.cli.record", "Run a problem on random tensors, and record every intermediate."),
        "compare": ("cp_ref.cli.compare_runs", "Name the first step and rank at which two recorded runs differ."),
    },
)
