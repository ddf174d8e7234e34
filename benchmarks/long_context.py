"""Training steps of long sequences on two GPUs, by this project and by other libraries, and each one's longest.

    python -m benchmarks.long_context --out long_context.json --commit "$(git rev-parse HEAD)"
    python -m benchmarks.long_context --out long_context.json --lengths 524288 --layers 2        # adds its rows
    python -m benchmarks.long_context --out long_context.json --documents 100 --libraries cp_fast+balanced,accelerate \
        --lengths 131072
    python -m benchmarks.long_context --out long_context.json --longest                          # with all 36 layers
    python -m benchmarks.long_context --out /tmp/rows.json --tiny --lengths 256 --libraries cp_fast

`long_context_step.py` says what the libraries are. One process group of a library takes a list of lengths. A length
that fails, or that takes longer than its share of `--budget-seconds`, is a row with its error; a new process group
takes the lengths after it, unless memory ended. The file is written after each process group, and rows that it has are
not measured again.

The longest sequence: the peak memory at two lengths gives a straight line, which meets the GPU's memory at a length.
One step a little below it must fit, one above it must not; neither is tried where it would take too long.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

STEP = Path(__file__).parent / "parts" / "long_context_step.py"
LIBRARIES = "cp_fast,accelerate,ring_flash_attn,accelerate+own_loss"
LENGTHS = "65536,131072,262144"
MEMORY_LENGTHS = (32768, 65536)  # of --longest
ALL_LAYERS = 36
BELOW, ABOVE = 0.95, 1.08  # of the predicted longest length
GRAIN = 2048  # lengths are multiples of it
Row = dict[str, Any]


def run_group(library: str, lengths: list[int], layers: int, steps: int, given: Any, seconds: float) -> list[Row]:
    """The rows of the lengths up to the first that fails, whose row has the error."""
    with tempfile.NamedTemporaryFile("r") as rows:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(given.gpus), str(STEP)]
        command += ["--library", library, "--lengths", ",".join(map(str, lengths)), "--out", rows.name]
        command += ["--documents", str(given.documents)]
        command += ["--layers", str(layers), "--steps", str(steps), *(["--tiny"] if given.tiny else [])]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            said = process.communicate(timeout=max(seconds, 1))[1]
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # torchrun then ends its ranks, which are sessions of their own
            process.communicate()
            said = f"TimeoutError: not done in {seconds:.0f} s"
        found = [json.loads(line) for line in rows.read().splitlines()]
    if len(found) < len(lengths):
        found.append({"library": library, "tokens": lengths[len(found)], "layers": layers, "error": error_of(said)})
    return found


def error_of(said: str) -> str:
    """The first line that names an error of a rank.

    >>> error_of("Traceback\\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried\\nChildFailedError: all")
    'torch.OutOfMemoryError: CUDA out of memory. Tried'
    """
    lines = [line.split("]: ")[-1].strip() for line in said.splitlines() if "Error: " in line or "Error:" in line[-7:]]
    return next((line[:400] for line in lines if "ChildFailedError" not in line), said[-400:])


def out_of_memory(row: Row) -> bool:
    return "OutOfMemoryError" in row.get("error", "") or "out of memory" in row.get("error", "")


class Record:
    """The record's file."""

    def __init__(self, path: Path, commit: str) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": [], "longest": []}
        versions = {}
        for name in ("torch", "transformers", "accelerate", "ring-flash-attn", "flash-attn-4", "liger-kernel"):
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = None
        self.data |= {"commit": commit, "versions": versions, "what": "benchmarks/long_context.py", "gpus": gpus()}

    def add(self, rows: list[Row], where: str = "rows") -> None:
        self.data[where] += rows
        fields = [f" {json.dumps(key)}: {json.dumps(x)}" for key, x in self.data.items() if not isinstance(x, list)]
        for key in ("rows", "longest"):
            lines = ",\n".join(f"  {json.dumps(row)}" for row in self.data[key])
            fields.append(f" {json.dumps(key)}: [\n{lines}\n ]" if lines else f" {json.dumps(key)}: []")
        self.path.write_text("{\n" + ",\n".join(fields) + "\n}\n")
        for row in rows:
            print({key: value for key, value in row.items() if key != "memory"}, flush=True)

    def has(self, library: str, tokens: int, given: Any) -> bool:
        key = (library, tokens, given.layers, given.documents)
        rows = self.data["rows"]
        return any((row["library"], row["tokens"], row["layers"], row.get("documents", 1)) == key for row in rows)


