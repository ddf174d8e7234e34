"""The examples, at a small size."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import long_context
from examples import train_gpt
from tests.dist.workers import CONTEXT, run_program
from tests.marks import HANGS_S
from tests.meta.step.step_processes import StepProcesses

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]


def test_a_gpt_is_trained_alike_by_two_processes_and_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its processes are forked, as those of other programs here."""

    def forked(train: Any, given: tuple[Any, ...], nprocs: int) -> None:
        started = [CONTEXT.Process(target=train, args=(rank, *given)) for rank in range(nprocs)]
        for process in started:
            process.start()
        for process in started:
            process.join(HANGS_S)
        assert [process.exitcode for process in started] == [0] * nprocs

    monkeypatch.setattr(train_gpt, "spawn", forked)
    given = ["--processes", "2", "--steps", "4", "--tokens", "256", "--check"]
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *given])
    train_gpt.main()
    said = capsys.readouterr().out
    assert "2 processes and one: losses at most" in said
    assert "after 4 steps" in said


def test_a_megatron_layer_is_the_same_on_two_ranks_and_one() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install '.[test-integrations]'")
    said = run_program(ROOT / "examples" / "megatron_layer.py", 2, "--tokens", "128")
    assert "2 ranks and one: out and" in said


def test_a_transformer_of_video_is_the_same_on_two_ranks_and_one(steps: StepProcesses) -> None:
    pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[test-integrations]'")
    pytest.importorskip("peft", reason="needs peft: pip install '.[test-integrations]'")
    alone, two = (run_program(ROOT / "examples" / "video.py", processes) for processes in (1, 2))
    for mine, theirs in zip(two.split("\n"), alone.split("\n"), strict=True):
        assert mine.split()[:1] == theirs.split()[:1]
        numbers = [[float(word) for word in said.split()[1:]] for said in (mine, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], abs=2e-4)
    assert two.startswith("losses ")
    report = steps.compare("examples.video:build", "examples.video:batch", 2)
    assert report.right, str(report)


@pytest.mark.parametrize("documents", [1, 3])
def test_long_context_says_what_a_step_takes(documents: int) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
    program, given = ROOT / "examples" / "long_context.py", ["--tiny", "--documents", str(documents)]
    losses = []
    for more in ([], ["--no-offload"]) if documents > 1 else ([],):
        said = run_program(program, 2, *given, *more)
        assert f"256 tokens in {documents} documents" in said
        assert all(word in said for word in ("tokens/s over 2 ranks", "GFLOP/s", "peak memory", "of the step"))
        losses.append(next(line for line in said.splitlines() if line.startswith("losses")))
    alone = run_program(program, 1, *given)
    assert len({*losses}) == 1
    one = next(line for line in alone.splitlines() if line.startswith("losses")).split()[1:]
    for mine, theirs in zip(losses[0].split()[1:], one, strict=True):
        assert abs(float(mine) - float(theirs)) < 1e-3


def test_long_context_finds_the_longest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
    program = runpy.run_path(str(ROOT / "examples" / "long_context.py"))
    find = program["find_longest"]
    for limit, most in ((1000, 4096), (100, 4096), (9999, 4096)):
        monkeypatch.setitem(find.__globals__, "run_alone", lambda given, tokens, limit=limit: tokens <= limit)
        find(Namespace(tokens=256, most=most))
        found = int(capsys.readouterr().out.splitlines()[-1].removeprefix("longest: ").removesuffix(" tokens"))
        fitting = min(limit, most)
        assert fitting / (1 + 1 / 16) <= found <= fitting


