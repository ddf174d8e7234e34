"""Makers of areas against boolean masks written down from what they promise, and readers against what they read."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from textwrap import indent

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from typer.testing import CliRunner

import cp_fast.tools.cli
import cp_ref.cli
from cp_ref import Unsupported, masks
from cp_ref.schedules.areas import read_areas
from cp_ref.schedules.planners.make_schedule import make_schedule
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.show.svg_pictures import svg_picture
from cp_ref.show.text_pictures import text_picture

LENGTH = st.integers(0, 14)
Mask = torch.Tensor  # bool [queries, keys]


def shown(areas: torch.Tensor, rows: int, columns: int) -> Mask:
    """The mask, by the definition; the areas have to be legal."""
    read_areas(areas, rows, columns)
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    seen = torch.zeros(rows, columns, dtype=torch.int64)
    for q0, q1, k0, k1, left, right in areas.tolist():
        aligned = i + k1 - q1
        inside = (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1)
        inside &= (j >= aligned - left) | (left < 0)
        inside &= (j <= aligned + right) | (right < 0)
        seen += inside
    assert int(seen.max().item() if seen.numel() else 0) <= 1
    return seen.bool()


def said(length: int, sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Mask:
    return sees(torch.arange(length)[:, None], torch.arange(length)[None, :]).expand(length, length)


@given(LENGTH, st.integers(0, 14), st.integers(1, 15), st.integers(1, 4))
def test_masks_of_one_number(length: int, some: int, block: int, step: int) -> None:
    some = min(some, length)
    expected = {
        masks.prefix_lm(some, length): lambda i, j: (j <= i) | ((i < some) & (j < some)),
        masks.block_causal(length, block): lambda i, j: j // block <= i // block,
        masks.chunked(length, block): lambda i, j: (j <= i) & (j // block == i // block),
        masks.first_tokens_and_window(length, some, step): lambda i, j: (j <= i) & ((j < some) | (j >= i - step)),
        masks.dilated_blocks(length, block, step): lambda i, j: (
            (j <= i) & ((i // block - j // block) % step == 0) & ((j // block < i // block) | (j <= i))
        ),
    }
    for areas, sees in expected.items():
        assert torch.equal(shown(areas, length, length), said(length, sees))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.data())
def test_trees(lengths: list[int], data: st.DataObject) -> None:
    parents = [data.draw(st.integers(-1, n - 1)) for n in range(len(lengths))]
    segment = [n for n, length in enumerate(lengths) for _ in range(length)]
    expected = torch.zeros(len(segment), len(segment), dtype=torch.bool)
    for i, mine in enumerate(segment):
        above = mine
        while above >= 0:
            for j, other in enumerate(segment):
                expected[i, j] |= other == above and (above != mine or j <= i)
            above = parents[above]
    assert torch.equal(shown(masks.tree(lengths, parents), len(segment), len(segment)), expected)
    one = masks.tree(lengths, [-1] + [0] * (len(lengths) - 1))
    assert torch.equal(masks.shared_prefix(lengths[0], lengths[1:]), one)


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 4), max_size=4), st.integers(-1, 4), st.integers(-1, 4))
def test_documents(sizes: list[tuple[int, int, int, int]], left: int, right: int) -> None:
    """Each sees its own tokens, aligned to the last ones, wherever padding puts them."""
    lens_q, lens_kv, more_q, more_kv = zip(*sizes, strict=True) if sizes else ((), (), (), ())
    slots_q, slots_kv = (list(map(sum, zip(*x, strict=True))) for x in ((lens_q, more_q), (lens_kv, more_kv)))
    q, k, padded_q, padded_kv = (torch.tensor([0, *accumulate(x)]) for x in (lens_q, lens_kv, slots_q, slots_kv))
    areas = masks.documents(
        q, k, cu_seqlens_q_padded=padded_q, cu_seqlens_kv_padded=padded_kv, window_size=(left, right)
    )
    expected = torch.zeros(sum(slots_q), sum(slots_kv), dtype=torch.bool)
    for n, (len_q, len_kv, _, _) in enumerate(sizes):
        i, j = torch.arange(len_q)[:, None] + len_kv - len_q, torch.arange(len_kv)[None, :]
        part = expected[int(padded_q[n]) :, int(padded_kv[n]) :][:len_q, :len_kv]
        part |= ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))
    assert torch.equal(shown(areas, *expected.shape), expected)
    if lens_q == lens_kv and sizes:
        each = [masks.documents([0, n], window_size=(left, right)) for n in lens_q]
        assert torch.equal(masks.packed(each, padded_q, padded_kv), areas)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3)), max_size=4))
def test_masks_of_magi_attention(parts: list[tuple[int, int, int]]) -> None:
    """Causal ones are aligned to the last row and key, inverse ones to the first."""
    q = [0, *accumulate(rows for rows, _, _ in parts)]
    k = [0, *accumulate(keys for _, keys, _ in parts)]
    expected = torch.zeros(q[-1], k[-1], dtype=torch.bool)
    for (rows, keys, kind), a, b in zip(parts, q, k, strict=False):
        part = torch.ones(rows, keys, dtype=torch.bool)
        part = part.tril(keys - rows) if kind in (1, 3) else part
        expected[a : a + rows, b : b + keys] = part.triu() if kind in (2, 3) else part
    ranges = [list(pairwise(x)) for x in (q, k)]
    names = ["full", "causal", "inv_causal", "bi_causal"]
    for types in ([kind for *_, kind in parts], [names[kind] for *_, kind in parts]):
        assert torch.equal(shown(masks.from_magi(ranges[0], ranges[1], types), q[-1], k[-1]), expected)


DOCUMENTS = torch.tensor([0] * 50 + [1] * 90 + [2] * 160)
FLEX: dict[str, tuple[Callable[..., torch.Tensor], int]] = {  # mask_mod, and how many areas it comes to
    "causal": (lambda b, h, q, k: k <= q, 1),
    "window": (lambda b, h, q, k: (k <= q) & (k >= q - 70), 1),
    "documents": (lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (k <= q), 3),
    "prefix": (lambda b, h, q, k: (k <= q) | (k < 140), 2),
    "first tokens and window": (lambda b, h, q, k: (k <= q) & ((k < 4) | (k >= q - 70)), 3),
    "blocks": (lambda b, h, q, k: k // 64 <= q // 64, 5),
    "nothing": (lambda b, h, q, k: (q < 0) & (k < 0), 0),
    "everything": (lambda b, h, q, k: (q >= 0) & (k >= 0), 1),
}


@pytest.mark.parametrize("name", FLEX)
@pytest.mark.parametrize("block", [128, (64, 32)])
def test_masks_of_flex_attention(name: str, block: int | tuple[int, int]) -> None:
    mask_mod, number = FLEX[name]
    given = create_block_mask(mask_mod, None, None, 300, 300, device="cpu", BLOCK_SIZE=block)
    areas = masks.from_block_mask(given)
    assert torch.equal(shown(areas, 300, 300), create_mask(mask_mod, None, None, 300, 300, device="cpu")[0, 0])
    assert len(areas) == number


def test_masks_of_flex_attention_that_are_no_areas() -> None:
    def odd(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q < 128) | ((q + k) % 2 == 0)

    with pytest.raises(Unsupported, match=r"block of queries 128:256 and keys 0:128, is not supported"):
        masks.from_block_mask(create_block_mask(odd, None, None, 300, 300, device="cpu"))
    with pytest.raises(Unsupported, match="a BlockMask of 2 heads is not supported"):
        masks.from_block_mask(create_block_mask(lambda b, h, q, k: q >= k + h, None, 2, 300, 300, device="cpu"))
    with pytest.raises(TypeError, match="block_mask is a Tensor"):
        masks.from_block_mask(torch.zeros(1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: masks.prefix_lm(5, 4), "prefix is 5; it must be at most 4"),
        (lambda: masks.block_causal(4, 0), "block is 0; it must be at least 1"),
        (lambda: masks.chunked(4, True), "chunk is True; it must be an integer"),
        (lambda: masks.tree([1, 2], [-1, 1]), r"parents\[1\] is 1; a parent comes before its child"),
        (lambda: masks.tree([1, 2], [-1]), "parents has 1 entries and lengths has 2"),
        (lambda: masks.shared_prefix(1, [2, -1]), r"answers\[1\] is -1"),
        (lambda: masks.packed([masks.prefix_lm(1, 2)] * 2, [0]), "starts_q has 1 entries for 2 masks"),
        (lambda: masks.from_magi([(0, 1)], [(0, 1)], [4]), r"types\[0\] is 4; it must be one of 0, 'full'"),
        (
            lambda: masks.documents(5),  # type: ignore[arg-type]
            "cu_seqlens_q is 5; it must be a list of integers",
        ),
    ],
)
def test_arguments_that_mean_nothing(make: Callable[[], torch.Tensor], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make()


# ---- areas in pictures, in words and on command lines


TWO = (Sequence(3, 3, 4, 4), Sequence(4, 4, 4, 4))
ACROSS = Problem(2, TWO, qkv_format="thd", layout="contiguous", areas=((0, 8, 0, 8, -1, 0), (0, 2, 4, 6, -1, -1)))
runner = CliRunner(env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})


def test_a_picture_shows_the_whole_buffer() -> None:
    picture = text_picture(ACROSS, make_schedule(ACROSS))
    assert (
        picture.splitlines()
        == """\
