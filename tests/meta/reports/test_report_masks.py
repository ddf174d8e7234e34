"""Pictures of masks: the pairs that should be seen, those that were, and a real implementation with a real bug."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from conformance.case import Case
from conformance.checks.probes import check_probes, observed_pairs, visible_pairs
from conformance.implementation import Implementation, load
from conformance.record import Played, RunRecord
from conformance.report import read_record, write_report
from conformance.report.failures import EXTRA, MISSING, MOST, SEEN, visibility_difference, visible
from conformance.report.page import summary
from cp_ref.schedules.problem import Problem, Sequence
from tests.meta.mutants import MUTANTS
from tests.meta.reports.report_records import drawn_cases

THD = Case(Problem(2, (Sequence(3, 4, 4, 4), Sequence(4, 4, 4, 4)), qkv_format="thd", window_size=(1, -1)), tail_q=2)


def _small(count: int) -> Iterator[Case]:
    """Drawn cases whose score matrix is small and not empty."""
    kept = 0
    for case in drawn_cases(400):
        sizes = case.problem.starts_q[-1] + case.tail_q, case.problem.starts_kv[-1] + case.tail_kv
        if max(sizes) <= 24 and case.problem.pairs and case.problem.d_v >= 5 and kept < count:
            kept += 1
            yield case
    assert kept == count


def test_visible_is_what_the_probes_count() -> None:
    for case in drawn_cases(200):
        if case.problem.starts_q[-1] * case.problem.starts_kv[-1] <= 200**2:
            assert visible(case) == {(q, k) for q, k in visible_pairs(case).nonzero().tolist()}


def _marked(picture: str, mark: str) -> set[tuple[int, int]]:
    """The (query, key) pairs that a picture shows by a character."""
    return {(q, k) for q, line in enumerate(picture.splitlines()) for k, here in enumerate(line) if here == mark}


def test_the_picture_has_the_pairs() -> None:
    expected = visible(THD)
    got = (expected - {(0, 0), (5, 4)}) | {(0, 3), (8, 7), (4, 0)}
    found = visibility_difference(THD, got)
    missing, extra = found.expected - found.seen, found.seen - found.expected
    assert (missing, extra) == ({(0, 0), (5, 4)}, {(0, 3), (8, 7), (4, 0)})
    assert found.wrong == (2, 3)
    assert found.whole
    assert [len(line) for line in found.picture.splitlines()] == [8] * 10
    assert _marked(found.picture, SEEN) == expected & got
    assert _marked(found.picture, EXTRA) == extra
    assert _marked(found.picture, MISSING) == missing
    assert (
        "3 pairs are seen that should be hidden (+), 2 pairs are not seen that should be visible (-)" in found.sentence
    )


def test_sentences() -> None:
    assert "not known" in visibility_difference(THD, None).sentence
    assert "not in the mask" in visibility_difference(THD, visible(THD)).sentence
    one = visibility_difference(THD, visible(THD) - {(0, 0)})
    assert "1 pair is not seen that should be visible" in one.sentence


def test_a_large_mask_is_cut_around_the_first_wrong_pair() -> None:
    case = Case(Problem(2, (Sequence(400, 200, 400, 200),), attn_mask_type="no_mask"))
    found = visibility_difference(case, visible(case) - {(300, 190), (310, 191), (390, 0)})
    assert (300 in found.rows, 190 in found.columns) == (True, True)
    assert (len(found.rows), len(found.columns)) == (MOST, MOST)
    assert found.columns.stop == 200
    assert found.expected - found.seen == {(300, 190), (310, 191)}
    assert found.wrong == (3, 0)
    assert not found.whole


def test_pairs_outside_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"the pair \(10, 0\) is outside"):
        visibility_difference(THD, [(10, 0)])


def test_observed_pairs_of_the_reference_are_the_visible_ones() -> None:
    torch.set_num_threads(1)
    reference = load("cp_ref")
    for case in _small(2):
        assert observed_pairs(reference, case) == tuple(sorted(visible(case))), case


def test_a_planted_bug_is_drawn(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    reference = load("cp_ref")
    problem = Problem(2, (Sequence(8, 8, 8, 8),), qkv_format="thd", window_size=(2, -1))
    case = Case(problem, seed=3)
    with MUTANTS["window-off-by-one"].planted():
        pairs = observed_pairs(reference, case)
    assert pairs is not None
    extra = set(pairs) - visible(case)
    assert extra
    assert extra <= {(q, q - 3) for q in range(3, 8)}  # one key too many on the left, where the tiles reach so far
    assert visible(case) <= set(pairs)
    played = Played("schedule", "probes", str(case), "wrong", ("query 3 counts 4 keys",), shrunk=True, pairs=pairs)
    page = write_report(RunRecord({"impl": "cp_ref"}, (played,)), tmp_path)[1].read_text(encoding="utf-8")
    assert f"{len(extra)} pairs are seen that should be hidden" in page
    picture = page.partition('<pre class="mask">')[2].partition("</pre>")[0]
    assert _marked(picture, EXTRA) == extra


def test_what_is_too_large_or_does_not_answer_has_no_pairs() -> None:
    reference = load("cp_ref")
    assert observed_pairs(reference, Case(Problem(1, (Sequence(65, 65, 65, 65),)))) is None
    with MUTANTS["wrong-tag-on-the-wire"].planted():
        assert observed_pairs(reference, Case(Problem(2, (Sequence(8, 8, 8, 8),)))) is None


def test_a_nan_counts_as_seen() -> None:
    """Padding is NaN: an implementation that reads it sees it."""
    torch.set_num_threads(1)

    class Leaky:
        def __getattr__(self, name: str) -> object:
            return getattr(load("cp_ref"), name)

        @staticmethod
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: object) -> object:
            return load("cp_ref").attention(q, k, v, **rest) + 0 * v.sum()

    case = replace(THD, tail_q=0)
    case = replace(case, problem=replace(case.problem, sequences=(Sequence(4, 3, 4, 4),)))
    pairs = observed_pairs(Leaky(), case)  # type: ignore[arg-type]
    assert pairs is not None
    assert set(pairs) > visible(case)


@pytest.mark.thorough
def test_a_real_run_of_a_broken_implementation(tmp_path: Path) -> None:
    """Drawn problems, a planted bug, the tier that sees it, the report."""
    torch.set_num_threads(1)
    reference = load("cp_ref")
    with MUTANTS["window-off-by-one"].planted():
        played = [_play(reference, case) for case in _small(25)]
    wrong = [p for p in played if p.verdict == "wrong"]
    assert 0 < len(wrong) < len(played)
    files = write_report(RunRecord({"impl": "cp_ref", "device": "cpu"}, tuple(played)), tmp_path)
    found = summary(cast(RunRecord, read_record(files[0])))
    assert {f.text for f in found.failures} == {p.text for p in wrong}
    differing = [f for f in found.failures if f.difference and f.difference.wrong]
    assert differing
    for failure in differing:
        assert failure.case is not None
        assert failure.case.problem.window_size[0] >= 0
        assert failure.difference is not None
        assert failure.difference.wrong is not None
        assert failure.difference.wrong[0] == 0 < failure.difference.wrong[1]
    windows = [panel for panel in found.panels if str(panel.choice) in ("window: left", "window: both")]
    assert sum(panel.counts["wrong"] for panel in windows) == len(wrong)
    assert "wrong" in files[1].read_text(encoding="utf-8")


def _play(impl: Implementation, case: Case) -> Played:
    findings = tuple(check_probes(impl, case))
    pairs = observed_pairs(impl, case) if findings else None
    return Played("schedule", "probes", str(case), "wrong" if findings else "right", findings, pairs=pairs)
