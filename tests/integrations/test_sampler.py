"""Documents shared out to groups of several sizes: each once, within room, balanced; and a step of them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_fast.integrations.sampler import DocumentSampler, pack, share_out
from tests.dist.workers import run_program
from tests.meta.step.step_processes import StepProcesses

EXAMPLE = Path(__file__).parents[2] / "examples" / "document_sampler.py"


@given(
    st.lists(st.integers(0, 80), max_size=40),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(10, 100),
)
def test_rounds_have_each_document_and_each_rank_once(lengths: list[int], ranks: int, tokens: int) -> None:
    lengths = [length for length in lengths if length <= ranks * tokens]
    rounds = share_out(lengths, ranks, tokens)
    assert sorted(n for groups in rounds for group in groups for n in group.documents) == list(range(len(lengths)))
    for groups in rounds:
        assert [rank for group in groups for rank in range(group.first, group.first + group.size)] == list(range(ranks))
        for group in groups:
            assert group.first % group.size == 0
            held = [lengths[n] for n in group.documents]
            assert sum(held) <= group.size * tokens
            assert group.size == 1 or max(held) > group.size // 2 * tokens  # no document has more ranks than it needs


def test_lengths_of_real_data_are_balanced() -> None:
    """Log-normal lengths on 8 ranks: most documents stay on one rank, and no rank has far more to do than the mean."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(400, generator=generator).mul(1.2).add(7).exp().clamp(16, 32768).int().tolist()
    rounds = share_out(lengths, 8, 8192)
    alone = sum(len(group.documents) for groups in rounds for group in groups if group.size == 1)
    assert alone > 0.9 * len(lengths)
    busy, work = 0.0, [0.0] * 8
    for groups in rounds:
        of_ranks = [
            sum(lengths[n] * (lengths[n] + 8192) for n in group.documents) / group.size
            for group in groups
            for _ in range(group.size)
        ]
        busy += max(of_ranks)
        work = [a + b for a, b in zip(work, of_ranks, strict=True)]
    assert busy < 1.3 * sum(work) / 8  # ranks wait for the busiest one in each round


