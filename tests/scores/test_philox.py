"""Philox-4x32 with 7 rounds: Random123's known answers, and Python's own integers."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from cp_ref.contract.scores import kept, philox4x32, threshold

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
    found = kept(b.int(), h.int(), i.int(), j.int(), torch.tensor(seed), dropout_p)
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
    whole = kept(zero, zero, zero, torch.arange(40)[None], torch.tensor(1), 0.4)
    assert torch.equal(kept(zero, zero, zero, order[None], torch.tensor(1), 0.4), whole[:, order])


def test_the_share_that_is_dropped() -> None:
    i, j, zero = torch.arange(400)[:, None], torch.arange(500)[None], torch.zeros(1, 1, dtype=torch.int32)
    share = 1 - kept(zero, zero, i, j, torch.tensor(11), 0.3).double().mean()
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / 200_000) ** 0.5
