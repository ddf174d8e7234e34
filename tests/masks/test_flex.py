"""BlockMasks made by hand: areas are what FlexAttention computes, compiled or not, or the mask is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cp_ref import Unsupported, dense_attention, masks
from tests.masks.test_makers import shown

SIZE = 4  # of a block
Rows = list[list[int]]  # the blocks of keys that each block of queries lists

MASKS: dict[str, Callable[..., torch.Tensor]] = {
    "all": lambda b, h, q, k: k >= 0,
    "none": lambda b, h, q, k: k < 0,
    "causal": lambda b, h, q, k: k <= q,
    "window": lambda b, h, q, k: (k <= q) & (k >= q - 3),
    "blocks": lambda b, h, q, k: k // SIZE <= q // SIZE,
}


def lists(rows: Rows, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As a BlockMask has them: counts [1, 1, rows], indices [1, 1, rows, columns]."""
    filled = [[*row, *[0] * (columns - len(row))] for row in rows]
    return torch.tensor([[[len(row) for row in rows]]]).int(), torch.tensor([[filled]]).int()


def made(partial: Rows, full: Rows | None, mask_mod: Any, lengths: tuple[int, int]) -> BlockMask:
    columns = max(-(-lengths[1] // SIZE), *(len(row) for row in partial + (full or [])))
    both = [*lists(partial, columns), *(lists(full, columns) if full is not None else (None, None))]
    return BlockMask.from_kv_blocks(
        *both, BLOCK_SIZE=SIZE, mask_mod=mask_mod, seq_lengths=lengths, compute_q_blocks=False
    )


def counted(block_mask: BlockMask) -> torch.Tensor:
    """How often the compiled kernels count each pair: they go through the lists, one block after the other."""
    rows, keys = block_mask.seq_lengths
    size_q, size_k = block_mask.BLOCK_SIZE
    times = torch.zeros(rows, keys, dtype=torch.int64)
    i, j, zero = torch.arange(rows)[:, None], torch.arange(keys)[None, :], torch.tensor(0)
    allowed = block_mask.mask_mod(zero, zero, i, j).expand(rows, keys)
    for count, index, every in (
        (block_mask.kv_num_blocks, block_mask.kv_indices, False),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, True),
    ):
        for n, number in enumerate([] if count is None or index is None else count[0, 0].tolist()):
            assert index is not None
            for m in index[0, 0, n, :number].tolist():
                here = slice(n * size_q, (n + 1) * size_q), slice(m * size_k, (m + 1) * size_k)
                times[here] += 1 if every else allowed[here].long()
    return times


def eager(block_mask: BlockMask) -> torch.Tensor:
    """The pairs that `flex_attention` computes when it is not compiled: with q = 0 and v = 1 for one key, out says
    whether that key is seen, and by how many.
    """
    rows, keys = block_mask.seq_lengths
    zero = torch.zeros(1, 1, max(rows, 1), 16), torch.zeros(1, 1, max(keys, 1), 16)
    value = torch.zeros(1, 1, keys, max(keys, 16))
    value[0, 0, range(keys), range(keys)] = 1
    out = flex.flex_attention(zero[0], zero[1], value, block_mask=block_mask)
    assert isinstance(out, torch.Tensor)
    return out[0, 0, :, :keys] > 0


@st.composite
def by_hand(draw: st.DrawFn) -> BlockMask:
    """A right mask, of which some blocks are then moved, dropped or listed twice, or whose mask_mod is replaced."""
    lengths = draw(st.integers(1, 14)), draw(st.integers(1, 14))
    name = draw(st.sampled_from(sorted(MASKS)))
    right = create_block_mask(MASKS[name], None, None, *lengths, device="cpu", BLOCK_SIZE=SIZE)
    assert right.full_kv_num_blocks is not None
    assert right.full_kv_indices is not None
    partial, full = (
        [row[:number] for row, number in zip(index[0, 0].tolist(), count[0, 0].tolist(), strict=True)]
        for count, index in (
            (right.kv_num_blocks, right.kv_indices),
            (right.full_kv_num_blocks, right.full_kv_indices),
        )
    )
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        rows, others = draw(st.permutations([partial, full]))
        row = draw(st.integers(0, len(rows) - 1))
        what = draw(st.sampled_from(["drop", "twice", "move", "copy", "add"]))
        if what == "add":
            rows[row].append(draw(st.integers(0, -(-lengths[1] // SIZE) - 1)))
        elif rows[row]:
            place = draw(st.integers(0, len(rows[row]) - 1))
            block = rows[row][place]
            if what in ("drop", "move"):
                del rows[row][place]
            if what in ("move", "copy"):
                others[row].append(block)
            elif what == "twice":
                rows[row].append(block)
    mask_mod = MASKS[draw(st.sampled_from([name, name, name, *sorted(MASKS)]))]
    return made(partial, draw(st.sampled_from([full, full, full, None])), mask_mod, lengths)


@pytest.fixture(scope="module", autouse=True)
def without_dynamo() -> Iterator[None]:
    """Eager `flex_attention` is traced in every call unless it is told not to, by releases that can be told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
        yield


@given(by_hand())
def test_masks_made_by_hand(block_mask: BlockMask) -> None:
    times, asked = counted(block_mask), eager(block_mask)
    if _twice(block_mask) or not torch.equal(times, asked.long()):
        with pytest.raises(Unsupported, match="disagree in the block of queries"):
            masks.from_block_mask(block_mask)
        return
    assert torch.equal(shown(masks.from_block_mask(block_mask), *block_mask.seq_lengths), asked)


def _twice(block_mask: BlockMask) -> bool:
    """Whether a block is listed twice: refused even where it counts for nothing."""
    for n, number in enumerate(block_mask.kv_num_blocks[0, 0].tolist()):
        every = block_mask.kv_indices[0, 0, n, :number].tolist()
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            every += block_mask.full_kv_indices[0, 0, n, : int(block_mask.full_kv_num_blocks[0, 0, n])].tolist()
        if len({*every}) < len(every):
            return True
    return False


LENGTHS = (12, 12)
DIAGONAL, BELOW = [[0], [1], [2]], [[], [0], [0, 1]]


@pytest.mark.parametrize(
    ("block_mask", "words"),
    [
        (made([[0], [], [2]], BELOW, MASKS["causal"], LENGTHS), "queries 4:8 and keys 4:8 .*is not listed"),
        (made(DIAGONAL, [[], [0], [1]], MASKS["causal"], LENGTHS), "queries 8:12 and keys 0:4 .*is not listed"),
        (made(DIAGONAL, None, MASKS["causal"], LENGTHS), "queries 4:8 and keys 0:4 .*is not listed"),
        (made([[0], [1, 1], [2]], BELOW, MASKS["causal"], LENGTHS), "queries 4:8 and keys 4:8 .*more than once"),
        (made(DIAGONAL, [[], [0], [0, 1, 2]], MASKS["causal"], LENGTHS), "queries 8:12 and keys 8:12 .*more than once"),
        (made(DIAGONAL, BELOW, None, LENGTHS), "queries 0:4 and keys 4:8 .*is not listed"),
        (made(DIAGONAL, BELOW, MASKS["window"], LENGTHS), "queries 4:8 and keys 0:4 .*is listed as full"),
    ],
)
def test_blocks_and_mask_mod_that_disagree(block_mask: BlockMask, words: str) -> None:
    with pytest.raises(Unsupported, match=rf"blocks and mask_mod disagree in the block of {words}"):
        masks.from_block_mask(block_mask)


def test_a_mask_mod_that_was_replaced() -> None:
    block_mask = create_block_mask(MASKS["causal"], None, None, *LENGTHS, device="cpu", BLOCK_SIZE=SIZE)
    block_mask.mask_mod = MASKS["all"]
    with pytest.raises(Unsupported, match="queries 0:4 and keys 4:8"):
        masks.from_block_mask(block_mask)


def test_blocks_of_the_backward_pass_that_differ() -> None:
    block_mask = create_block_mask(MASKS["causal"], None, None, *LENGTHS, device="cpu", BLOCK_SIZE=SIZE)
    assert block_mask.full_q_num_blocks is not None
    block_mask.full_q_num_blocks = block_mask.full_q_num_blocks.clone()
    block_mask.full_q_num_blocks[0, 0, 0] -= 1
    with pytest.raises(Unsupported, match="full_q_indices, of the backward pass, has other blocks"):
        masks.from_block_mask(block_mask)


def test_a_mask_that_looks_at_the_head() -> None:
    def per_head(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k <= q + h

    block_mask = create_block_mask(per_head, None, None, *LENGTHS, device="cpu", BLOCK_SIZE=SIZE)
    with pytest.raises(Unsupported, match="whose mask_mod looks at the head"):
        masks.from_block_mask(block_mask)


def test_rows_of_a_batch_have_masks_of_their_own() -> None:
    """As PyTorch's examples have them: documents of each row differ. The rows are those of one buffer."""
    documents = torch.tensor([[0] * 5 + [1] * 8, [0] * 9 + [1] * 4, [0] * 13])

    def inside(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (documents[b, q] == documents[b, k]) & (k <= q)

    block_mask = create_block_mask(inside, 3, None, 13, 13, device="cpu", BLOCK_SIZE=SIZE)
    areas = masks.from_block_mask(block_mask)
    seen = (documents[:, :, None] == documents[:, None]) & torch.ones(13, 13, dtype=torch.bool).tril()
    expected = torch.block_diag(*seen.int()).bool()
    assert torch.equal(shown(areas, 39, 39), expected)
    q, k, v = torch.randn(3, 3, 13, 2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q_first, k_first, v_first = (x.transpose(1, 2) for x in (q, k, v))
    theirs = flex.flex_attention(q_first, k_first, v_first, block_mask=block_mask)
    lengths: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": torch.arange(4) * 13}
    ours = dense_attention(*(x.flatten(0, 1) for x in (q, k, v)), areas=areas, **lengths)[0]
    assert isinstance(theirs, torch.Tensor)
    torch.testing.assert_close(ours.unflatten(0, (3, 13)).transpose(1, 2), theirs)
    assert block_mask.full_kv_num_blocks is not None
    block_mask.full_kv_num_blocks[1, 0, 1] -= 1
    with pytest.raises(Unsupported, match="disagree in the block of queries 4:8 and keys 0:4 of row 1"):
        masks.from_block_mask(block_mask)


def test_a_dilated_window_names_score_mod_which_is_right() -> None:
    def dilated(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k > q - 256) & ((q - k) % 2 == 0)

    block_mask = create_block_mask(dilated, None, None, 512, 512, device="cpu")
    with pytest.raises(Unsupported, match=r"queries 0:128 and keys 0:128[^$]*A score_mod takes every mask"):
        masks.from_block_mask(block_mask)

    def hidden(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = (kv_idx <= q_idx) & (kv_idx > q_idx - 256) & ((q_idx - kv_idx) % 2 == 0)
        return torch.where(seen, score, -torch.inf)

    q, k, v = torch.randn(3, 1, 512, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q_first, k_first, v_first = (x.transpose(1, 2) for x in (q, k, v))
    theirs = flex.flex_attention(q_first, k_first, v_first, block_mask=block_mask)
    assert isinstance(theirs, torch.Tensor)
    ours = dense_attention(q, k, v, attn_mask_type="no_mask", score_mod=hidden)[0]
    torch.testing.assert_close(ours.transpose(1, 2), theirs)


@pytest.mark.parametrize("heads", [2, "mask_mod"])
def test_masks_that_differ_between_heads_name_score_mod(heads: Any) -> None:
    mask_mod = MASKS["causal"] if heads == 2 else (lambda b, h, q, k: k <= q + h)
    block_mask = create_block_mask(
        mask_mod, None, heads if heads == 2 else None, *LENGTHS, device="cpu", BLOCK_SIZE=SIZE
    )
    with pytest.raises(Unsupported, match="score_mod that gives hidden pairs -inf may look"):
        masks.from_block_mask(block_mask)


def test_lists_without_a_meaning() -> None:
    many = made(DIAGONAL, None, MASKS["causal"], LENGTHS)
    many.kv_num_blocks[0, 0, 1] = 7
    with pytest.raises(ValueError, match=r"kv_num_blocks is \[1, 7, 1\] .* must have a number from 0 to 3"):
        masks.from_block_mask(many)
    with pytest.raises(ValueError, match="kv_indices has blocks outside of the 3 of a row"):
        masks.from_block_mask(made([[0], [1], [3]], None, MASKS["causal"], LENGTHS))
    with pytest.raises(TypeError, match=r"mask_mod of block_mask returns torch\.int64; it must return torch\.bool"):
        masks.from_block_mask(made(DIAGONAL, None, lambda b, h, q, k: q + k, LENGTHS))
