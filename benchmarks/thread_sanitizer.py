"""The native kernels for the CPU under the thread sanitizer: their tests and the fuzzer of the helpers; a record.

    python -m benchmarks.thread_sanitizer --commit "$(git rev-parse HEAD)" --out thread_sanitizer.json

The sanitizer does not see how PyTorch's pool of threads hands work over, as that is not compiled for it. So a library
is loaded first whose `torch_parallel_for` makes and joins threads for each loop. The script builds a copy of the
sources, in which even short loops are divided. First two threads play each part of a loop at once: the sanitizer has
to find this race.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

FLAGS = "-fsanitize=thread -fno-omit-frame-pointer -g1"
LOOPS = """
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>
extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t, void (*body)(int64_t, int64_t, void*),
                                      void* context) {
  static const int64_t times = std::getenv("PLANTED_RACE") ? 2 : 1;
  const int64_t part = std::max<int64_t>(1, (end - begin + 2) / 3);
  std::vector<std::thread> threads;
  for (int64_t i = begin; i < end; i += part)
    for (int64_t n = 0; n < times; n++) threads.emplace_back(body, i, std::min(end, i + part), context);
  for (auto& thread : threads) thread.join();
  return 0;
}
"""
ROOT = Path(__file__).parents[1]
COPIED = ("cp_ref", "cp_fast", "conformance", "csrc", "tests")
WORTHWHILE = "constexpr int64_t worthwhile = 1 << 18;"  # of csrc/cpu/parallel.h
TESTS = ["tests/cp_fast/kernels/test_implementations.py", "-k", "native and not many_sequences"]


def run(folder: Path, *command: str, **more: str) -> dict[str, Any]:
    """A module of Python under the sanitizer: what it said last, its exit code, and how many races were found."""
    found = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    environment = os.environ | {"LD_PRELOAD": f"{found.stdout.strip()} {folder / 'loops.so'}", "OMP_NUM_THREADS": "1"}
    options = "halt_on_error=0:exitcode=0:report_signal_unsafe=0:ignore_noninstrumented_modules=1"
    options += ":allocator_may_return_null=1:max_allocation_size_mb=256"
    environment |= {"TSAN_OPTIONS": options, "CP_FAST_KERNELS": "native", "PYTHONPATH": str(folder)} | more
    program = ["setarch", "-R", sys.executable, "-m", *command]  # the sanitizer wants addresses where it knows them
    done = subprocess.run(program, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    races = re.findall(r"^SUMMARY: ThreadSanitizer: (.*)$", done.stderr, re.MULTILINE)
    last = next(iter(reversed(done.stdout.strip().splitlines())), "")
    record: dict[str, Any] = {"command": " ".join(command), "exit_code": done.returncode, "races": len(races)}
    return record | {"said": last} | ({"first": races[:3]} if races else {})


def main(
    commit: Annotated[str, typer.Option(help="The commit that is checked.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    seconds: Annotated[int, typer.Option(help="How long the fuzzer plays.")] = 120,
) -> None:
    """Build, play, write the record; exits with 1 where a race or an error was found, or the planted race was not."""
    os.environ["CXX"] = f"g++ {FLAGS}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "pyproject.toml", folder)
        header = folder / "csrc" / "cpu" / "parallel.h"
        assert WORTHWHILE in header.read_text()
        header.write_text(header.read_text().replace(WORTHWHILE, WORTHWHILE.replace("1 << 18", "1")))
        build = [sys.executable, "-m", "cp_fast", "build", "--device", "cpu"]
        subprocess.run(build, env=os.environ | {"PYTHONPATH": str(folder)}, cwd=folder, check=True)
        (folder / "loops.cpp").write_text(LOOPS)
        command = ["g++", *FLAGS.split(), "-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", "-o"]
        subprocess.run([*command, str(folder / "loops.so"), str(folder / "loops.cpp")], check=True)
        planted = run(folder, "tests.faults.fuzz_helpers", "5", "0", PLANTED_RACE="1")
        runs = [
            run(folder, "pytest", "-q", "-p", "no:cacheprovider", *TESTS),
            run(folder, "tests.faults.fuzz_helpers", str(seconds), "0"),
        ]
    record = {"commit": commit, "built": f"g++ {FLAGS}", "planted": planted, "runs": runs}
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    if not planted["races"] or any(entry["races"] or entry["exit_code"] or not entry["said"] for entry in runs):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
