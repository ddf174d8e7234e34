"""The command line: `build`, `demo`, `doctor` and `plan`, each in its own module, imported when it runs."""

from __future__ import annotations

from functools import partial

from cp_ref.show.cli.lazy_commands import lazy_commands

__all__ = ["app", "command_line"]


command_line = partial(
    lazy_commands,
    "Context-parallel attention: see it work, see what works here, see what it plans.",
    {
        "demo": ("cp_fast.tools.cli.demo", "Run attention over documents on several ranks, and check all results."),
        "doctor": ("cp_fast.tools.cli.doctor", "Say which backends and kernels work here, and why others do not."),
        "plan": (
            "cp_fast.tools.cli.plan",
            "Describe a problem, and verify its schedule: steps, costs, layouts, a prediction.",
        ),
        "explain": (
            "cp_fast.tools.cli.plan",
            "Walk through a problem's schedule, step by step. It is plan --sections walk.",
            "plan --sections walk",
        ),
        "build": ("cp_fast.tools.cli.build", "Build the native kernels into the cache, before their first use."),
    },
)
app = command_line()
