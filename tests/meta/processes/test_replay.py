"""The command that a report prints plays exactly the failing problem again: of every kind of tier, by every runner."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conformance.cli import app

pytestmark = pytest.mark.thorough


def conformance(folder: Path, *arguments: str) -> tuple[int, str]:
    """The command in a folder, in this process: its workers are forked from one that has imported PyTorch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return done.exit_code, done.output


def report_of(folder: Path, name: str) -> tuple[dict[str, Any], str]:
    data = json.loads((folder / name / "report.json").read_text())
    return data, (folder / name / "report.html").read_text()


def failing(data: dict[str, Any]) -> set[tuple[str, str, str]]:
    """(tier, text, verdict) of all that failed."""
    stopped = ("wrong", "crashed", "hung", "out of memory")
    return {(p["tier"], p["text"], p["verdict"]) for p in data["played"] if p["verdict"] in stopped}


def check_replays(folder: Path, tiers: set[str], *arguments: str, most: int) -> None:
    """Run, then take the commands out of the report, and run the first ones of every tier."""
    code, output = conformance(folder, *arguments, "--report", "first")
    assert code == 1, output
    data, page = report_of(folder, "first")
    found = failing(data)
    assert tiers <= {tier for tier, _, _ in found}, output
    played: dict[str, int] = {}
    for failure in data["summary"]["failures"]:
        for command in failure["commands"]:
            words = shlex.split(command)
            assert words[:3] == ["python", "-m", "conformance"]
            asked = words[words.index("--tier") + 1] if "--tier" in words else failure["tiers"][0]
            if played.get(asked, 0) >= most:
                continue
            played[asked] = played.get(asked, 0) + 1
            code, again = conformance(folder, *words[3:], "--report", "again")
            assert code == 1, again
            meta = report_of(folder, "again")[0]["meta"]
            assert (meta["impl"], meta["device"]) == (data["meta"]["impl"], data["meta"]["device"])
            want = {(tier, text, verdict) for tier, text, verdict in found if (tier, text) == (asked, failure["text"])}
            assert failing(report_of(folder, "again")[0]) == want
            assert words[-1].replace('"', "&#34;") in page  # as it is on the page, too
    assert set(played) >= tiers
    printed = {line.strip() for line in output.splitlines() if "--repro" in line}
    assert printed
    assert printed <= {command for failure in data["summary"]["failures"] for command in failure["commands"]}


def test_drawn_tiers_and_tables_of_an_implementation_in_threads(tmp_path: Path) -> None:
    """What is wrong wherever there is a softcap, and computes whatever it is given."""
    (tmp_path / "lax.py").write_text(
        "from tests.meta.zoo.samples import Wrong\n"
        "class Lax(Wrong):\n"
        "    def attention(self, q, k, v, **rest):\n"
        "        try:\n"
        "            return super().attention(q, k, v, **rest)\n"
        "        except (TypeError, ValueError):\n"
        "            return q\n"
    )
    tiers = ("logic", "budget", "errors")
    arguments = [word for tier in tiers for word in ("--tier", tier)]
    check_replays(
        tmp_path, set(tiers), "--impl", "lax:Lax", "--max-examples", "60", "--max-failures", "1", "--shrink-time", "3",
        "--cp-size", "2", *arguments, most=1,
    )  # fmt: skip


def test_lower_levels(tmp_path: Path) -> None:
    (tmp_path / "lower.py").write_text(
        "from tests.meta.zoo.samples import Lower\n"
        "class Off(Lower):\n"
        "    def merge(self, parts):\n"
        "        out, lse = super().merge(parts)\n"
        "        return out * 1.5, lse\n"
        "    def tile(self, q, k, v, **rest):\n"
        "        out, lse = super().tile(q, k, v, **rest)\n"
        "        return out + 0.5, lse\n"
    )
    tiers = {"merge", "kernel"}
    arguments = [word for tier in sorted(tiers) for word in ("--tier", tier)]
    check_replays(
        tmp_path, tiers, "--impl", "lower:Off", "--max-examples", "10", "--max-failures", "1", "--shrink-time", "3",
        *arguments, most=1,
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="needs gloo between processes")
def test_ranks_that_are_processes_in_a_group_larger_than_the_usual(tmp_path: Path) -> None:
    """5 processes are more than a run without --cp-size starts; a hanging rank is given up at the run's own limit."""
    (tmp_path / "five.py").write_text(
        "import time, torch\n"
        "from tests.meta.zoo.samples import AllGather\n"
        "class Five(AllGather):\n"
        "    def attention(self, q, k, v, *, cp, **rest):\n"
        "        result = super().attention(q, k, v, cp=cp, **rest)\n"
        "        if torch.distributed.get_world_size(cp.group) == 5:\n"
        "            time.sleep(1000.0)\n"
        "        return result\n"
    )
    check_replays(
        tmp_path, {"logic"}, "--impl", "five:Five", "--max-examples", "3", "--max-failures", "1", "--shrink-time", "0",
        "--cp-size", "5", "--time-limit", "4", "--tier", "logic", most=1,
    )  # fmt: skip


def test_a_problem_says_how_many_processes_it_needs(tmp_path: Path) -> None:
    """Without --cp-size too, as when the text is typed."""
    case = 'Case(Problem(cp_size=5, sequences=[(10, 10, 10, 10)], cp_comm_type="all_gather", layout="contiguous"))'
    code, output = conformance(
        tmp_path, "--impl", "tests.meta.zoo.samples:AllGather", "--tier", "logic", "--repro", case
    )
    assert code == 0, output
