"""Lengths whose differences overflow, operands that overlap, counts that do not fit: refused by name, in both packages,
by every implementation, and by the operators called directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_fast.movers import LengthsMap, use
from cp_fast.movers.native_kernels import load
from tests.marks import needs_cxx

LEAST, MOST = -(2**63), 2**63 - 1
CU = torch.tensor([0, 4, 8])
X, LSE = torch.zeros(8, 2, 4), torch.zeros(2, 8)
Lengths = torch.Tensor
READERS: dict[str, Callable[[Any, Lengths], object]] = {
    "indices": lambda t, cu: t.thd_get_partitioned_indices(cu, 8, 2, 0),
    "rank order": lambda t, cu: t.thd_sequence_order_to_cp_rank_order(X, cu, 2),
    "sequence order": lambda t, cu: t.thd_cp_rank_order_to_sequence_order(X, cu, 2),
    "half": lambda t, cu: t.thd_read_half_tensor(X, cu, 1),
    "half lse": lambda t, cu: t.thd_read_second_half_lse(LSE, cu, True, 4),
    "half padded lse": lambda t, cu: t.thd_read_second_half_lse(torch.zeros(len(cu) - 1, 2, 8), cu, False, 4),
    "lse": lambda t, cu: t.thd_second_half_lse_correction(LSE.clone(), LSE[:, :4], cu, True),
    "out": lambda t, cu: t.thd_out_correction(X.clone(), X, LSE, LSE, cu, False, True),
    "grad": lambda t, cu: t.thd_grad_correction(X.clone(), X, cu, "add", "copy"),
    "copy": lambda t, cu: t.thd_copy_valid_tokens_from_per_split_to_rank_local(X.clone(), X, cu, CU[: len(cu)]),
    "valid": lambda t, cu: t.thd_copy_valid_tokens_from_per_split_to_rank_local(X.clone(), X, CU[: len(cu)], cu),
    "real": lambda t, cu: t.get_cu_seqlens_on_cp_rank(CU[: len(cu)] * 0, cu, 2, 0, True, True),
    "pad": lambda t, cu: t.pad_thd_sequences_for_cp(torch.arange(8), torch.arange(8), cu, 4, padded_tokens=8),
}
HOSTILE = {
    "a difference past 64 bits": [0, 8, LEAST],
    "the same, even": [0, 4, LEAST + 4],
    "from the largest to the least": [0, MOST, LEAST],
    "down and up again": [0, LEAST, 8],
    "only negative": [LEAST, LEAST],
    "past every buffer": [0, 2**62],
    "far": [0, 2**32, 2**32],
}


LONG = ("past every buffer", "far")


def pairs(readers: Iterable[str], without_buffer: str) -> list[tuple[str, str]]:
    """Every reader with every kind of lengths; where no buffer is involved, a sequence may be long."""
    return [(reader, kind) for reader in readers for kind in HOSTILE if reader != without_buffer or kind not in LONG]


@pytest.fixture(params=["cp_ref", "torch", pytest.param("native", marks=needs_cxx)])
def helpers(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The reference's helpers, and the fast ones by each implementation."""
    with nullcontext() if request.param == "cp_ref" else use(request.param):
        yield cp_ref.thd if request.param == "cp_ref" else cp_fast.thd


@pytest.mark.parametrize(("reader", "lengths"), pairs(READERS, "real"))
def test_hostile_lengths(helpers: Any, reader: str, lengths: str) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens|tokens|lse has shape"):
        READERS[reader](helpers, torch.tensor(HOSTILE[lengths]))


