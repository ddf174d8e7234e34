"""Run the kernels' suite on a GPU under compute-sanitizer and write a record: commit, GPU, versions, what was found.

    python -m benchmarks.checks.sanitizer record --commit "$(git rev-parse HEAD)" --out kernels_sanitizer.json
    python -m benchmarks.checks.sanitizer suite --implementation native --device cpu    # the suite alone, under no tool

The suite compares results as well: a tool's verdict is "clean" if it found nothing and all checks passed in time. The
record is written after each tool; PyTorch's cache of memory is off.

It takes a compute-sanitizer of 2026.4 or later, such as the package nvidia-cuda-sanitizer-api has, first on the PATH.
Older ones do not know the copy engine: up to 2025.3 racecheck warns of every wait for its arrival, and initcheck takes
what it wrote for not written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tests.cp_fast.kernels.checks import suite as checks
from tests.cp_fast.kernels.checks.case import INTEGERS, Boxed
from tests.cp_fast.kernels.checks.suite import CHECKS, Case, Where

app = typer.Typer(add_completion=False)
SUITE = ("benchmarks/checks/sanitizer.py", "suite")
TOOLS = ("memcheck", "racecheck", "initcheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (.*)")
PASSED = re.compile(r"all (\d+) checks passed")


def _run(tool: str, program: str, limit: int) -> dict[str, Any]:
    """One tool over the suite."""
    command = [program, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20", sys.executable, *SUITE]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    begin, code = time.time(), None
    with tempfile.TemporaryFile("w+") as log:  # what was written before a time-out counts
        try:
            code = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            print(f"{tool}: not done after {limit} s", flush=True)
        log.seek(0)
        text = log.read()
    found, passed = SUMMARY.findall(text), PASSED.search(text)
    count = int(found[-1][0]) if found else -1
    clean = code == 0 and count == 0 and passed is not None
    record = {"tool": tool, "verdict": "clean" if clean else "not clean", "found": count}
    record |= {"summary": " ".join(found[-1]) if found else "", "checks_passed": int(passed[1]) if passed else 0}
    record |= {"exit_code": code, "seconds": round(time.time() - begin, 1)}
    return record if clean else record | {"output": text[-6000:]}


@app.command()
def record(
    commit: Annotated[str, typer.Option(help="The commit that is checked.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    tools: Annotated[str, typer.Option(help="Which tools, with commas.")] = ",".join(TOOLS),
    limit: Annotated[int, typer.Option(help="Seconds for each tool.")] = 150,
) -> None:
    """Run the tools and write the record; exits with 1 unless all are clean."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    found: dict[str, Any] = {"commit": commit, "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    found |= {
        "cuda": torch.version.cuda,
        "compute_sanitizer": version.splitlines()[-1],
        "suite": " ".join(SUITE),
        "runs": [],
    }
    subprocess.run([sys.executable, "-m", "cp_fast", "build", "--device", "cuda"], check=True)  # outside of the tools
    for tool in tools.split(","):
        entry = _run(tool, program, limit)
        found["runs"].append(entry)
        out.write_text(json.dumps(found, indent=2) + "\n")
        print({name: value for name, value in entry.items() if name != "output"}, flush=True)
    if any(entry["verdict"] != "clean" for entry in found["runs"]):
        raise typer.Exit(1)


# ---- the suite: every check of the kernels on a few fixed cases
#
# Under compute-sanitizer the tests themselves take too long: they make and compare tensors on the GPU, by hundreds of
# PyTorch's kernels of all dtypes. Here tensors are made and compared on the CPU, and come and go by plain copies:
# nearly all that a GPU runs are the kernels that are looked at.


BF16, F32, F16, U8 = torch.bfloat16, torch.float32, torch.float16, torch.uint8

# Odd sizes: rows of 1 to 4,096 bytes, gaps, odd offsets, empty sequences, tails, both widths of lengths.
CASES = [
    Case(2, (3, 0, 1, 2), (11, 0, 4, 5), 1, (3, 12), (BF16, F32), torch.int32, (0, 0), 0, 2),
    Case(4, (1, 2), (7, 16), 0, (40, 8), (F32, U8), torch.int64, (8, 4), 4, 9),
    Case(3, (0, 2, 0, 1), (0, 12, 0, 3), 2, (5,), (F16, torch.int64), torch.int32, (3, 1), 1, 7),
    Case(1, (4, 5), (3, 10), 1, (16, 64), (BF16, BF16), torch.int32, (16, 8), 8, 12),
    Case(2, (70, 1, 0, 30), (280, 1, 0, 101), 0, (1, 128), (F32, F16), torch.int64, (0, 0), 0, 18),
]
ROW_SIZES = (1, 6, 18, 64, 2048, 4098, 8192)


make_box, look_into_box = Boxed.of, Boxed.assert_holds


def of(x: torch.Tensor, device: str, gaps: tuple[int, ...] = (), offset: int = 0) -> Boxed:
    """`Boxed.of`, filled on the CPU."""
    made = make_box(x, "cpu", gaps, offset)
    buffer = made.buffer.to(device)
    return Boxed(buffer, buffer.as_strided(made.view.shape, made.view.stride(), offset))


def assert_holds(self: Boxed, want: torch.Tensor, near: dict[str, Any] | None = None) -> None:
    """`Boxed.assert_holds`, looked at on the CPU."""
    buffer = self.buffer.view(INTEGERS[self.buffer.element_size()]).cpu().view(self.buffer.dtype)
    view = buffer.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
    look_into_box(Boxed(buffer, view), want, near)


@app.command()
def suite(
    implementation: Annotated[str, typer.Option(help="Whose kernels.")] = "native",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
) -> None:
    """Run all checks; the last line counts them."""
    Boxed.of, Boxed.assert_holds = staticmethod(of), assert_holds
    where, begin, count = Where(implementation, device), time.time(), 0
    for name, check in CHECKS.items():
        for case in CASES:
            check(where, case)
            count += 1
        print(f"{name} {time.time() - begin:.1f} s", flush=True)
    for size in ROW_SIZES:
        checks.row_sizes(where, size)
        count += 1
    for heads, dim in checks.MERGED_SHAPES[:: 3 if device == "cuda" else 1]:
        checks.merged_shapes(where, heads, dim)
        count += 1
    checks.many_sequences(where, 3000)
    print(f"all {count + 1} checks passed, {time.time() - begin:.1f} s")


if __name__ == "__main__":
    app()
