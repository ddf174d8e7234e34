"""Files that are no traces, or broken ones: refused at once, in one line, with exit code 2."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cp_ref.cli import app
from cp_ref.cli.plan import Request
from cp_ref.cli.record import run
from cp_ref.tracing.recorded_trace import Trace

runner = CliRunner()
Content = dict[str, Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "good.pt"
    run(Request("p2p", 2)).save(path)
    return path


def changed(name: str, value: Any) -> Callable[[Content], Any]:
    return lambda content: content | {name: value}


def item(**fields: Any) -> Callable[[Content], Any]:
    return lambda content: content | {"items": [content["items"][0] | fields, *content["items"][1:]]}


def header(old: str, new: str, name: str = "problem") -> Callable[[Content], Any]:
    return lambda content: content | {name: content[name].replace(old, new)}


def many_ranks(content: Content) -> Any:
    return header("cp_size 2", "cp_size 100000000", "schedule")(header("cp_size=2", "cp_size=100000000")(content))


SPOILED: list[tuple[Callable[[Content], Any], str]] = [
    (lambda content: [1, 2], "holds no trace"),
    (lambda content: {}, "problem"),
    (changed("call", "0"), "call is '0'; it must be an integer"),
    (changed("calls", {5: 1}), "rank is 5; it must be at most 1"),
    (changed("calls", [1]), "holds no trace"),
    (changed("items", 3), "holds no trace"),
    (many_ranks, "cp_size is 100000000; it must be at most 4096"),
    (header("cp_size 2", "cp_size 100000000", "schedule"), "cp_size is 100000000; a schedule has at most 4096 ranks"),
    (header("cp_size=2", "cp_size=4"), "rank schedules for 2 forward and 2 backward ranks, but cp_size is 4"),
    (header("cp_size=2", "cp_size='2'"), "cp_size is '2'; it must be an integer"),
    (header("[(8, 8, 8, 8)]", "[(8.5, 8, 8, 8)]"), "a length is 8.5; it must be an integer"),
    (header("[(8, 8, 8, 8)]", "[(10**30, 8, 8, 8)]"), "holds no trace"),
    (header("[(8, 8, 8, 8)]", f"[({10**30}, 8, {10**30}, 8)]"), "a length is 1000000000000000000000000000000"),
    (header("heads_q=2", "heads_q=0"), "heads_q is 0; it must be at least 1"),
    (header("heads_q=2", "heads_q=2, dtype='termites'"), "termites"),
    (header("q[0:2]", "q[0:900]", "schedule"), "tile 0 q[0:900]"),
    (item(step="0"), "item 0 has no meaning: step is '0'; it must be an integer"),
    (item(step=99), "step is 99; it must be at most 2"),
    (item(rank=2), "rank is 2; it must be at most 1"),
    (item(kind="stolen"), "it is 'forward' 'stolen'"),
    (item(direction=["forward"]), "item 0 has no meaning"),
    (item(name="x"), "item 0 has no meaning: 'x'"),
    (item(name=[]), "item 0 has no meaning"),
    (item(piece=(0, 2)), "item 0 has no meaning"),
    (item(piece=(0, 900, 0, 1)), "the end of its rows is 900; it must be at most 8"),
    (item(tensor=[1.0]), "its tensor is list"),
    (item(tensor=torch.ones(3)), "has shape [3]; it must have [2, 2, 8]"),
    (item(tensor=torch.ones(1).expand(2, 2, 8)), "in their order"),
    (item(tensor=torch.ones(2, 2, 8).int()), "of floating-point numbers"),
    (item(more=1), "its fields are"),
]


def refused(good: Path, path: Path) -> str:
    """The line that `compare` prints about a file. It does not read what never ends."""
    began = time.monotonic()
    result = runner.invoke(app, ["compare", str(good), str(path)])
    took = time.monotonic() - began
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    assert took < 30
    return result.stderr


@pytest.mark.parametrize(("spoil", "words"), SPOILED)
def test_traces_that_do_not_fit_together(
    good: Path, tmp_path: Path, spoil: Callable[[Content], Any], words: str
) -> None:
    content = torch.load(good, weights_only=True)
    torch.save(spoil(content), tmp_path / "spoiled.pt")
    said = refused(good, tmp_path / "spoiled.pt")
    assert f"{tmp_path / 'spoiled.pt'} holds no trace: " in said
    assert words in said


def test_what_is_no_plain_file(good: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "fifo is no plain file; a trace is saved in one" in refused(good, tmp_path / "fifo")
    assert "is no plain file" in refused(good, tmp_path)
    assert "/dev/zero is no plain file" in refused(good, Path("/dev/zero"))
    (tmp_path / "half.pt").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    assert "half.pt holds no trace: " in refused(good, tmp_path / "half.pt")


def test_what_is_saved_is_read(good: Path, tmp_path: Path) -> None:
    for number, request in enumerate(
        (Request("a2a+p2p", 4), Request("all_gather", 2, seqlens="5,3", dtype="bfloat16"))
    ):
        trace = run(request)
        trace.save(tmp_path / f"{number}.pt")
        assert str(Trace.load(tmp_path / f"{number}.pt")) == str(trace)