p2p, cp_size 2, thd, contiguous, 2 areas
8 query rows x 8 key rows of the packed buffer; a cell is one query x one key

        key   0   1   2   3   4   5   6   7
      owner   0   0   0   0   1   1   1   1
query       ┌────────────────────────────────
    0     0 │0:0  .   .   .  0:1 0:1  .   .
    1     0 │0:0 0:0  .   .  0:1 0:1  .   .
    2     0 │0:0 0:0 0:0  .   .   .   .   .
    3     0 │ .   .   .   .   .   .   .   .
    4     1 │1:1 1:1 1:1  .  1:0  .   .   .
    5     1 │1:1 1:1 1:1  .  1:0 1:0  .   .
    6     1 │1:1 1:1 1:1  .  1:0 1:0 1:0  .
    7     1 │1:1 1:1 1:1  .  1:0 1:0 1:0 1:0

R:S  computed by rank R at its step S, both from 0
.    computed by nobody (masked, or padding)""".splitlines()
    )
    root = ET.fromstring(svg_picture(ACROSS, make_schedule(ACROSS)))
    words = "".join(root.itertext())
    assert "2 areas" in words
    assert "slots of the packed buffer" in words


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous", "balanced"])
def test_commands_take_a_makers_call(layout: str, tmp_path: Path) -> None:
    options = ["--cp-size", "2", "--seqlens", "8,8", "--layout", layout, "--areas", "shared_prefix(6, [5, 5])"]
    planned = runner.invoke(cp_fast.tools.cli.app, ["plan", *options, "--svg", str(tmp_path / "plan.svg")])
    assert planned.exit_code == 0, planned.output
    assert "every visible pair (111 a head) is computed exactly once" in " ".join(planned.output.split())
    told = runner.invoke(cp_ref.cli.app, ["explain", *options])
    assert told.exit_code == 0, told.output
    said = " ".join(told.output.split())
    assert "who sees whom as 4 areas say" in said
    assert len(masks.from_call("shared_prefix(6, [5, 5])")) == 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("prefix_lm(4", "areas are 'prefix_lm(4'; they must be a call of block_causal"),
        ("open('x')", "they must be a call of block_causal"),
        ("prefix_lm(4, 99)", "q_stop must lie within the 16 rows"),
    ],
)
def test_calls_that_are_refused(call: str, words: str) -> None:
    for app, command in ((cp_fast.tools.cli.app, "plan"), (cp_ref.cli.app, "explain")):
        refused = runner.invoke(app, [command, "--cp-size", "2", "--seqlens", "16", "--areas", call])
        assert refused.exit_code == 2
        assert words.replace(" ", "") in "".join(refused.output.split())


def test_the_page_on_masks_is_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "masks.md").read_text()
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)), {})
    assert indent(capsys.readouterr().out, "    ") in page
