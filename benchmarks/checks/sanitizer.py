"""Run the kernels' suite on a GPU under compute-sanitizer and write a record: commit, GPU, versions, what was found.

    python benchmarks/checks/sanitizer.py --commit "$(git rev-parse HEAD)" --out kernels_sanitizer.json

The suite (`benchmarks/checks/sanitizer_suite.py`) compares results as well: a tool's verdict is "clean" if it found
nothing and all checks passed in time. The record is written after each tool; PyTorch's cache of memory is off.

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

SUITE = "benchmarks/checks/sanitizer_suite.py"
TOOLS = ("memcheck", "racecheck", "initcheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (.*)")
PASSED = re.compile(r"all (\d+) checks passed")


def run(tool: str, program: str, limit: int) -> dict[str, Any]:
    """One tool over the suite."""
    command = [program, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20", sys.executable, SUITE]
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


def main(
    commit: Annotated[str, typer.Option(help="The commit that is checked.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    tools: Annotated[str, typer.Option(help="Which tools, with commas.")] = ",".join(TOOLS),
    limit: Annotated[int, typer.Option(help="Seconds for each tool.")] = 150,
) -> None:
    """Run the tools and write the record; exits with 1 unless all are clean."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    record: dict[str, Any] = {"commit": commit, "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    record |= {"cuda": torch.version.cuda, "compute_sanitizer": version.splitlines()[-1], "suite": SUITE, "runs": []}
    subprocess.run([sys.executable, "-m", "cp_fast", "build", "--device", "cuda"], check=True)  # outside of the tools
    for tool in tools.split(","):
        entry = run(tool, program, limit)
        record["runs"].append(entry)
        out.write_text(json.dumps(record, indent=2) + "\n")
        print({name: value for name, value in entry.items() if name != "output"}, flush=True)
    if any(entry["verdict"] != "clean" for entry in record["runs"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
