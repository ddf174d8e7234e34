"""The native kernels for the CPU, built with the address and the undefined-behaviour sanitizer: their own tests, and
20 seconds of the fuzzer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import needs_cxx

SANITIZED = "g++ -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
SECONDS = "20"


def _runtime(name: str) -> Path:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    return Path(found.stdout.strip())


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Where the sanitized library is used; it is built here, as a compiler must not run under the sanitizers."""
    built = os.environ | {"CXX": SANITIZED}
    subprocess.run([sys.executable, "-m", "cp_fast", "build", "--device", "cpu"], env=built, check=True)
    preload = f"{_runtime('libasan.so')} {_runtime('libubsan.so')}"
    # a call that makes 2^31 rows is refused by the allocator, not filled: that would take nearly all of the time
    address = "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=256"
    options = {"ASAN_OPTIONS": address, "UBSAN_OPTIONS": "print_stacktrace=1"}
    return built | options | {"LD_PRELOAD": preload, "CP_FAST_KERNELS": "native", "OMP_NUM_THREADS": "2"}


pytestmark = [
    pytest.mark.faults,
    needs_cxx,
    pytest.mark.skipif(not _runtime("libasan.so").is_absolute(), reason="needs the sanitizers of GCC"),
]

KERNELS = "tests/cp_fast/kernels/test_implementations.py"
TESTS = [KERNELS, "tests/refusals/test_native.py", "-k", "not many_sequences and not torch"]


@pytest.mark.parametrize(
    "command",
    [["pytest", "-q", "-p", "no:cacheprovider", *TESTS], ["tests.faults.fuzz_helpers", SECONDS, "0"]],
    ids=["tests", "fuzzer"],
)
def test_nothing_is_found(environment: dict[str, str], command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, check=False
    )
    said = done.stdout[-2000:] + done.stderr[-4000:]
    assert done.returncode == 0, said
    assert "ERROR: AddressSanitizer" not in said
    assert "runtime error" not in said
