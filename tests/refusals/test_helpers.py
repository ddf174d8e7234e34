"""What the THD helpers refuse, and in which words: a table of (helper, what is wrong in a good call, what the error
says), played by the reference and by both implementations of the fast helpers; then the fast helpers' own operators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_fast.movers.mover_protocol import RowRule
from cp_fast.movers.native_movers import load
from cp_fast.movers.select_movers import use
from tests.marks import needs_cxx

CU = torch.tensor([0, 8, 12])  # divides at cp_size 2
ODD = torch.tensor([0, 4, 7])  # sequence 1 has no half
X, LSE, IDS = torch.zeros(12, 2, 4), torch.zeros(2, 12), torch.arange(12)
NESTED = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)
LEAST, MOST = -(2**63), 2**63 - 1
NAMES = {
    "indices": "thd_get_partitioned_indices",
    "to ranks": "thd_sequence_order_to_cp_rank_order",
    "back": "thd_cp_rank_order_to_sequence_order",
    "half": "thd_read_half_tensor",
    "half lse": "thd_read_second_half_lse",
    "copy": "thd_copy_valid_tokens_from_per_split_to_rank_local",
    "lse": "thd_second_half_lse_correction",
    "out": "thd_out_correction",
    "grad": "thd_grad_correction",
    "real": "get_cu_seqlens_on_cp_rank",
    "pad": "pad_thd_sequences_for_cp",
    "pad v": "pad_v",
    "trim": "trim_out",
}
HALVES = {"out_step": X[:6], "lse": LSE, "lse_step": LSE[:, :6], "only_second_half": True, "lse_packed": True}
WHOLE = {"out_step": X, "lse_step": LSE, "only_second_half": False}
GOOD: dict[str, dict[str, Any]] = {
    "indices": {"total_tokens": 12, "cp_size": 2, "cp_rank": 0},
    "to ranks": {"x": X, "cp_size": 2},
    "back": {"x": X, "cp_size": 2},
    "half": {"x": X, "half": 0},
    "half lse": {"lse": LSE, "lse_packed": True, "max_seqlen": 6},
    "copy": {"out": X, "inp": X, "cu_seqlens": CU},
    "lse": {"lse": LSE, "lse_step": LSE[:, :6], "lse_packed": True},
    "out": {"out": X, **HALVES},
    "grad": {"grad": X, "grad_step": X, "first_half": "add", "second_half": "add"},
    "real": {"cu_seqlens": CU, "cp_size": 2, "cp_rank": 0, "first_half": True, "second_half": True},
}
LENGTHS = tuple(GOOD)  # take cu_seqlens_padded
GOOD = {name: {"cu_seqlens_padded": CU, **given} for name, given in GOOD.items()}
GOOD["pad"] = {"input_ids": IDS, "labels": IDS.to(torch.uint8), "cu_seqlens": CU, "divisibility_factor": 4}
GOOD |= {"pad": {**GOOD["pad"], "padding_label_id": 0}, "pad v": {"v": X, "d_qk": 6}, "trim": {"out": X, "d_v": 2}}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("indices", {"cp_rank": 2}, "ValueError: cp_rank is 2; it must be from 0 to 1"),
    ("indices", {"cp_rank": True}, "TypeError: cp_rank is True"),
    ("indices", {"total_tokens": 13}, "ValueError: total_tokens is 13.*tail of 1 .*cp_size = 2"),
    (
        "indices",
        {"total_tokens": 2**31, "cu_seqlens_padded": CU.int()},
        "ValueError: total_tokens is 2147483648; torch",
    ),
    ("indices", {"total_tokens": 2**62}, "total_tokens "),
    ("indices", {"cu_seqlens_padded": CU.to_sparse()}, "cu_seqlens_padded "),
    ("to ranks", {"cp_size": 0}, "ValueError: cp_size is 0; it must be at least 1"),
    ("to ranks", {"cu_seqlens_padded": CU[:2], "cp_size": 8}, r"ValueError: x.shape\[0\] is 12.*tail of 4"),
    ("to ranks", {"x": torch.tensor(1)}, r"ValueError: x has shape \[\]"),
    ("to ranks", {"x": [X]}, "x "),
    ("to ranks", {"x": ()}, r"ValueError: x has shapes \[\]"),
    ("to ranks", {"x": (X, X[:8])}, r"ValueError: x has shapes \[\[12, 2, 4\], \[8, 2, 4\]\].*same tokens"),
    ("to ranks", {"x": (X, 1)}, r"TypeError: x\[1\] is a int"),
    ("back", {"x": None}, "x "),
    ("back", {"x": NESTED}, "x "),
    ("back", {"cp_size": 2**63}, "cp_size "),
    ("half", {"x": [1]}, "TypeError: x is a list"),
    ("half", {"x": ()}, r"ValueError: x has shapes \[\]"),
    ("half", {"x": (X, X[:8])}, r"ValueError: x has shapes \[\[12, 2, 4\], \[8, 2, 4\]\].*same tokens"),
    ("half", {"x": (X, 1)}, r"TypeError: x\[1\] is a int"),
    ("half", {"half": 2}, "ValueError: half is 2; it must be from 0 to 1"),
    ("half", {"x": X[None]}, r"ValueError: .*shape \[1, 12, 2, 4\].*\[2, t, h, d\]"),
    ("half", {"x": torch.zeros(13)}, "ValueError: .*13 tokens must be an even number"),
    ("half lse", {"lse_packed": False}, r"ValueError: .*lse_packed=False.*\[2, h, s\]"),
    ("half lse", {"lse": torch.zeros(3, 2, 8), "lse_packed": False}, r"ValueError: .*\[3, 2, 8\].*\[2, h, s\]"),
    ("half lse", {"lse_packed": 1}, "TypeError: lse_packed is 1"),
    ("half lse", {"max_seqlen": 5}, "ValueError: max_seqlen is 5; it must be at least 6"),
    ("lse", {"lse": LSE.half()}, "TypeError: lse has dtype torch.float16"),
    ("lse", {"lse_step": LSE}, r"ValueError: lse_step has shape \[2, 12\].*\[2, 6\]"),
    ("lse", {"lse_step": LSE[:1, :6]}, r"ValueError: lse_step has shape \[1, 6\]"),
    ("out", {"out_step": X}, r"ValueError: out_step has shape \[12, 2, 4\]"),
    ("out", {**WHOLE, "lse": LSE.t()}, r"ValueError: lse has shape \[12, 2\].*\[2, 12\]"),
    ("out", {**WHOLE, "out": X[0]}, r"ValueError: .*\[t, h, d\]"),
    ("out", {**WHOLE, "out": X.long()}, "TypeError: out has dtype torch.int64"),
    ("out", {"out": X[:1].expand(12, 2, 4)}, "out "),
    ("grad", {"grad_step": X.to(torch.float8_e4m3fn)}, "TypeError: grad_step.*float8_e4m3fn"),
    ("grad", {"second_half": "skip"}, "ValueError: second_half is 'skip'; it must be one"),
    ("grad", {"second_half": "none"}, r"ValueError: .*\[12, 2, 4\].*must be \[6, 2, 4\]"),
    ("grad", {"grad_step": X[:6], "second_half": "copy"}, r"ValueError: .*\[6, 2, 4\].*must be \[12, 2, 4\]"),
    ("grad", {"grad": X[:, :1].expand(12, 2, 4)}, "grad "),
    ("copy", {"inp": X[:6]}, r"ValueError: inp has shape \[6, 2, 4\]"),
    ("copy", {"inp": X.long()}, "TypeError: inp has dtype"),
    ("copy", {"cu_seqlens": torch.tensor([0, 9, 9])}, "ValueError: .*sequence 0 8 slots, but it has 9 tokens"),
    ("copy", {"cu_seqlens_padded": torch.tensor([-1, 8, 12])}, "ValueError: .*at least 0 and must not decrease"),
    ("copy", {"out": X[:1].expand(12, 2, 4)}, "out "),
    ("copy", {"out": torch.zeros(12, 2, 4, requires_grad=True)}, "out "),
    ("real", {"cu_seqlens": CU[:2]}, "ValueError: .*2 entries and .* has 3"),
    ("real", {"cu_seqlens": 2 * CU}, "ValueError: .*sequence 0 8 slots, but it has 16 tokens"),
    ("real", {"first_half": "add"}, "TypeError: first_half is 'add'; it must be True or False"),
    ("pad", {"divisibility_factor": 0}, "ValueError: divisibility_factor is 0"),
    ("pad", {"divisibility_factor": 2**62}, "divisibility_factor "),
    ("pad", {"input_ids": X, "labels": X}, r"ValueError: input_ids has shape \[12, 2, 4\]"),
    ("pad", {"input_ids": IDS.view(2, 6), "labels": IDS.view(2, 6)}, r"ValueError: input_ids has shape \[2, 6\]"),
    ("pad", {"input_ids": IDS.float()}, "TypeError: input_ids has dtype torch.float32"),
    ("pad", {"labels": IDS[:4]}, r"ValueError: labels has shape \[4\]"),
    *(
        ("pad", {"input_ids": IDS[None], "labels": x}, r"ValueError: labels has shape .*must both be \[t\] or \[1, t\]")
        for x in (IDS, IDS[None, :3], IDS[None, None])
    ),
    ("pad", {"input_ids": CU[:2], "labels": CU[:2]}, r"ValueError: .*2 tokens, fewer than .* = 12"),
    ("pad", {"input_ids": CU[None, :2], "labels": CU[None, :2]}, "ValueError: input_ids has 2 tokens, fewer than"),
    ("pad", {"padding_token_id": 0.5}, "padding_token_id "),
    ("pad", {"padding_token_id": 2**63}, "padding_token_id "),
    ("pad", {"padding_token_id": True}, "padding_token_id "),
    ("pad", {"padding_label_id": -100}, "padding_label_id "),
    ("pad", {"padding_label_id": torch.tensor(0)}, "padding_label_id "),
    ("pad", {"padded_tokens": 2**62}, "padded_tokens "),
    ("pad", {"divisibility_factor": 8, "padded_tokens": 15}, "ValueError: padded_tokens is 15"),
    (
        "pad",
        {"cu_seqlens": torch.tensor([0, 1, 2]).int(), "divisibility_factor": 2**31 - 1},
        "ValueError: padded_tokens is 4294967304; torch.int32 lengths cannot count so many",
    ),
    ("pad", {"cu_seqlens": CU.int(), "padded_tokens": 2**32}, "ValueError: padded_tokens is 4294967296; torch.int32"),
    ("pad v", {"d_qk": 3}, "ValueError: d_qk is 3 and v has head dim 4"),
    ("pad v", {"d_qk": 2**62}, "d_qk "),
    ("trim", {"d_v": 5}, "ValueError: d_v is 5 and out has head dim 4"),
    ("trim", {"out": X.to_sparse()}, "out "),
]
NO_LENGTHS: list[tuple[Any, str]] = [
    (None, "cu_seqlens_padded is"),
    ([0, 8, 12], "TypeError: cu_seqlens_padded is a list"),
    (CU.float(), "TypeError: cu_seqlens_padded has dtype torch.float32; it must be int32 or int64"),
    (CU[None], r"ValueError: cu_seqlens_padded has shape \[1, 3\]"),
    (CU[:0], r"ValueError: cu_seqlens_padded has shape \[0\]"),
]
BY_VALUE: list[tuple[list[int], str, tuple[str, ...]]] = [  # lengths, what the error says, the helpers that do not mind
    ([0, 12, 8], r"cu_seqlens_padded\[2\] is 8, less than cu_seqlens_padded\[1\] = 12", ("copy",)),
    ([4, 8, 12], r"cu_seqlens_padded\[0\] is 4; it must be 0", ("copy",)),
    ([0, 4, 10], r"sequence 1 the length 6.*cp_size 2 needs a multiple of 4", LENGTHS[3:9]),
    (ODD.tolist(), r"sequence 1 the length 3.*half needs a multiple of 2", (*LENGTHS[:3], "copy", "real")),
    ([0, 8, 16], "16", ("real",)),
]
REFUSED += [(name, {"cu_seqlens_padded": x}, words) for name in LENGTHS for x, words in NO_LENGTHS]
REFUSED += [
    (name, {"cu_seqlens_padded": torch.tensor(x)}, f"ValueError: .*{words}")
    for x, words, without in BY_VALUE
    for name in LENGTHS
    if name not in without
]
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


def hostile(helpers: Iterable[str], without_buffer: str) -> list[tuple[str, str]]:
    """Every helper with every kind of lengths; where no buffer is involved, a sequence may be long."""
    return [(name, kind) for name in helpers for kind in HOSTILE if name != without_buffer or kind not in LONG]


for _name, _kind in hostile((*LENGTHS, "pad"), "real"):
    _lengths = torch.tensor(HOSTILE[_kind])
    _few = {"cu_seqlens": CU[: len(_lengths)] * 0} if _name in ("real", "copy") else {}
    _lse = {"lse": torch.zeros(len(_lengths) - 1, 2, 12), "lse_packed": False}
    _what = "cu_seqlens" if _name == "pad" else "cu_seqlens_padded"
    for _given in (_few, _lse) if _name == "half lse" else (_few,):
        REFUSED.append((_name, {**_given, _what: _lengths}, "ValueError: .*(cu_seqlens|tokens|lse has shape)"))
for _kind, _values in HOSTILE.items():
    _lengths = torch.tensor(_values)
    _change = {"cu_seqlens_padded": CU[: len(_lengths)], "cu_seqlens": _lengths}
    REFUSED.append(("copy", _change, "ValueError: .*(cu_seqlens|tokens)"))

ROWS, WIDE = torch.zeros(16, 2, 4), torch.zeros(2, 20)
REFUSED += [  # what is written overlaps what is read
    ("copy", {"out": ROWS[:12], "inp": ROWS[:12]}, "ValueError: out and inp overlap in memory"),
    ("copy", {"out": ROWS[:12], "inp": ROWS[4:]}, "ValueError: out and inp overlap in memory"),
    ("lse", {"lse": WIDE[:, :12], "lse_step": WIDE[:, 4:10]}, "ValueError: lse and lse_step overlap in memory"),
    ("out", {**WHOLE, "out": ROWS[:12], "out_step": ROWS[2:14]}, "ValueError: out and out_step overlap in memory"),
    ("out", {"out": ROWS[:12], "lse_step": ROWS.flatten()[:12].view(2, 6)}, "ValueError: out and lse_step overlap in"),
    ("grad", {"grad": ROWS[:12], "grad_step": ROWS[4:10], "first_half": "none"}, "ValueError: grad and grad_step over"),
]
LEAF = torch.zeros(12, 2, 4, requires_grad=True)
OF_CP_REF = [("half", {"x": X.to("meta")}, "ValueError: .*on meta; it must be on a device where tensors have values")]
OF_CP_FAST = [
    ("grad", {"grad": LEAF}, "ValueError: grad requires grad"),
    ("grad", {"grad_step": LEAF}, "ValueError: grad_step requires grad"),
    ("out", {**WHOLE, "out_step": LEAF}, "ValueError: out_step requires grad"),
    ("copy", {"inp": LEAF}, "ValueError: inp requires grad"),
    ("grad", {"grad": torch.zeros(12, 4, 2).transpose(1, 2)}, r"ValueError: grad has shape .* and strides .*stride 1"),
    (
        "copy",
        {"out": torch.zeros(12, 3, 2, 4).transpose(1, 2), "inp": torch.zeros(12, 2, 3, 4)},
        "ValueError: .*between tokens and the last must be dense",
    ),
]


@pytest.fixture(params=["cp_ref", "torch", pytest.param("native", marks=needs_cxx)])
def helpers(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The reference's helpers, and the fast ones by each implementation."""
    with nullcontext() if request.param == "cp_ref" else use(request.param):
        yield cp_ref.thd if request.param == "cp_ref" else cp_fast.thd