def test_long_context_runs_each_length_in_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
    program = runpy.run_path(str(ROOT / "examples" / "long_context.py"))
    given = Namespace(tiny=True, no_offload=False, documents=1, layers=1, steps=1, processes=1, optimizer="adamw")
    given.cp_comm_type, given.peak_tflops = "p2p", 1.0
    run_alone: Any = program["run_alone"]

    def launched(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """What torchrun would start."""
        at = command.index(program["__file__"])
        assert command[1:at] == ["-m", "torch.distributed.run", "--nproc-per-node", "1"]
        return subprocess.CompletedProcess(command, 0, run_program(Path(command[at]), 1, *command[at + 1 :]), "")

    monkeypatch.setattr(subprocess, "run", launched)
    assert run_alone(given, 64)

    def ends_with(said: str) -> None:
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", said))

    ends_with(f"torch.{program['OUT_OF_MEMORY']}: no memory is left")
    assert not run_alone(given, 64)
    ends_with("the driver is too old")
    with pytest.raises(RuntimeError, match=r"64 tokens(?s:.*)the driver is too old"):
        run_alone(given, 64)


def test_the_notebook_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order, with a stand-in for the notebook's display."""
    shown: list[str] = []
    display: Any = ModuleType("IPython.display")
    display.SVG, display.display = str, shown.append
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    cells = json.loads((ROOT / "examples" / "pictures.ipynb").read_text())["cells"]
    program = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    exec(compile(program, "pictures.ipynb", "exec"), {"__name__": "notebook"})
    assert len(shown) == 4
    assert all(picture.startswith("<svg") and "</svg>" in picture for picture in shown)


def test_a_length_that_fails_is_a_row_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's context parallel does not run on a CPU; a second start measures what is not there yet."""
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
    out = tmp_path / "rows.json"
    given = ["long_context.py", "--out", str(out), "--tiny", "--gpus", "1", "--lengths", "64,128", "--layers", "1"]
    given.append("--libraries")
    monkeypatch.setattr(sys, "argv", [*given, "cp_fast"])
    long_context.main()
    ours = json.loads(out.read_text())["rows"]
    assert [(row["library"], row["tokens"], "error" in row) for row in ours] == [
        ("cp_fast", 64, False),
        ("cp_fast", 128, False),
    ]
    assert all(row["tokens_per_s"] > 0 and len(row["losses"]) == 2 for row in ours)
    [failed] = long_context.run_group("pytorch", [64], 1, 1, Namespace(gpus=1, tiny=True, documents=1), HANGS_S)
    assert "Error" in failed["error"]

    def run_group(library: str, lengths: list[int], *_: object) -> list[long_context.Row]:
        assert library == "pytorch"
        return [failed | {"tokens": lengths[0]}]

    monkeypatch.setattr(long_context, "run_group", run_group)
    monkeypatch.setattr(sys, "argv", [*given, "cp_fast,pytorch"])
    long_context.main()
    rows = json.loads(out.read_text())["rows"]
    assert rows == [*ours, failed, failed | {"tokens": 128}]


def test_the_longest_is_where_the_line_meets_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with 10 GiB and 1 MiB a token on a GPU of 138 GiB, 2 GiB of which PyTorch does not allocate."""

    def run_group(library: str, lengths: list[int], *_: object) -> list[long_context.Row]:
        rows: list[long_context.Row] = []
        for tokens in lengths:
            row: long_context.Row = {"library": library, "tokens": tokens, "layers": 36, "seconds": [1e-9 * tokens**2]}
            peak = 10 + tokens / 1024
            row |= {"peak_gib": peak, "reserved_gib": peak + 1, "used_gib": peak + 3, "total_gib": 138}
            rows.append(row if peak < 136 else {"library": library, "tokens": tokens, "error": "OutOfMemoryError: x"})
        return rows

    monkeypatch.setattr(long_context, "run_group", run_group)
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["long_context.py", "--out", str(out), "--longest", "--libraries", "a,b"])
    long_context.main()
    for said in json.loads(out.read_text())["longest"]:
        assert said["predicted"] == 126 * 1024
        assert "error" not in said["below"]
        assert "OutOfMemoryError" in said["above"]["error"]