def test_all_ranks_draw_the_same_steps_and_epochs_differ() -> None:
    lengths = [1 + 7 * n % 23 for n in range(50)]
    samplers = [DocumentSampler(lengths, rank=rank, ranks=4, tokens=8, documents=12) for rank in range(4)]

    def documents(sampler: DocumentSampler) -> list[list[int]]:
        return [sorted({n for _, chosen in step for n in chosen}) for step in sampler]

    steps = [list(sampler) for sampler in samplers]
    assert {len(found) for found in steps} == {len(samplers[0])} == {5}
    for of_ranks in zip(*steps, strict=True):
        assert len({len(rounds) for rounds in of_ranks}) == 1
        for round_ in zip(*of_ranks, strict=True):
            assert all(round_.count(one) % one[0] == 0 for one in round_ if one[1])  # a group has one part
    first = [sorted({n for x in samplers for n in documents(x)[step]}) for step in range(5)]
    assert sorted(n for step in first for n in step) == list(range(50))
    for sampler in samplers:
        sampler.set_epoch(1)
    assert [sorted({n for x in samplers for n in documents(x)[step]}) for step in range(5)] != first


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"ranks": 3, "rank": 0}, "ranks is 3; it must be a power of two"),
        ({"rank": 4}, "rank is 4"),
        ({"tokens": 0}, "tokens is 0"),
        ({"documents": 0}, "documents is 0"),
        ({"seed": "a"}, "seed is 'a'; it must be an integer"),
        ({"lengths": [5, 99]}, r"lengths\[1\] is 99; 4 ranks hold 40 tokens, 10 each: give more ranks, or"),
        ({"lengths": [5, "6"]}, r"lengths\[1\] is '6'; it must be an integer"),
        ({"lengths": 5}, "lengths is of type int; it must be a list of the documents' numbers of tokens"),
        ({"lengths": {7: 3}}, "lengths is of type dict; it must be a list"),
        ({"lengths": {3, 4}}, "lengths is of type set; it must be a list"),
        ({"lengths": "34"}, "lengths is of type str; it must be a list"),
        ({"lengths": [2**70]}, r"lengths\[0\] is 1180591620717411303424; it must be at most"),
        ({"lengths": torch.tensor([3.0])}, r"lengths\[0\] is 3.0; it must be an integer"),
    ],
)
def test_what_a_sampler_refuses(odd: dict[str, object], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        DocumentSampler(**{"lengths": [1], "rank": 0, "ranks": 4, "tokens": 10, "documents": 2} | odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", ["34", {3: 4}, [3, "4"], [3, None], [3, 2**70], [3, -1], [[3]], 5, None])
def test_what_is_no_lengths_is_not_shared_out(lengths: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="lengths"):
        share_out(lengths, 2, 8)
    with pytest.raises((ValueError, TypeError), match="lengths"):
        DocumentSampler(lengths, rank=0, ranks=2, tokens=8, documents=1)


def test_lengths_of_arrays_and_tensors() -> None:
    expected = share_out([3, 9, 4], 2, 8)
    assert share_out(torch.tensor([3, 9, 4]), 2, 8) == expected  # type: ignore[arg-type]
    assert share_out(np.array([3, 9, 4], dtype=np.uint16), 2, 8) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("values", ["ab", ["a"], [None, 1], [2**70], {1: 2}, [[1], [1, 2]], [True], [1.5], b"ab", 5])
@pytest.mark.parametrize("entry", ["input_ids", "labels"])
def test_what_is_no_integers_is_not_packed(values: Any, entry: str) -> None:
    document = {"input_ids": [1]} | {entry: values}
    with pytest.raises((ValueError, TypeError), match=rf"documents\[0\]\['{entry}'\]"):
        pack([document])


def test_labels_beyond_int64_are_not_packed() -> None:
    labels = np.array([2**64 - 100], dtype=np.uint64)
    with pytest.raises(ValueError, match=r"documents\[0\]\['labels'\] has 18446744073709551516; it must be at most"):
        pack([{"input_ids": [1], "labels": labels}])


@pytest.mark.parametrize("documents", [[], [{"input_ids": [1, 2]}]])
@pytest.mark.parametrize("pad", [None, "0", 0.5, 2**70])
def test_a_padding_id_is_read_on_ranks_with_documents_too(documents: list[Any], pad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="pad_token_id is"):
        pack(documents, pad_token_id=pad)


def test_a_run_goes_on_inside_an_epoch_on_another_number_of_ranks() -> None:
    """By a DataLoader; the lengths come one by one."""
    lengths = [1 + 7 * n % 23 for n in range(50)]

    def documents(ranks: int, first: int) -> list[list[int]]:
        steps: list[list[int]] = [[] for _ in range(first, 5)]
        for rank in range(ranks):
            sampler = DocumentSampler(iter(lengths), rank=rank, ranks=ranks, tokens=24, documents=12)
            sampler.set_epoch(3)
            with torch.device("meta"):
                assert len(list(sampler)) == 5
            loader: Any = torch.utils.data.DataLoader(_Rounds(), sampler=sampler, batch_size=None)
            for step, rounds in zip(steps, islice(loader, first, None), strict=True):
                step += [n for size, chosen in rounds if rank % size == 0 for n in chosen]
        return [sorted(step) for step in steps]

    before, after = documents(2, 0)[:2], documents(8, 2)
    assert [len(step) for step in before + after] == [12, 12, 12, 12, 2]
    assert sorted(n for step in before + after for n in step) == list(range(50))


class _Rounds(torch.utils.data.Dataset[Any]):
    """Gives the rounds that it is asked for."""

    def __getitem__(self, rounds: Any) -> Any:
        return rounds


def test_a_packed_row_says_what_each_document_says() -> None:
    documents = [{"input_ids": []}, {"input_ids": np.array([5, 6], dtype=np.int32), "length": 2, "text": "ab"}]
    documents.append({"input_ids": torch.tensor([7]), "labels": [-100], "attention_mask": [1], "position_ids": [0]})
    row = pack(documents)
    assert {name: x.tolist() for name, x in row.items()} == {
        "input_ids": [[5, 6, 7]],
        "position_ids": [[0, 1, 0]],
        "labels": [[5, 6, -100]],
    }
    assert {x.dtype for x in row.values()} == {torch.int64}


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"labels": [5]}, r"documents\[1\]\['labels'\] has shape \[1\] .* it must be integers \[2\], one a token"),
        ({"labels": [0.5, 1.0]}, r"\['labels'\] has shape \[2\] and dtype torch.float32"),
        ({"labels": None}, r"\['labels'\] is None"),
        ({"input_ids": [[5, 6]]}, r"\['input_ids'\] has shape \[1, 2\]"),
        ({"attention_mask": [1, 0]}, r"\['attention_mask'\] is not 1 for each token.*without padding"),
        ({"position_ids": [0, 0]}, r"\['position_ids'\] is not 0, 1, 2 and so on; pack takes documents one by one"),
        ({"completion_mask": [0, 1]}, r"documents\[1\] has 'completion_mask', one value a token, .*labels be -100"),
        ("ab", r"documents\[1\] is of type str; it must be a dict with input_ids"),
    ],
)
def test_what_a_packed_row_refuses(odd: Any, said: str) -> None:
    document = {"input_ids": [5, 6], **odd} if isinstance(odd, dict) else odd
    with pytest.raises((ValueError, TypeError), match=said):
        pack([{"input_ids": [7]}, document])


@pytest.mark.thorough
def test_a_step_of_groups_of_all_sizes_is_that_of_one_process(steps: StepProcesses) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
    one, four = (run_program(EXAMPLE, processes) for processes in (1, 4))
    losses = [[float(word) for word in said.split()[1:]] for said in (one, four)]
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    report = steps.compare("examples.document_sampler:build", "examples.document_sampler:batch", 2, loss="sum")
    assert report.right, str(report)
