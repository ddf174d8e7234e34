"""The command line: `plan`, `record` and `compare`, imported when they run."""

from __future__ import annotations

from cp_ref.show.cli.lazy_commands import lazy_commands

__all__ = ["app"]


app = lazy_commands(
    "Context-parallel attention, step by step: see how it works, and find where two runs part.",
    {
        "explain": (
            "cp_ref.cli.plan",
            "Walk through a problem: who owns, sends and computes what, step by step. It is plan --sections walk.",
            "plan --sections walk",
        ),
        "plan": ("cp_ref.cli.plan", "Describe a problem, in sections: walk, schedule, costs, layouts."),
        "record": ("cp_ref.cli.record", "Run a problem on random tensors, and record every intermediate."),
        "compare": ("cp_ref.cli.record", "Name the first step and rank at which two recorded runs differ."),
    },
)
