"""Which tier sees which mutant, measured: python -m tests.meta.mutants.table [OUT.json] [PROBLEMS PER TIER]

Every mutant is played by every tier of its level until the first problem that fails. The table is in
`docs/conformance/detection.md`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.meta.mutants import MUTANTS
from tests.meta.mutants.hunt import QUICK, hunt, tier_names

__all__ = ["markdown", "measure"]

Table = dict[str, dict[str, int]]  # mutant -> tier -> the number of the problem that saw it, 0 for none


def measure(out: Path, most: int) -> Table:
    """All mutants against all tiers; written to `out` after every mutant, and taken up from there."""
    torch.set_num_threads(1)
    table: Table = json.loads(out.read_text()) if out.exists() else {}
    for name, mutant in MUTANTS.items():
        if name in table:
            continue
        row: dict[str, int] = {}
        for tier in tier_names(mutant):
            found = hunt(name, mutant, tier, most)
            row[tier] = found.played if found.killed else 0
        table[name] = row
        out.write_text(json.dumps(table))
    return table


def markdown(table: Table) -> str:
    """One line a mutant: the tiers that see it, with the number of the first problem that did."""
    lines = [
        "| mutant | what is wrong | named tier | seen by (at problem) | not by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in table.items():
        if name not in MUTANTS:
            continue
        seen = ", ".join(f"{tier} {n}" for tier, n in row.items() if n)
        missed = ", ".join(tier for tier, n in row.items() if not n)
        lines.append(f"| `{name}` | {MUTANTS[name].text} | {MUTANTS[name].tier} | {seen} | {missed} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "mutants.json")
    measured = measure(path, int(sys.argv[2]) if len(sys.argv) > 2 else QUICK)
    print(markdown(measured))