MAPS: dict[str, Callable[[Lengths], LengthsMap]] = {
    "slice": lambda cu: LengthsMap("rows", "slice", cu, a=2, b=1),
    "rank order": lambda cu: LengthsMap("rows", "rank_order", cu, a=2),
    "sequence order": lambda cu: LengthsMap("rows", "sequence_order", cu, a=2),
    "half": lambda cu: LengthsMap("rows", "half", cu, a=1),
    "unpad": lambda cu: LengthsMap("rows", "unpad", cu, cu * 0, a=8),
    "unpad, real": lambda cu: LengthsMap("rows", "unpad", CU[: len(cu)], cu, a=8),
    "in half": lambda cu: LengthsMap("rows", "in_half", cu, a=1),
    "valid": lambda cu: LengthsMap("rows", "valid", cu, cu * 0),
    "valid, real": lambda cu: LengthsMap("rows", "valid", CU[: len(cu)], cu),
}
GATHERED = ("slice", "rank order", "sequence order", "half")
SCATTERED = ("half", "in half", "valid", "valid, real")


@needs_cxx
@pytest.mark.parametrize(("kind", "lengths"), pairs(MAPS, ""))
def test_native_operators_refuse_hostile_lengths_themselves(kind: str, lengths: str) -> None:
    native, rows = load("cpu"), MAPS[kind](torch.tensor(HOSTILE[lengths]))
    with pytest.raises(ValueError, match="lengths"):
        native.row_indices(rows, 8)
    if kind in GATHERED:
        with pytest.raises(ValueError, match="lengths"):
            native.gather([X], rows)
    if kind in SCATTERED:
        step = X[:4] if kind == "half" else X
        with pytest.raises(ValueError, match="lengths"):
            native.scatter_([X.clone()], [step], rows, add=True)
        with pytest.raises(ValueError, match="lengths"):
            native.merge_(X.clone(), LSE.clone(), step, LSE[:, : len(step)], rows)


@needs_cxx
def test_a_divisor_that_is_no_power_of_two() -> None:
    with pytest.raises(ValueError, match="lengths gives sequence 0 the length 4; it must be a multiple of 6"):
        load("cpu").gather([X[:6]], LengthsMap("rows", "sequence_order", torch.tensor([0, 4, 6]), a=3))


@needs_cxx
@pytest.mark.parametrize("cp_size", [0, -1, 2**31, 2**62 + 1])
def test_native_operators_refuse_numbers_of_ranks_that_do_not_fit(cp_size: int) -> None:
    with pytest.raises(ValueError, match=f"cp_size is {cp_size}; it must be from 1 to 2147483647"):
        load("cpu").gather([X], LengthsMap("rows", "rank_order", CU, a=cp_size))


OPS = torch.ops.cp_attention
DIRECT: dict[str, Callable[[], object]] = {
    "partition_indices": lambda: OPS.partition_indices(CU.float(), 8, 2, 0),
    "a rank": lambda: OPS.partition_indices(CU, 8, 2, 2),
    "rank_lengths": lambda: OPS.rank_lengths(CU, CU[:2], 2, 0, True, True),
    "partition": lambda: OPS.partition([X, X[:4]], CU, 2, 0),
    "nothing to partition": lambda: OPS.partition([], CU, 2, 0),
    "reorder": lambda: OPS.reorder([X], CU[None], 2, True),
    "no ranks": lambda: OPS.reorder([X], CU, 0, True),
    "read_half": lambda: OPS.read_half([X[:7]], CU, 0),
    "a third half": lambda: OPS.read_half([X], CU, 2),
    "read_second_half_lse": lambda: OPS.read_second_half_lse(LSE.half(), CU, True, 4),
    "copy_valid_": lambda: OPS.copy_valid_(X.clone(), X[:4], CU, CU),
    "copy_valid_, dtypes": lambda: OPS.copy_valid_(X.clone(), X.int(), CU, CU),
    "pad_sequences": lambda: OPS.pad_sequences(torch.arange(8), CU, torch.tensor([0, 2, 8]), 8, 0),
    "pad_sequences, floats": lambda: OPS.pad_sequences(torch.zeros(8), CU, CU, 8, 0),
    "pad_sequences, hostile": lambda: OPS.pad_sequences(torch.arange(8), CU * 0, torch.tensor([0, 8, LEAST]), 8, 0),
    "lse_correction_": lambda: OPS.lse_correction_(LSE.clone(), LSE, CU, True),
    "out_correction_": lambda: OPS.out_correction_(X.clone(), X[:4], LSE, LSE, CU, False, True),
    "grad_correction_": lambda: OPS.grad_correction_(X.clone(), X, CU, "add", "subtract"),
    "written twice": lambda: OPS.grad_correction_(X[:1].expand(8, 2, 4), X, CU, "add", "add"),
}


