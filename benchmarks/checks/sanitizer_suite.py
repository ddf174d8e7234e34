"""Every check of the kernels' suite on a few fixed cases: what `benchmarks/checks/sanitizer.py` runs under a tool.

Under compute-sanitizer the tests themselves take too long: they make and compare tensors on the GPU, by hundreds of
PyTorch's kernels of all dtypes. Here tensors are made and compared on the CPU, and come and go by plain copies: nearly
all that a GPU runs are the kernels that are looked at.

    python benchmarks/checks/sanitizer_suite.py --implementation native --device cuda
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import torch
import typer

from tests.cp_fast.kernels.checks import suite
from tests.cp_fast.kernels.checks.case import INTEGERS, Boxed
from tests.cp_fast.kernels.checks.suite import CHECKS, Case, Where

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


def main(
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
        suite.row_sizes(where, size)
        count += 1
    for heads, dim in suite.MERGED_SHAPES[:: 3 if device == "cuda" else 1]:
        suite.merged_shapes(where, heads, dim)
        count += 1
    suite.many_sequences(where, 3000)
    print(f"all {count + 1} checks passed, {time.time() - begin:.1f} s")


if __name__ == "__main__":
    typer.run(main)
