"""The kernels on a GPU: the suite of every implementation, rows of any size, graphs, streams, large tensors, faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings

from cp_fast.movers.mover_protocol import RowRule
from cp_fast.movers.select_movers import movers_for, why_not
from tests.cp_fast.kernels.checks.suite import (
    CHECKS,
    MERGED_SHAPES,
    ROW_SIZES,
    Case,
    Where,
    cases,
    many_sequences,
    merged_shapes,
    row_sizes,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Fewer under compute-sanitizer; and of Numba's, which compile for each kind of argument, and PyTorch's, which the CPU
# plays too.
EXAMPLES = int(os.environ.get("CP_KERNEL_EXAMPLES", "40"))


@pytest.mark.parametrize("check", list(CHECKS))
def test_properties(where: Where, check: str) -> None:
    @settings(max_examples=EXAMPLES if where.name == "native" else -(-EXAMPLES // 4))
    @given(cases(most_heads=40))
    def run(case: Case) -> None:
        CHECKS[check](where, case)

    run()


@pytest.mark.parametrize("size", ROW_SIZES)
def test_row_sizes(where: Where, size: int) -> None:
    row_sizes(where, size)


@pytest.mark.parametrize(("heads", "dim"), MERGED_SHAPES)
def test_merged_shapes(where: Where, heads: int, dim: int) -> None:
    merged_shapes(where, heads, dim)


def test_many_sequences(where: Where) -> None:
    many_sequences(where, 100_000)


def test_a_captured_graph_sees_new_lengths(where: Where) -> None:
    """Lengths are read on the device, when the graph runs."""

    def reorder(lengths: torch.Tensor) -> list[torch.Tensor]:
        return where.kernels.gather([x, x[:, 0]], RowRule("reorder", "rank_order", lengths, a=4))

    x = torch.randn(64, 3, 64, device="cuda").bfloat16()
    lengths, other = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([0, 16, 16, 56], [0, 40, 48, 64]))
    reorder(lengths)  # compiled, loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = reorder(lengths)
    for new in (other, lengths):
        want = reorder(new.clone())
        lengths.copy_(new.clone())
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_current_stream_is_used(where: Where) -> None:
    """A long wait on the current stream delays the kernel, and nothing on another one does."""
    x = torch.zeros(4096, 512, device="cuda")
    lengths = torch.tensor([0, 4096], dtype=torch.int32, device="cuda")
    order = RowRule("reorder", "rank_order", lengths, a=2)
    where.kernels.gather([x], order)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(1.0)
        got = where.kernels.gather([x], order)[0]
        assert not stream.query(), "the helper waited for the device"
    stream.synchronize()
    assert bool((got == 1).all())


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_to_the_31_elements(where: Where) -> None:
    tokens, width = (1 << 31) // 4096 + 1024, 4096
    lengths = torch.tensor([0, tokens - 512, tokens], dtype=torch.int64, device="cuda")
    x = (
        torch.arange(tokens, device="cuda", dtype=torch.int32)
        .to(torch.int16)[:, None]
        .expand(tokens, width)
        .contiguous()
    )
    got = where.kernels.gather([x], RowRule("reorder", "rank_order", lengths, a=4))[0]
    slices = [RowRule("partition_indices", "slice", lengths, a=4, b=rank) for rank in range(4)]
    rows = torch.cat([where.kernels.row_indices(own, tokens) for own in slices])
    for column in (0, width - 1):
        assert torch.equal(got[:, column], x[:, column].index_select(0, rows))
    del got
    total = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
    last = torch.tensor([tokens - 1, 0], device="cuda")
    where.kernels.scatter_([total], [torch.ones(2, width, device="cuda")], last, add=True)
    assert float(total[-1].float().sum()) == width
    assert float(total[1:-1].abs().max()) == 0


FAULTS = {
    "divides": "ops.reorder([x], torch.tensor([0, 7, 16], device='cuda'), 2, True)",
    "no_decrease": "ops.partition_indices(torch.tensor([0, 16, 8], device='cuda'), 16, 2, 0)",
    "no_decrease past 64 bits": "ops.reorder([x], torch.tensor([0, 8, -2**63], device='cuda'), 2, False)",
    "end": "ops.read_half([x], torch.tensor([0, 32], device='cuda'), 0)",
    "index": "rows.gather([x], torch.tensor([3, 16], device='cuda'))",
    "real": "ops.copy_valid_(x, x.clone(), torch.tensor([0, 8], device='cuda'), torch.tensor([0, 9], device='cuda'))",
    "pad": "ops.pad_sequences(ids, torch.tensor([0, 40], device='cuda'), torch.tensor([0, 48], device='cuda'), 48, 0)",
}
SCRIPT = """
import torch, cp_fast.thd
from cp_fast.movers.select_movers import movers_for
rows, ops, x = movers_for("cuda", "native"), torch.ops.cp_attention, torch.ones(16, 64, device="cuda")
ids = torch.arange(16, device="cuda")
try:
    {call}
    torch.cuda.synchronize()
except RuntimeError as error:
    print("RAISED", error)
"""


@pytest.mark.parametrize("rule", FAULTS)
def test_a_broken_rule_ends_in_an_assertion(rule: str) -> None:
    """In a process of its own: the GPU's context is lost."""
    if (reason := why_not("native", "cuda")) is not None:
        pytest.skip(f"needs the native kernels: {reason}")
    movers_for("cuda", "native")  # built once, here
    command = [sys.executable, "-c", SCRIPT.format(call=FAULTS[rule])]
    environment = {**os.environ, "CP_FAST_KERNELS": "native"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    helper = "rows" if rule == "index" else FAULTS[rule].split(".")[1].split("(")[0]
    assert "RAISED" in run.stdout, run.stdout + run.stderr
    assert "assert" in run.stdout
    assert helper in run.stdout + run.stderr
    assert "must" in run.stdout + run.stderr