@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_cxx)])
@pytest.mark.parametrize("case", DIRECT)
def test_an_operator_called_directly_checks_its_arguments(name: str, case: str) -> None:
    with use(name), pytest.raises((ValueError, TypeError), match=r" (is|has|have|gives) "):
        DIRECT[case]()


ROWS, BOTH = torch.zeros(12, 2, 4), torch.zeros(8, 2, 2, 4)
WIDE = torch.zeros(2, 16)
OVERLAPS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "one tensor": (
        "out and inp",
        lambda t: t.thd_copy_valid_tokens_from_per_split_to_rank_local(ROWS[:8], ROWS[:8], CU, CU),
    ),
    "shifted rows": (
        "out and inp",
        lambda t: t.thd_copy_valid_tokens_from_per_split_to_rank_local(ROWS[:8], ROWS[4:], CU, CU),
    ),
    "lse": (
        "lse and lse_step",
        lambda t: t.thd_second_half_lse_correction(WIDE[:, :8], WIDE[:, 4:8], CU, True),
    ),
    "out": ("out and out_step", lambda t: t.thd_out_correction(ROWS[:8], ROWS[2:10], LSE, LSE, CU, False, True)),
    "its lse": (
        "out and lse_step",
        lambda t: t.thd_out_correction(ROWS[:8], X, LSE, ROWS.flatten()[:16].view(2, 8), CU, False, True),
    ),
    "grad": ("grad and grad_step", lambda t: t.thd_grad_correction(ROWS[:8], ROWS[4:8], CU, "none", "add")),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_what_is_written_does_not_overlap_what_is_read(helpers: Any, case: str) -> None:
    names, call = OVERLAPS[case]
    with pytest.raises(ValueError, match=f"{names} overlap in memory"):
        call(helpers)


def test_interleaved_operands_do_not_overlap(helpers: Any) -> None:
    """K and V of one tensor lie between each other's rows."""
    both = torch.arange(128.0).view(8, 2, 2, 4)
    want = both[:, 1].clone()
    helpers.thd_copy_valid_tokens_from_per_split_to_rank_local(both[:, 0], both[:, 1], CU, CU)
    assert torch.equal(both[:, 0], want)
    helpers.thd_grad_correction(both[:, 0], both[:, 1], CU, "add", "add")
    assert torch.equal(both[:, 0], 2 * want)


def test_padded_lengths_that_int32_does_not_hold(helpers: Any) -> None:
    ids, cu = torch.arange(2), torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"padded_tokens is 4294967294; torch.int32 lengths cannot count so many"):
        helpers.pad_thd_sequences_for_cp(ids, ids, cu, 2**31 - 1)
    with pytest.raises(ValueError, match=r"padded_tokens is 4294967296; torch.int32"):
        helpers.pad_thd_sequences_for_cp(ids, ids, cu, 1, padded_tokens=2**32)


@needs_cxx
def test_without_memory_a_native_operator_raises_what_pytorch_raises() -> None:
    rows = 2**50
    with pytest.raises(RuntimeError) as plain:
        torch.empty(rows)
    for call in (
        lambda: load("cpu").gather(
            [torch.zeros(1).expand(rows)], LengthsMap("rows", "slice", torch.tensor([0, rows]), a=1)
        ),
        lambda: load("cpu").gather_heads([torch.zeros(1, 1, 1).expand(1, rows, 1)], slice(0, 1), [0], [rows]),
    ):
        with pytest.raises(type(plain.value), match=r"allocate memory|too large|out of memory") as raised:
            call()
        assert type(raised.value) is type(plain.value)
