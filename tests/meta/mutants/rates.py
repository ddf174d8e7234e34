"""How often a tier sees a planted error, by the length of the row: python -m tests.meta.mutants.rates [SEEDS]

One sequence of n tokens under p2p, 2 heads over 1, head dim 16. Mask errors: causal, 4 ranks, in one row of n keys.
Arithmetic errors: no mask, 8 ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from conformance.case import Case
from conformance.implementation import load
from conformance.problems.named import dense, problem
from conformance.runner.tiers import TIERS
from tests.meta.mutants import MUTANTS
from tests.meta.mutants.model import Mutant, read_mutants

__all__ = ["PLANTED", "rate"]

_LATE_ROW = read_mutants(
    "cp_ref",
    """
hidden (probes): the first key is hidden in the last row of a row of LENGTH
cp_ref.executor.tile_attention.visible_pairs
> if rows.stop == LENGTH and columns.start == 0:
>     result[-1, 0] = False

shown (probes): the last key is shown to the row before the last of a row of LENGTH
cp_ref.executor.tile_attention.visible_pairs
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    columns = (("probes", "bfloat16"), ("budget", "bfloat16"), ("metamorphic", "bfloat16"), ("logic", "float32"))
    print("| planted | row | " + " | ".join(f"{tier}, {dtype}" for tier, dtype in columns) + " |")
    print("| --- | --- |" + " --- |" * len(columns))
    for name, planted in PLANTED.items():
        for n in (16, 64, 256):
            shares = [f"{rate(planted(n), tier, dtype, n, count):.0%}" for tier, dtype in columns]
            print(f"| {name} | {n} | {' | '.join(shares)} |", flush=True)