def called(helpers: Any, name: str, **odd: Any) -> Any:
    """A good call with something changed. What is written and not changed is a copy."""
    written = {"copy": "out"}.get(name, name)
    good = {k: x.clone() if k == written and isinstance(x, torch.Tensor) else x for k, x in GOOD[name].items()}
    return getattr(helpers, NAMES[name])(**(good | odd))


def refused(helpers: Any, rows: list[tuple[str, dict[str, Any], str]]) -> None:
    """Each call raises what its row says; all that are wrong are named."""
    wrong: list[str] = []
    for name, odd, words in rows:
        try:
            called(helpers, name, **odd)
            said = "nothing"
        except (ValueError, TypeError) as error:
            said = f"{type(error).__name__}: {error}"
        if not re.match(words if words[:4] in ("Valu", "Type") else rf"\w+: {words}", said, re.DOTALL):
            wrong.append(f"{name} with {odd} raised {said!r}, not {words!r}")
    assert not wrong, "\n".join(wrong)


def test_good_calls_are_right(helpers: Any) -> None:
    for name in GOOD:
        called(helpers, name)


@pytest.mark.parametrize("name", GOOD)
def test_what_is_wrong_is_named(helpers: Any, name: str) -> None:
    rows = [row for row in REFUSED if row[0] == name]
    assert len(rows) >= 2
    refused(helpers, rows)


