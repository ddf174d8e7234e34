"""What docs/conformance/detection.md says of mutants, measured:

    python -m tests.meta.mutants.measured tiers [OUT.json] [PROBLEMS PER TIER]
    python -m tests.meta.mutants.measured rates [SEEDS]

`tiers`: which tier sees which mutant. Every mutant is played by every tier of its level until the first problem that
fails. `rates`: how often a tier sees a planted error, by the length of the row. One sequence of n tokens under p2p, 2
heads over 1, head dim 16. Mask errors: causal, 4 ranks, in one row of n keys. Arithmetic errors: no mask, 8 ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from conformance.case import Case
from conformance.implementation import load
from conformance.problems.named import dense, problem
from conformance.runner.tiers import TIERS
from tests.meta.mutants import MUTANTS
from tests.meta.mutants.hunt import QUICK, hunt, tier_names
from tests.meta.mutants.model import Mutant, read_mutants

Table = dict[str, dict[str, int]]  # mutant -> tier -> the number of the problem that saw it, 0 for none


def measure(out: Path, most: int) -> Table:
    """All mutants against all tiers; written to `out` after every mutant, and taken up from there."""
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


_LATE_ROW = read_mutants(
    "cp_ref",
    """
hidden (probes): the first key is hidden in the last row of a row of LENGTH
cp_ref.reference.executor.tile_attention.visible_pairs
> if rows.stop == LENGTH and columns.start == 0:
>     result[-1, 0] = False

shown (probes): the last key is shown to the row before the last of a row of LENGTH
cp_ref.reference.executor.tile_attention.visible_pairs
> if rows.stop == columns.stop == LENGTH and result.shape[0] > 1:
>     result[-2, -1] = True
""",
)


def _late_row(name: str, length: int) -> Mutant:
    [edit] = _LATE_ROW[name].edits
    return replace(_LATE_ROW[name], edits=(edit._replace(last=edit.last.replace("LENGTH", str(length))),))


PLANTED: dict[str, Callable[[int], Mutant]] = {
    "one key too few in one row": partial(_late_row, "hidden"),
    "one key too many in one row": partial(_late_row, "shown"),
    "partial outputs merged in the input dtype": lambda _: MUTANTS["partial-outputs-in-bf16"],
    "dk and dv added up in the input dtype": lambda _: MUTANTS["dkv-in-bf16"],
    "dq added up in the input dtype": lambda _: MUTANTS["dq-in-bf16"],
    "lse rounded to bfloat16": lambda _: MUTANTS["lse-in-bfloat16"],
    "partial outputs not rescaled": lambda _: MUTANTS["merge-without-rescaling"],
}


def rate(mutant: Mutant, tier: str, dtype: str, length: int, seeds: int) -> float:
    """The share of seeds with which the tier has findings."""
    impl, seen = load("cp_ref"), 0
    for seed in range(seeds):
        masked = mutant.name in _LATE_ROW
        fields = {"dtype": dtype, "heads_q": 2, "heads_kv": 1, "d_qk": 16, "d_v": 16}
        mask = "padding_causal" if masked else "no_mask"
        p = problem(4 if masked else 8, dense(length), attn_mask_type=mask, **fields)
        case = Case(p, seed=seed, return_lse=True)
        with mutant.planted():
            seen += bool(TIERS[tier].check(impl, case, "cpu"))
    return seen / seeds


def rates(seeds: int) -> None:
    """The table of `rate`, printed."""
    columns = (("probes", "bfloat16"), ("budget", "bfloat16"), ("metamorphic", "bfloat16"), ("logic", "float32"))
    print("| planted | row | " + " | ".join(f"{tier}, {dtype}" for tier, dtype in columns) + " |")
    print("| --- | --- |" + " --- |" * len(columns))
    for name, planted in PLANTED.items():
        for n in (16, 64, 256):
            shares = [f"{rate(planted(n), tier, dtype, n, seeds):.0%}" for tier, dtype in columns]
            print(f"| {name} | {n} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *given = sys.argv[1:]
    if what == "tiers":
        print(markdown(measure(Path(given[0] if given else "mutants.json"), int(given[1]) if given[1:] else QUICK)))
    else:
        rates(int(given[0]) if given else 20)
