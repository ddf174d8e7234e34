"""Which weights dropout keeps: the numbers of Philox, and the pairs that they belong to."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch

import cp_fast
import cp_ref
from cp_ref import SimGroup
from cp_ref.calls.scores import kept_by_dropout, philox4x32, threshold

KNOWN = {  # rounds, counter, key, words: lines of Random123's kat_vectors
    "zeros": (7, [0] * 4, [0] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    "ones": (7, [2**32 - 1] * 4, [2**32 - 1] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    "pi": (
        7,
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
    "zeros, 10 rounds": (10, [0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
}


def by_integers(counter: list[int], key: list[int], rounds: int = 7) -> list[int]:
    """The paper's round function, on Python's integers."""
    for _ in range(rounds):
        (high0, low0), (high1, low1) = divmod(counter[0] * 0xD2511F53, 2**32), divmod(counter[2] * 0xCD9E8D57, 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def words(counter: list[int], key: list[int], rounds: int = 7) -> list[int]:
    c0, c1, c2, c3, k0, k1 = (torch.tensor(x) for x in (*counter, *key))
    return [int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1), rounds)]


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name: str) -> None:
    rounds, counter, key, expected = KNOWN[name]
    assert words(counter, key, rounds) == by_integers(counter, key, rounds) == [int(x, 16) for x in expected.split()]


def test_random_counters() -> None:
    generator = random.Random(0)
    for _ in range(200):
        counter, key = ([generator.getrandbits(32) for _ in range(n)] for n in (4, 2))
        assert words(counter, key) == by_integers(counter, key)


@pytest.mark.parametrize("seed", [0, 7, -1, 2**40 + 3, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("dropout_p", [2.0**-32, 0.1, 0.5, 1 - 2.0**-32])
def test_pairs_are_kept_by_their_word(seed: int, dropout_p: float) -> None:
    """The mask of a block that begins anywhere is the definition, pair by pair."""
    b, h = torch.tensor([[3]]), torch.tensor([[2]])
    i, j = torch.tensor([[5], [14], [2**31 - 1]]), torch.arange(6, 27)[None]
    found = kept_by_dropout(b.int(), h.int(), i.int(), j.int(), torch.tensor(seed), dropout_p)
    for row, query in enumerate(i.flatten().tolist()):
        for column, key in enumerate(j.flatten().tolist()):
            counter = [key // 16 * 8 + key % 8, query // 16 * 8 + query % 8, 2, 3]
            words = by_integers(counter, [seed % 2**32, seed // 2**32 % 2**32])
            word = words[2 * (query // 8 % 2) + key // 8 % 2]
            assert bool(found[row, column]) == (word >= threshold(dropout_p))


def test_four_pairs_share_a_counter_and_no_others() -> None:
    counters = Counter(
        (j // 16 * 8 + j % 8, i // 16 * 8 + i % 8, 2 * (i // 8 % 2) + j // 8 % 2) for i in range(48) for j in range(48)
    )
    assert set(counters.values()) == {1}
    assert set(Counter(number[:2] for number in counters).values()) == {4}


def test_keys_may_come_in_any_order() -> None:
    zero = torch.zeros(1, 1, dtype=torch.int32)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    whole = kept_by_dropout(zero, zero, zero, torch.arange(40)[None], torch.tensor(1), 0.4)
    assert torch.equal(kept_by_dropout(zero, zero, zero, order[None], torch.tensor(1), 0.4), whole[:, order])


def test_the_share_that_is_dropped() -> None:
    i, j, zero = torch.arange(400)[:, None], torch.arange(500)[None], torch.zeros(1, 1, dtype=torch.int32)
    share = 1 - kept_by_dropout(zero, zero, i, j, torch.tensor(11), 0.3).double().mean()
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / 200_000) ** 0.5


LENGTHS = (19, 0, 8, 13)  # of documents; the batched formats have two of the first length
HEADS = 24  # one number for all group sizes of an a2a
DROPOUT, SEED = 0.4, -(2**50) - 3
PACKAGES: dict[str, Any] = {"cp_ref": cp_ref, "cp_fast": cp_fast}
SCHEDULES = [
    (comm, size, inner)
    for comm in ("p2p", "all_gather", "a2a", "a2a+p2p")
    for size in (1, 2, 3, 4, 8)
    for inner in ((2, 4) if comm == "a2a+p2p" else (1,))
    if size % inner == 0 and (inner == 1 or size > inner)
]
LAYOUTS = ("dual_chunk", "contiguous", "balanced", "table")
OF_BATCHES = LAYOUTS[:2]
# four ranks with every layout; other sizes with one, a schedule with each layout in turn
PLAYED = [
    pytest.param(*given, number, marks=() if given[1] == 4 else pytest.mark.thorough)
    for number, given in enumerate(SCHEDULES)
]


@cache
def expected(lengths: tuple[int, ...]) -> torch.Tensor:
    """bool [rows, h, rows]: which visible pairs are kept, by the definition, sequence by sequence."""
    rows = sum(lengths)
    found = torch.zeros(rows, HEADS, rows, dtype=torch.bool)
    head = torch.arange(HEADS, dtype=torch.int32)[None, :, None]
    for number, (start, length) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
        i = torch.arange(length, dtype=torch.int32)
        sequence = torch.full((1, 1, 1), number, dtype=torch.int32)
        drawn = kept_by_dropout(sequence, head, i[:, None, None], i[None, None, :], torch.tensor(SEED), DROPOUT)
        found[start : start + length, :, start : start + length] = drawn & (i[:, None, None] >= i[None, None, :])
    return found


def table(size: int) -> list[tuple[int, int, int, int]]:
    """A layout as a user gives it: three uneven parts of every document, on any ranks, the last part first."""
    rows = [
        ((7 * number + part) % size, number, start, stop)
        for number, length in enumerate(LENGTHS)
        for part, (start, stop) in enumerate([(length // 2, length), (length // 5, length // 2), (0, length // 5)])
        if start < stop
    ]
    return sorted(rows, key=lambda row: row[0])


def masks(package: Any, qkv_format: str, layout: str, comm: str, size: int, inner: int) -> tuple[torch.Tensor, ...]:
    """What the probes of both passes saw: bool [rows of queries, h, rows of keys], over all documents."""
    packed = qkv_format == "thd"
    lengths = LENGTHS if packed else LENGTHS[:1] * 2
    rows = sum(lengths)
    units = torch.eye(rows, dtype=torch.float64)[:, None].expand(-1, HEADS, -1)  # [rows, h, rows]
    nothing = torch.zeros(rows, HEADS, 8, dtype=torch.float64)

    def shaped(x: torch.Tensor) -> torch.Tensor:
        if packed:
            return x
        x = x.unflatten(0, (2, -1))
        return x.transpose(0, 1).contiguous() if qkv_format == "sbhd" else x

    cu = {"cu_seqlens_q": torch.tensor([0, *accumulate(lengths)])} if packed else {}
    more = {} if packed else {"batch_size": 2, "seqlen_q": LENGTHS[0]}
    sizes = {"heads_q": HEADS, "heads_kv": HEADS, "d_qk": 8, "d_v": rows, "dtype": torch.float64, "device": "cpu"}

    def one(member: Any) -> tuple[torch.Tensor, torch.Tensor]:
        group = member.split(inner) if comm == "a2a+p2p" else member
        cp = package.ContextParallel(group, comm, layout="contiguous" if layout == "table" else layout)
        how: dict[str, Any] = {"qkv_format": qkv_format, **cu, "dropout_p": DROPOUT}
        how |= {"layout": table(size)} if layout == "table" else {}
        plan = package.make_plan(cp=cp, **how, **more, **sizes)
        q, v = (package.shard(shaped(x), cp=cp, plan=plan) for x in (nothing, units))
        v = v.clone().requires_grad_()
        out = package.attention(q, q, v, cp=cp, plan=plan, dropout_seed=SEED)
        out.backward(v.detach())
        assert v.grad is not None
        return package.unshard(out.detach(), cp=cp, plan=plan), package.unshard(v.grad, cp=cp, plan=plan)

    found: list[torch.Tensor] = []
    for x in SimGroup(size).run(one)[0]:
        if not packed:
            x = (x.transpose(0, 1) if qkv_format == "sbhd" else x).flatten(0, 1)
        found.append(x > 0)
    return found[0], found[1].permute(2, 1, 0)


def some(layouts: tuple[str, ...], size: int, number: int) -> tuple[str, ...]:
    return layouts if size == 4 else (layouts[number % len(layouts)],)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("comm", "size", "inner", "number"), PLAYED)
@pytest.mark.one_in(3)
def test_packed_documents(comm: str, size: int, inner: int, number: int, package: str) -> None:
    for layout in some(LAYOUTS, size, number):
        for mask in masks(PACKAGES[package], "thd", layout, comm, size, inner):
            assert torch.equal(mask, expected(LENGTHS)), layout


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("qkv_format", ["bshd", pytest.param("sbhd", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("comm", "size", "inner", "number"), PLAYED)
@pytest.mark.one_in(5)
def test_batches(comm: str, size: int, inner: int, number: int, qkv_format: str, package: str) -> None:
    for layout in some(OF_BATCHES, size, number + (qkv_format == "sbhd")):
        for mask in masks(PACKAGES[package], qkv_format, layout, comm, size, inner):
            assert torch.equal(mask, expected(LENGTHS[:1] * 2)), layout
