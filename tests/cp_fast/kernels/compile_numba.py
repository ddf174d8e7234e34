"""Compile Numba's kernels to PTX without a GPU. A script, run by `test_numba.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numba.cuda.dispatcher
from numba import cuda, types

from cp_fast.movers.mover_protocol import KINDS
from cp_fast.movers.numba_cuda.kernels import indices_kernel, move_kernel, pairs_kernel, weigh_kernel

SM_90 = (9, 0)
INT = types.int64


def tuple_of(count: int) -> Any:
    return types.UniTuple(INT, count)


def compiled(kernel: Any, *arguments: Any) -> str:
    compile_ptx: Any = vars(cuda)["compile_ptx"]
    return compile_ptx(kernel.py_func, types.void(*arguments), cc=SM_90)[0]


def main() -> None:
    # device functions ask the current GPU what to compile for
    setattr(numba.cuda.dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=SM_90))  # noqa: B010
    plan = tuple_of(8)
    for kind in KINDS[:-1]:
        for size in (1, 16) if kind == "index" else (16,):
            text = compiled(move_kernel("name", kind, False, size), tuple_of(20), plan, INT, INT)
            assert ("ld.global.v4.u32" in text) == (size == 16)
            assert ("__assertfail" in text) == (kind != "span")
    for dtypes in (("f32", "bf16"), ("bf16", "f64")):
        wide = "f64" if "f64" in dtypes else "f32"
        for width in (1, 4) if wide == "f64" else (4,):
            for kind in ("span", "index", "half", "in_half", "valid"):
                compiled(
                    pairs_kernel("name", kind, kind != "valid", *dtypes, wide, width), tuple_of(10), plan, INT, INT
                )
        for kind in ("span", "index", "half", "valid"):
            ends = tuple_of(6), tuple_of(3), tuple_of(5), tuple_of(5)
            text = compiled(weigh_kernel("name", kind, False, *dtypes, "f32", "f32", 4), plan, INT, *ends)
            assert wide == "f64" or "fma.rn.f64" not in text, "a double has crept in"
    for kind in ("slice", "half", "unpad"):
        compiled(indices_kernel("name", kind, 4), INT, plan, INT)


if __name__ == "__main__":
    main()