def gpus() -> str:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().replace("\n", "; ")
    except (OSError, subprocess.CalledProcessError):
        return "none"


def measure(record: Record, given: Any, libraries: list[str], ends: float) -> None:
    """All lengths of each library. A library has an equal share of the time that is left."""
    for number, library in enumerate(libraries):
        ended = time.monotonic() + (ends - time.monotonic()) / (len(libraries) - number)
        left = [n for n in map(int, given.lengths.split(",")) if not record.has(library, n, given)]
        while left:
            rows = run_group(library, left, given.layers, given.steps, given, ended - time.monotonic())
            left = left[len(rows) :]
            if left and (out_of_memory(rows[-1]) or ended - time.monotonic() < 10):
                why = f"not run after this: {rows[-1].get('error', 'no time left')}"
                rows += [{"library": library, "tokens": n, "layers": given.layers, "error": why} for n in left]
                left = []
            record.add(rows)


def straight(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The two numbers a and b of the line a + b * x through two points.

    >>> straight([(1, 5), (3, 9)])
    (3.0, 2.0)
    """
    (x, y), (z, w) = points
    slope = (w - y) / (z - x)
    return y - slope * x, slope


def longest(record: Record, given: Any, libraries: list[str], ends: float) -> None:
    """Predict each library's longest sequence with all layers, and try one a little shorter and one longer."""
    for number, library in enumerate(libraries):
        ended = time.monotonic() + (ends - time.monotonic()) / (len(libraries) - number)
        rows = run_group(library, list(MEMORY_LENGTHS), given.layers, 1, given, ended - time.monotonic())
        record.add(rows)
        if len(rows) < len(MEMORY_LENGTHS) or "error" in rows[-1]:
            record.add([{"library": library, "layers": given.layers, "error": rows[-1].get("error")}], "longest")
            continue
        # What PyTorch does not allocate counts too: CUDA's and NCCL's memory, and the staging buffers of messages.
        peaks = [(row["tokens"], row["peak_gib"] + row["used_gib"] - row["reserved_gib"]) for row in rows]
        fixed, slope = straight(peaks)
        predicted = int((rows[0]["total_gib"] - fixed) / slope)
        said: Row = {"library": library, "layers": given.layers, "predicted": predicted}
        said |= {"fixed_gib": round(fixed, 2), "bytes_per_token": round(slope * 2**30)}
        per, per_pair = straight([(row["tokens"], row["seconds"][-1] / row["tokens"]) for row in rows])
        for name, share in (("below", BELOW), ("above", ABOVE)):
            tokens = int(predicted * share) // GRAIN * GRAIN
            expected = 40 + 1.2 * tokens * (per + max(per_pair, 0) * tokens)
            if expected > ended - time.monotonic():
                said[name] = {"tokens": tokens, "not_run": f"a step would take about {expected:.0f} s"}
                continue
            row = run_group(library, [tokens], given.layers, 1, given, ended - time.monotonic())[0]
            said[name] = {key: x for key, x in row.items() if key not in ("memory", "library", "layers")}
        record.add([said], "longest")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a JSON file; rows are added to it")
    parser.add_argument("--commit", default="")
    parser.add_argument("--libraries", default=LIBRARIES)
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--layers", type=int, default=0, help="0: 4, and all 36 with --longest")
    parser.add_argument("--documents", type=int, default=1, help="packed, or padded by libraries that cannot pack")
    parser.add_argument("--steps", type=int, default=2, help="of each length; the first is not measured")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--budget-seconds", type=float, default=560)
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    given = parser.parse_args()
    given.layers = given.layers or (ALL_LAYERS if given.longest else 4)
    ends = time.monotonic() + given.budget_seconds
    (longest if given.longest else measure)(Record(given.out, given.commit), given, given.libraries.split(","), ends)


if __name__ == "__main__":
    main()
