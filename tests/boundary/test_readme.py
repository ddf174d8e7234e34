"""What the README says of the package, in the order and the length that it should have."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_ref import SimGroup
from cp_ref.reference.simulator import SimMember
from cp_ref.schedules.words import CP_COMM_TYPES, MASKS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMPARISON = (ROOT / "docs" / "conformance" / "comparison.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ORDER = (
    "Install",
    "Five lines",
    "Two commands",
    "Layouts and schedules",
    "Why",
    "Where you already are",
    "When a number is wrong",
)


def test_it_is_short_and_in_order() -> None:
    assert len(README.splitlines()) <= 150
    assert tuple(re.findall(r"^## (.*)$", README, re.MULTILINE))[: len(ORDER)] == ORDER


def test_ci_runs_the_two_commands_as_they_stand() -> None:
    """`.ci/run` reads them from the README by this expression."""
    ci = (ROOT / ".ci" / "run").read_text()
    [expression] = re.findall(r"sed -n ('.*') README\.md", ci)
    command = f"sed -n {expression} README.md"
    read = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert read == ["pip install . && python -m cp_fast demo", "pip install '.[test]' && python -m pytest -n 2"]
    assert ci.index("for command in") < ci.index("step install")  # in an environment where nothing else is installed


def test_the_badges_are_true() -> None:
    [torch] = [found[1] for need in PROJECT["dependencies"] if (found := re.fullmatch(r"torch>=([\d.]+)", need))]
    python = PROJECT["requires-python"].removeprefix(">=")
    title = f"Python {python} and later, PyTorch {torch} and later, licence {PROJECT['license']}"
    badges = (ROOT / "docs" / "pictures" / "badges.svg").read_text()
    assert title in badges
    assert re.findall(r">([^<>\n]+)</text>", badges) == [
        word for part in title.split(", ") for word in part.split(" ", 1)
    ]


# rows of the table of features whose first cell speaks of all four schedules, as arguments of `supports`
FEATURES: dict[str, dict[str, Any]] = {
    "packed documents of any lengths": {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 5, 13, 40])},
    "sliding windows": {"window_size": (5, 0)},
    "d_qk != d_v (MLA)": {"d_qk": 24, "d_v": 16},
    "sinks": {"softmax_type": "learnable"},
    "softcap": {"softcap": 2.0},
}


@pytest.mark.parametrize("package", [cp_ref, cp_fast], ids=["cp_ref", "cp_fast"])
@pytest.mark.parametrize("row", FEATURES)
def test_all_four_schedules_have_it(package: Any, row: str) -> None:
    assert f"| {row} | all four schedules |" in COMPARISON
    sizes = {"heads_q": 4, "heads_kv": 4, "d_qk": 16, "d_v": 16, "dtype": torch.float32, "device": "cpu"}
    batch = {} if "packed" in row else {"batch_size": 1, "seqlen_q": 64}
    layout = {"layout": "balanced"} if "packed" in row else {}  # the others divide lengths by the number of ranks

    def one(member: SimMember) -> None:
        for comm in CP_COMM_TYPES:
            cp = package.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm, **layout)
            assert package.supports(cp=cp, **sizes | batch | FEATURES[row]) == (True, ""), comm

    SimGroup(4).run(one)


def test_each_of_the_other_libraries_lacks_one_of_these() -> None:
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in COMPARISON.splitlines() if line[:2] == "| "]
    rows = [row[2:] for row in table if row[0].startswith((*FEATURES, "masks of several areas"))]
    assert len(rows) == len(FEATURES) + 1
    assert all("no" in column for column in zip(*rows, strict=True))


@pytest.mark.parametrize("package", [cp_ref, cp_fast], ids=["cp_ref", "cp_fast"])
def test_fewer_kv_heads_than_ranks_in_ulysses(package: Any) -> None:
    def one(member: SimMember) -> None:
        given = {"heads_q": 8, "heads_kv": 2, "d_qk": 16, "d_v": 16, "dtype": torch.float32, "device": "cpu"}
        cp = package.ContextParallel(member, "a2a")
        assert package.supports(cp=cp, batch_size=1, seqlen_q=64, **given)[0]

    SimGroup(4).run(one)


@pytest.mark.parametrize("mask", MASKS)
def test_cross_attention_under_every_mask(mask: Any) -> None:
    def one(member: SimMember) -> None:
        given: dict[str, Any] = {"heads_q": 4, "heads_kv": 4, "d_qk": 16, "d_v": 16, "dtype": torch.float32}
        if "padding" in mask:
            cu = torch.tensor([0, 16, 48])
            given |= {"qkv_format": "thd", "cu_seqlens_q": cu, "cu_seqlens_kv": 2 * cu}
        else:
            given |= {"batch_size": 1, "seqlen_q": 32, "seqlen_kv": 64}
        for comm in CP_COMM_TYPES:
            cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
            assert cp_fast.supports(cp=cp, attn_mask_type=mask, device="cpu", **given) == (True, ""), comm

    SimGroup(4).run(one)
