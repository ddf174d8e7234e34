"""What sums and merges have to do: bits where a sum is rounded once, else within the rounding of the stored dtype."""

from __future__ import annotations

import torch

import cp_fast
import cp_ref
from tests.cp_fast.kernels.checks.case import FLOATS, INF, NAN, NEAR, Case, Where, lse_shape, once, rows_of


def lse_corrections(where: Where, case: Case) -> None:
    cu = where.lengths(case.cu, case.length_dtype)
    for packed in (True, False):
        for dtype, step_dtype in ((torch.float32,) * 2, (torch.float64, torch.float32)):
            lse = case.lse(*lse_shape(case, packed), dtype=dtype)
            step = case.lse(*lse_shape(case, packed, half=True), dtype=step_dtype)
            box, of_step = case.boxed(where, lse), case.boxed(where, step)
            with where.use():
                cp_fast.thd.thd_second_half_lse_correction(box.view, of_step.view, cu, packed)
            want = lse.clone()
            cp_ref.thd.thd_second_half_lse_correction(want, step, case.cu, packed)
            box.assert_holds(want, NEAR[dtype])
            of_step.assert_holds(step)


def out_corrections(where: Where, case: Case) -> None:
    heads, dim = case.shape if len(case.shape) == 2 else (2, 4)
    cu, dtype, step_dtype = where.lengths(case.cu, case.length_dtype), FLOATS[case.seed % 4], FLOATS[case.seed // 4 % 4]
    for packed, half in ((True, True), (True, False), (False, True), (False, False)):
        lse = case.lse(*lse_shape(case, packed, heads=heads)).abs() + 3  # final: not empty, not below a step's
        step_lse = case.lse(*lse_shape(case, packed, half, heads)) / 3
        out = case.random(case.tokens, heads, dim, dtype=dtype)
        step = case.random(case.tokens // 2 if half else case.tokens, heads, dim, dtype=step_dtype)
        if packed:
            step[step_lse.t() == -INF] = NAN
        lse[lse == INF] = 5.0
        boxes = [case.boxed(where, x) for x in (out, step, lse, step_lse)]
        with where.use():
            views = [box.view for box in boxes]
            cp_fast.thd.thd_out_correction(views[0], views[1], views[2], views[3], cu, half, packed)
        want = out.double()
        cp_ref.thd.thd_out_correction(want, step, lse, step_lse, case.cu, half, packed)
        boxes[0].assert_holds(want.to(dtype), NEAR[dtype])


def grad_corrections(where: Where, case: Case) -> None:
    cu, dtype, step_dtype = where.lengths(case.cu, case.length_dtype), FLOATS[case.seed % 4], FLOATS[case.seed // 4 % 4]
    actions = ("add", "copy", "none")
    first, second = actions[case.seed % 3], actions[case.seed // 3 % 3]
    sizes = [case.tokens // 2] if "none" in (first, second) else [case.tokens]
    for tokens in [*sizes, *([case.tokens] if first == second == "none" else [])]:
        for shape in ((case.tokens, *case.shape), (2, case.tokens, 2, 3)):
            axis = int(len(shape) == 4)
            grad = case.random(*shape, dtype=dtype)
            step = case.random(*shape[:axis], tokens, *shape[axis + 1 :], dtype=step_dtype)
            box = case.boxed(where, grad)
            with where.use():
                step_view = case.boxed(where, step).view
                cp_fast.thd.thd_grad_correction(box.view, step_view, cu, first, second)
            want = grad.clone()
            cp_ref.thd.thd_grad_correction(want, step, case.cu, first, second)
            box.assert_holds(want, once(dtype, step_dtype))


def merged(
    out: torch.Tensor, lse: torch.Tensor, step: torch.Tensor, step_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float64: out, step [n, h, d], lse [n, h]."""
    out, lse, step, step_lse = (x.double() for x in (out, lse, step, step_lse))
    new = torch.logaddexp(lse, step_lse)
    parts = [
        torch.where((x == -INF)[..., None], 0.0, torch.exp(x - new)[..., None] * y)
        for x, y in ((lse, out), (step_lse, step))
    ]
    return parts[0] + parts[1], new


def merges(where: Where, case: Case) -> None:
    """Rows that were never written hold NaN; a step's empty rows too."""
    heads, dim = case.shape if len(case.shape) == 2 else (2, 4)
    step_dtype = FLOATS[case.seed % 4]
    dtype = FLOATS[case.seed // 4 % 4]
    lse = case.lse(heads, case.tokens, dtype=torch.float64 if case.seed % 3 == 0 else torch.float32)
    out = case.random(case.tokens, heads, dim, dtype=dtype)
    out[lse.t() == -INF] = NAN
    for rows, index in rows_of(case, where, case.tokens):
        step, step_lse = case.random(len(index), heads, dim, dtype=step_dtype), case.lse(heads, len(index))
        step[step_lse.t() == -INF] = NAN
        boxes = [case.boxed(where, x) for x in (out, lse, step, step_lse)]
        views = [box.view for box in boxes]
        where.kernels.merge_(views[0], views[1], views[2], views[3], rows)
        want_out, want_lse = out.clone(), lse.clone()
        new_out, new_lse = merged(out[index], lse.t()[index], step, step_lse.t())
        want_out[index], want_lse.t()[index] = new_out.to(dtype), new_lse.to(lse.dtype)
        boxes[0].assert_holds(want_out, NEAR[dtype])
        boxes[1].assert_holds(want_lse, NEAR[lse.dtype])


def additions(where: Where, case: Case) -> None:
    """Two pairs in one call, of any float dtypes: sums are wide, and rounded once."""
    dtype, step_dtype = FLOATS[case.seed % 4], FLOATS[case.seed // 4 % 4]
    for rows, index in rows_of(case, where, case.tokens):
        shapes = (case.shape, (2, 3))
        outs = [case.random(case.tokens, *shape, dtype=dtype) for shape in shapes]
        xs = [case.random(len(index), *shape, dtype=step_dtype) for shape in shapes]
        boxes = [case.boxed(where, out) for out in outs]
        steps = [case.boxed(where, x).view for x in xs]
        where.kernels.scatter_([box.view for box in boxes], steps, rows, add=True)
        wide = torch.float64 if torch.float64 in (dtype, step_dtype) else torch.float32
        for box, out, x in zip(boxes, outs, xs, strict=True):
            want = out.clone()
            want[index] = (out[index].to(wide) + x.to(wide)).to(dtype)
            box.assert_holds(want, once(dtype, step_dtype))
