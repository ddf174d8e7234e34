"""Which probabilities dropout keeps: Philox-4x32 with 7 rounds of the seed and of a pair's place.

Philox is a counter-based random generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
SC 2011): a block cipher of a counter, four words of 32 bits, under a key of two. It has no state, so every rank, every
tile and both passes draw the same numbers in any order. Seven rounds pass BigCrush.

    key       the seed's low and its high 32 bits
    counter   (j // 16 * 8 + j % 8, i // 16 * 8 + i % 8, h, b)
    word      2 * (i // 8 % 2) + j // 8 % 2

The pair is kept iff the word is at least round(dropout_p * 2**32). A counter serves queries i, i + 8 and keys j, j + 8:
a thread of a GPU's matrix unit holds just these, in both passes, so it draws four words for four pairs.
"""

from __future__ import annotations

import torch

__all__ = ["ROUNDS", "kept", "philox4x32", "threshold"]

ROUNDS = 7
_LOW = 0xFFFFFFFF
_FACTORS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key after each round

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor], rounds: int = ROUNDS) -> Words:
    """The four random words of a counter under a key.

    Args:
        counter, key: int64 tensors that broadcast, each value of 32 bits, from 0 to 2**32 - 1.
        rounds: 7 here; 10 is the generator of most libraries.

    Returns:
        Four int64 tensors of the same kind.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox4x32((zero, zero, zero, zero), (zero, zero))]  # Random123's known answer
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        high0, low0 = _product(c0, _FACTORS[0])
        high1, low1 = _product(c2, _FACTORS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def kept(
    document: torch.Tensor,
    head: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    seed: torch.Tensor,
    dropout_p: float,
) -> torch.Tensor:
    """Which pairs dropout keeps.

    Args:
        document, head, q_idx, kv_idx: int32 or int64 tensors that broadcast against a block of scores.
        seed: int64, one element; its 64 bits are the key.
        dropout_p: the probability of dropping a pair.

    Returns:
        bool, of the broadcast shape.

    >>> zero = torch.zeros(1, dtype=torch.int32)  # keys 0 and 8 have the first two words of the example above
    >>> kept(zero, zero, zero, torch.tensor([0, 8]), torch.tensor(0), 0.3).int().tolist()
    [1, 0]
    """
    b, h, i, j = (x.long() for x in (document, head, q_idx, kv_idx))
    seed = seed.reshape(())
    counter = (j >> 4) * 8 + (j & 7), (i >> 4) * 8 + (i & 7), h, b
    first, second, third, fourth = philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW))
    high_i, high_j = (i & 8) != 0, (j & 8) != 0
    word = torch.where(high_i, torch.where(high_j, fourth, third), torch.where(high_j, second, first))
    return word >= threshold(dropout_p)


def threshold(dropout_p: float) -> int:
    """The least word that is kept.

    >>> threshold(0.25) == 2**30
    True
    """
    return round(dropout_p * 2**32)


def _product(a: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of a product. int64 wraps at 2**64, so all 64 bits are there."""
    product = a * factor
    return (product >> 32) & _LOW, product & _LOW
