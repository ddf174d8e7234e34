"""Run the kernels' suite on a GPU under compute-sanitizer and write a record: commit, GPU, versions, what was found.

    python benchmarks/sanitizer.py --commit "$(git rev-parse HEAD)" --out benchmarks/results/kernels_sanitizer.json

Every tensor has memory of its own (PyTorch's cache is off), so that memcheck sees its bounds. The suite compares
results as well: a tool's verdict is "clean" if it found nothing and all tests passed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

SUITE = "tests/gpu/test_kernels_gpu.py"
TESTS = "native and (properties or row_sizes or many_sequences)"
TOOLS = ("memcheck", "racecheck", "initcheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (.*)")
PASSED = re.compile(r"(\d+) passed")


def run(tool: str, program: str, examples: int) -> dict[str, Any]:
    """One tool over the suite."""
    command = [program, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20"]
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", SUITE, "-k", TESTS]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CP_KERNEL_EXAMPLES": str(examples)}
    begin = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    text = done.stdout + done.stderr
    found, passed = SUMMARY.findall(text), PASSED.search(text)
    count = int(found[-1][0]) if found else -1
    clean = done.returncode == 0 and count == 0 and passed is not None
    record = {"tool": tool, "verdict": "clean" if clean else "not clean", "found": count}
    record |= {"summary": " ".join(found[-1]) if found else "", "tests_passed": int(passed[1]) if passed else 0}
    record |= {"exit_code": done.returncode, "seconds": round(time.time() - begin, 1)}
    return record if clean else record | {"output": text[-6000:]}


def main(
    commit: Annotated[str, typer.Option(help="The commit that is checked.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    examples: Annotated[int, typer.Option(help="Drawn cases of each check.")] = 6,
    tools: Annotated[str, typer.Option(help="Which tools, with commas.")] = ",".join(TOOLS),
) -> None:
    """Run the tools and write the record; exits with 1 unless all are clean."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    record: dict[str, Any] = {"commit": commit, "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    record |= {
        "cuda": torch.version.cuda,
        "compute_sanitizer": version.splitlines()[-1],
        "suite": SUITE,
        "tests": TESTS,
    }
    record["runs"] = [run(tool, program, examples) for tool in tools.split(",")]
    out.write_text(json.dumps(record, indent=2) + "\n")
    for entry in record["runs"]:
        print({name: value for name, value in entry.items() if name != "output"})
    if any(entry["verdict"] != "clean" for entry in record["runs"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