def test_what_one_package_refuses() -> None:
    refused(cp_ref.thd, OF_CP_REF)
    refused(cp_fast.thd, OF_CP_FAST)
    with torch.no_grad():
        for name, odd, _ in OF_CP_FAST[:4]:
            called(cp_fast.thd, name, **odd)


def test_nothing_changes_when_a_call_is_refused(helpers: Any) -> None:
    grad = torch.ones(12, 2, 4)
    with pytest.raises(ValueError, match="grad_step"):
        helpers.thd_grad_correction(grad, X[:6], CU, "copy", "copy")
    assert grad.eq(1).all()


def test_interleaved_operands_do_not_overlap(helpers: Any) -> None:
    """K and V of one tensor lie between each other's rows."""
    both = torch.arange(192.0).view(12, 2, 2, 4)
    want = both[:, 1].clone()
    called(helpers, "copy", out=both[:, 0], inp=both[:, 1])
    assert torch.equal(both[:, 0], want)
    called(helpers, "grad", grad=both[:, 0], grad_step=both[:, 1])
    assert torch.equal(both[:, 0], 2 * want)


def test_every_helper_is_played() -> None:
    assert {*NAMES.values(), "get_batch_on_this_cp_rank"} == set(cp_ref.thd.__all__) == set(cp_fast.thd.__all__)


