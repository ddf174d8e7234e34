"""What sums hold: partial results by log-sum-exp or by addition, wide only where more than two of them meet."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_fast.compile.program import OWN, Accumulate, Accumulations, BufferSpec, Copy, View
from cp_fast.kernels.attention.backend_protocol import LaunchOptions
from cp_fast.movers.mover_protocol import Rows
from cp_fast.movers.select_movers import movers_for
from cp_fast.movers.torch_movers import log_add_exp
from cp_fast.runtime.operations import accumulate, copy
from cp_fast.runtime.pass_buffers import PassBuffers, Shapes, State, Tensors
from cp_ref.groups.group import PaperGroup
from cp_ref.schedules.problem import ScoreSpec

CPU, WIDE, HALF = torch.device("cpu"), torch.float32, torch.bfloat16
NOTHING = -float("inf")
DIMS = {"out": (4,), "dq": (4,), "dkv": (4, 3)}
ROWS, HEADS = 6, (0, 2)
SUM, RESULT, FIRST_PART = len(OWN), len(OWN) + 1, len(OWN) + 2


@dataclass
class Part:
    """A partial result, and where it goes."""

    tensors: Tensors
    rows: Rows
    heads: tuple[int, int] = HEADS


def result(
    parts: list[Part],
    kind: str,
    *,
    final: torch.dtype = HALF,
    wide: bool = False,
    spare: int = 0,
    sink: torch.Tensor | None = None,
) -> tuple[Tensors, Tensors | None]:
    """The result of a sum of these in `final`, and what the sum held before it was rounded. `wide`: that of a sum
    which is sent, or to which a sink is still to be added.
    """
    specs = [BufferSpec(name, name, HEADS, None, "own") for name in OWN]
    specs.append(BufferSpec("sum", kind, HEADS, ROWS, "sum", "wide" if wide else "input"))
    specs.append(BufferSpec("result", kind, HEADS, ROWS, "message"))
    specs += [BufferSpec("part", kind, part.heads, None, "partial") for part in parts]
    dtypes = {kind: (final,) * len(dims) for kind, dims in DIMS.items()}
    axes = {kind: [(-1, d) for d in dims] for kind, dims in DIMS.items()}
    shapes = Shapes(dict.fromkeys(DIMS, ROWS), axes, dtypes, CPU, spare, frozenset({"res", "out"}))
    buffers = PassBuffers(specs, shapes, movers_for("cpu"), frozenset({RESULT}), frozenset())
    state = State([None] * len(specs), PaperGroup(1, 0), LaunchOptions(ScoreSpec(1.0, 0.0)))
    every = list[Accumulate[Rows]]()
    for n, part in enumerate(parts):
        state.buffers[FIRST_PART + n] = part.tensors
        source: View[Rows] = View(
            FIRST_PART + n, slice(0, part.tensors.rows[0].shape[0]), (0, part.heads[1] - part.heads[0])
        )
        every.append(Accumulate(0, source, View(SUM, part.rows, part.heads)))
    of = Accumulations.of(specs[SUM], every)
    for one in every:
        accumulate(buffers, one, of=of)(state)
    if sink is not None:
        state.buffers[OWN["sink"]] = sink
        views: tuple[View[Rows], View[Rows]] = View(OWN["sink"], None, HEADS), View(SUM, None, HEADS)
        accumulate(buffers, Accumulate(0, *views, of_sink=True), of=None)(state)
    held = state.buffers[SUM]
    copy(buffers, [Copy(0, View(SUM, None, HEADS), View(RESULT, None, HEADS))])(state)
    return state.buffers[RESULT], held


def drawn_parts(count: int, *, outs: bool) -> list[Part]:
    """Partial results of all rows, then of rows 2 to 4."""
    generator = torch.Generator().manual_seed(count)
    found: list[Part] = []
    for into in [slice(0, ROWS)] + [slice(2, 5)] * (count - 1):
        n = into.stop - into.start
        rows = torch.randn(n, 2, 4, generator=generator).to(HALF)
        columns = [torch.randn(2, n, generator=generator)] if outs else []
        found.append(Part(Tensors([rows], columns), into))
    return found


def merged_exactly(given: list[Part], sink: torch.Tensor | None = None) -> torch.Tensor:
    """The merged output in float64."""
    total, weight = torch.zeros(ROWS, 2, 4, dtype=torch.float64), torch.zeros(ROWS, 2, 1, dtype=torch.float64)
    for part in given:
        (rows,), (lse,) = part.tensors
        share = lse.double().exp().t().unsqueeze(-1)
        total[part.rows, slice(*part.heads)] += rows.double() * share
        weight[part.rows, slice(*part.heads)] += share
    return total / (weight if sink is None else weight + sink.double().exp()[:, None])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_outputs(count: int, wide: bool) -> None:
    given = drawn_parts(count, outs=True)
    want = merged_exactly(given)
    ((out,), (lse,)), held = result(given, "out", wide=wide)
    assert held is not None
    assert held.rows[0].dtype == (HALF if count == 1 or (count == 2 and not wide) else WIDE)
    assert (out.dtype, lse.dtype) == (HALF, WIDE)
    torch.testing.assert_close(out, want.to(HALF), rtol=2**-7, atol=0)  # rounded once: at most the neighbour
    assert (held.rows[0].double() - want).abs().mean() <= 2**-9 * want.abs().mean()


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_gradients(count: int) -> None:
    given = drawn_parts(max(count, 1), outs=False)[:count]
    want = torch.zeros(ROWS, 2, 4, dtype=torch.float64)
    for part in given:
        want[part.rows] += part.tensors.rows[0].double()
    ((dq,), columns), held = result(given, "dq")
    assert not columns
    assert held is None if not count else held is not None
    if held is not None:
        assert held.rows[0].dtype == (HALF if count in (1, 2) else WIDE)
    assert torch.equal(dq, want.to(HALF))


@pytest.mark.parametrize("starts", [(0, 3), (3, 0), (0, 3, 3, 0), (3, 0, 0)])
def test_rows_with_two_partial_results(starts: tuple[int, ...]) -> None:
    """However many the sum has: rows that are new are written, and the sum is not widened."""
    given = drawn_parts(len(starts), outs=True)
    for part, start in zip(given, starts, strict=True):
        part.tensors = Tensors([x[:3] for x in part.tensors.rows], [x[:, :3] for x in part.tensors.columns])
        part.rows = slice(start, start + 3)
    ((out,), (lse,)), held = result(given, "out")
    assert held is not None
    assert held.rows[0].dtype == HALF
    torch.testing.assert_close(out, merged_exactly(given).to(HALF), rtol=2**-7, atol=0)
    assert bool(lse.isfinite().all())


def test_new_rows_in_another_dtype() -> None:
    """The sum is then widened, and not rounded before the end."""
    first, second, third = drawn_parts(3, outs=True)
    for part, start in ((first, 0), (second, 3), (third, 3)):
        part.tensors = Tensors([x[:3] for x in part.tensors.rows], [x[:, :3] for x in part.tensors.columns])
        part.rows = slice(start, start + 3)
    second.tensors = Tensors([x.float() / 3 for x in second.tensors.rows], second.tensors.columns)
    ((out,), _), held = result([first, second, third], "out")
    assert held is not None
    assert held.rows[0].dtype == WIDE
    torch.testing.assert_close(out, merged_exactly([first, second, third]).to(HALF), rtol=2**-7, atol=0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_sink_is_one_more_term(count: int) -> None:
    given, sink = drawn_parts(count, outs=True), torch.tensor([0.5, NOTHING])
    want = merged_exactly(given, sink)
    ((out,), _), _ = result(given, "out", wide=True, sink=sink)
    torch.testing.assert_close(out, want.to(HALF), rtol=2**-7, atol=0)


def test_rows_that_nobody_saw() -> None:
    part = drawn_parts(2, outs=True)[1]
    (rows,), (part_lse,) = part.tensors
    ((got,), (lse,)), _ = result([part], "out")
    assert torch.equal(got[2:5], rows)
    assert not got[:2].any()
    assert not got[5:].any()
    assert torch.equal(lse[:, 2:5], part_lse)
    assert bool((lse[:, [0, 1, 5]] == NOTHING).all())


def test_heads_that_nobody_saw() -> None:
    """Partial results of some heads are not all of the sum: nothing of theirs is taken for the other heads."""
    (whole,) = drawn_parts(1, outs=True)
    (rows,), (lse_of_all,) = whole.tensors
    some = Part(Tensors([rows[:, 1:].contiguous()], [lse_of_all[1:].contiguous()]), slice(0, ROWS), (1, 2))
    ((got,), (lse,)), _ = result([some], "out")
    assert got.shape == (ROWS, 2, 4)
    assert torch.equal(got[:, 1:], rows[:, 1:])
    assert not got[:, :1].any()
    assert bool((lse[:1] == NOTHING).all())


def test_the_spare_row_is_never_part_of_the_result() -> None:
    into = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6], dtype=torch.int32)
    ((got,), _), held = result([Part(Tensors([torch.ones(8, 2, 4)], []), into)], "dq", final=WIDE, spare=1)
    assert held is not None
    assert len(held.rows[0]) == ROWS + 1
    assert torch.equal(got, torch.ones(ROWS, 2, 4))


def test_the_first_partial_result_of_all_rows_is_the_sum() -> None:
    """Nothing is added, widened or allocated for it."""
    wide, half = torch.full((ROWS, 2, 4), 2.0), torch.ones(ROWS, 2, 4, dtype=HALF)
    given = [Part(Tensors([rows], []), slice(0, ROWS)) for rows in (wide, half)]
    ((got,), _), held = result(given, "dq", final=WIDE)
    assert held is not None
    assert got.data_ptr() == held.rows[0].data_ptr() == wide.data_ptr()
    assert torch.equal(got, torch.full((ROWS, 2, 4), 3.0))


@st.composite
def some_parts(draw: st.DrawFn) -> list[tuple[list[int], tuple[int, int]]]:
    """Distinct rows, and heads: partial results in any order."""
    rows = st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True)
    rows = st.one_of(rows, st.just([0, 1, 2, 3, 4, 5]))
    return draw(st.lists(st.tuples(rows, st.sampled_from([(0, 2), (0, 1), (1, 2)])), max_size=5))


@given(some_parts(), st.sampled_from(["out", "dkv"]), st.integers(0, 2**16))
def test_any_parts_in_float64(drawn: list[tuple[list[int], tuple[int, int]]], kind: str, seed: int) -> None:
    """Whatever rows and heads partial results have, the sum is what the formula says."""
    generator = torch.Generator().manual_seed(seed)
    want = [torch.zeros(ROWS, 2, d, dtype=torch.float64) for d in DIMS[kind]]
    weight = torch.zeros(ROWS, 2, dtype=torch.float64)
    parts: list[Part] = []
    for rows, heads in drawn:
        count, where = heads[1] - heads[0], slice(*heads)
        tensors = [torch.randn(len(rows), count, d, generator=generator, dtype=torch.float64) for d in DIMS[kind]]
        lse = torch.randn(count, len(rows), generator=generator, dtype=torch.float64)
        share = lse.exp().t() if kind == "out" else torch.ones(len(rows), count, dtype=torch.float64)
        for into, x in zip(want, tensors, strict=True):
            into[rows, where] += x * share[..., None]
        weight[rows, where] += share
        contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
        target = slice(rows[0], rows[0] + len(rows)) if contiguous else torch.tensor(rows, dtype=torch.int32)
        parts.append(Part(Tensors(tensors, [lse] if kind == "out" else []), target, heads))
    got, _ = result(parts, kind, final=torch.float64)
    if kind == "out":
        want = [torch.where(weight[..., None] > 0, x / weight[..., None], 0.0) for x in want]
        torch.testing.assert_close(got.columns[0], weight.log().t())
    for mine, theirs in zip(got.rows, want, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_of_two_exponentials_has_the_same_bits_wherever_it_stands(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 200, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 3
    whole = log_add_exp(a, b)
    torch.testing.assert_close(whole, torch.logaddexp(a, b))
    for stop in range(1, 200):
        assert torch.equal(log_add_exp(a[:stop], b[:stop]), whole[:stop])