# ---- the fast helpers' operators check what they are given themselves

MAPS: dict[str, Callable[[torch.Tensor], RowRule]] = {
    "slice": lambda cu: RowRule("rows", "slice", cu, a=2, b=1),
    "rank order": lambda cu: RowRule("rows", "rank_order", cu, a=2),
    "sequence order": lambda cu: RowRule("rows", "sequence_order", cu, a=2),
    "half": lambda cu: RowRule("rows", "half", cu, a=1),
    "unpad": lambda cu: RowRule("rows", "unpad", cu, cu * 0, a=8),
    "unpad, real": lambda cu: RowRule("rows", "unpad", FOUR[: len(cu)], cu, a=8),
    "in half": lambda cu: RowRule("rows", "in_half", cu, a=1),
    "valid": lambda cu: RowRule("rows", "valid", cu, cu * 0),
    "valid, real": lambda cu: RowRule("rows", "valid", FOUR[: len(cu)], cu),
}
FOUR, EIGHT, EIGHT_LSE = torch.tensor([0, 4, 8]), torch.zeros(8, 2, 4), torch.zeros(2, 8)


@needs_cxx
@pytest.mark.parametrize("kind", MAPS)
def test_native_operators_refuse_hostile_lengths_themselves(kind: str) -> None:
    native, step = load("cpu"), EIGHT[:4] if kind == "half" else EIGHT
    for lengths in HOSTILE.values():
        rows = MAPS[kind](torch.tensor(lengths))
        calls: list[Callable[[], object]] = [lambda rows=rows: native.row_indices(rows, 8)]
        if kind in ("slice", "rank order", "sequence order", "half"):
            calls += [lambda rows=rows: native.gather([EIGHT], rows)]
        if kind in ("half", "in half", "valid", "valid, real"):
            calls += [
                lambda rows=rows: native.scatter_([EIGHT.clone()], [step], rows, add=True),
                lambda rows=rows: native.merge_(
                    EIGHT.clone(), EIGHT_LSE.clone(), step, EIGHT_LSE[:, : len(step)], rows
                ),
            ]
        for call in calls:
            with pytest.raises(ValueError, match="lengths"):
                call()


@needs_cxx
@pytest.mark.parametrize("cp_size", [0, -1, 2**31, 2**62 + 1])
def test_native_operators_refuse_numbers_of_ranks_that_do_not_fit(cp_size: int) -> None:
    with pytest.raises(ValueError, match=f"cp_size is {cp_size}; it must be from 1 to 2147483647"):
        load("cpu").gather([EIGHT], RowRule("rows", "rank_order", FOUR, a=cp_size))
    with pytest.raises(ValueError, match="lengths gives sequence 0 the length 4; it must be a multiple of 6"):
        load("cpu").gather([EIGHT[:6]], RowRule("rows", "sequence_order", torch.tensor([0, 4, 6]), a=3))


OPS = torch.ops.cp_attention
DIRECT: dict[str, Callable[[], object]] = {
    "partition_indices": lambda: OPS.partition_indices(FOUR.float(), 8, 2, 0),
    "a rank": lambda: OPS.partition_indices(FOUR, 8, 2, 2),
    "rank_lengths": lambda: OPS.rank_lengths(FOUR, FOUR[:2], 2, 0, True, True),
    "partition": lambda: OPS.partition([EIGHT, EIGHT[:4]], FOUR, 2, 0),
    "nothing to partition": lambda: OPS.partition([], FOUR, 2, 0),
    "reorder": lambda: OPS.reorder([EIGHT], FOUR[None], 2, True),
    "no ranks": lambda: OPS.reorder([EIGHT], FOUR, 0, True),
    "read_half": lambda: OPS.read_half([EIGHT[:7]], FOUR, 0),
    "a third half": lambda: OPS.read_half([EIGHT], FOUR, 2),
    "read_second_half_lse": lambda: OPS.read_second_half_lse(EIGHT_LSE.half(), FOUR, True, 4),
    "copy_valid_": lambda: OPS.copy_valid_(EIGHT.clone(), EIGHT[:4], FOUR, FOUR),
    "copy_valid_, dtypes": lambda: OPS.copy_valid_(EIGHT.clone(), EIGHT.int(), FOUR, FOUR),
    "pad_sequences": lambda: OPS.pad_sequences(torch.arange(8), FOUR, torch.tensor([0, 2, 8]), 8, 0),
    "pad_sequences, floats": lambda: OPS.pad_sequences(torch.zeros(8), FOUR, FOUR, 8, 0),
    "pad_sequences, hostile": lambda: OPS.pad_sequences(torch.arange(8), FOUR * 0, torch.tensor([0, 8, LEAST]), 8, 0),
    "lse_correction_": lambda: OPS.lse_correction_(EIGHT_LSE.clone(), EIGHT_LSE, FOUR, True),
    "out_correction_": lambda: OPS.out_correction_(EIGHT.clone(), EIGHT[:4], EIGHT_LSE, EIGHT_LSE, FOUR, False, True),
    "grad_correction_": lambda: OPS.grad_correction_(EIGHT.clone(), EIGHT, FOUR, "add", "subtract"),
    "written twice": lambda: OPS.grad_correction_(EIGHT[:1].expand(8, 2, 4), EIGHT, FOUR, "add", "add"),
}


@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_cxx)])
@pytest.mark.parametrize("case", DIRECT)
def test_an_operator_called_directly_checks_its_arguments(name: str, case: str) -> None:
    with use(name), pytest.raises((ValueError, TypeError), match=r" (is|has|have|gives) "):
        DIRECT[case]()


@needs_cxx
def test_without_memory_a_native_operator_raises_what_pytorch_raises() -> None:
    rows, native = 2**50, load("cpu")
    with pytest.raises(RuntimeError) as plain:
        torch.empty(rows)
    all_rows = RowRule("rows", "slice", torch.tensor([0, rows]), a=1)
    for call in (
        lambda: native.gather([torch.zeros(1).expand(rows)], all_rows),
        lambda: native.gather_heads([torch.zeros(1, 1, 1).expand(1, rows, 1)], slice(0, 1), [0], [rows]),
    ):
        with pytest.raises(type(plain.value), match=r"allocate memory|too large|out of memory") as raised:
            call()
        assert type(raised.value) is type(plain.value)
