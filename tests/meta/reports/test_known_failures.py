"""Known failures: what an entry covers, which entries are refused, and which entries have to go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conformance.case import Case
from conformance.matching import FIELDS, field_values
from conformance.record import Played, RunRecord
from conformance.runner.known_failures import KnownFailures, KnownFailuresError
from cp_ref.schedules.problem import Problem, Sequence
from tests.meta.reports.report_records import drawn_cases

CASE = Case(
    Problem(
        2,
        (Sequence(7, 5, 8, 8), Sequence(0, 4, 4, 4)),
        qkv_format="thd",
        attn_mask_type="padding",
        window_size=(-1, 3),
        heads_q=4,
        heads_kv=2,
    ),
    tail_q=2,
    return_lse=True,
    grads="qv",
)


def _known(match: str, **more: str | bool) -> KnownFailures:
    lines = [f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in more.items()]
    return KnownFailures.parse("\n".join(["[[entry]]", f"match = {match}", 'reason = "R"', 'issue = "I"', *lines]))


def _covers(match: str, text: str, case: str | None = None) -> bool:
    return _known(match).entries[0].matches(text, "schedule", "logic", case)


def _played(verdict: str, case: Case = CASE, tier: str = "logic", level: str = "schedule") -> Played:
    return Played(level, tier, str(case), verdict, ("one", "two"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("match", "truth"),
    [
        ("{}", True),
        ('{qkv_format = "thd"}', True),
        ('{qkv_format = "bshd"}', False),
        ('{qkv_format = "thd", causal = true}', False),
        ("{window_right = {low = 1}, window_left = -1}", True),
        ("{window_right = {high = 2}}", False),
        ('{qkv_format = ["bshd", "thd"], causal = false, bottom_right = false}', True),
        ('{qkv_format = ["bshd", "sbhd"]}', False),
        ("{cp_size = {low = 2, high = 2}, group_size = [1, 2]}", True),
        ("{sequences = 2, cross = true, shortest_q = 0, longest_q = 7, shortest_kv = 4, longest_kv = 5}", True),
        ('{grads = "qv", return_lse = true, tail_q = 2}', True),
        ("{return_lse = 1}", False),
        ("{tail_q = true}", False),
        ("{return_lse = {low = 0}}", False),
        ("{softmax_scale = {low = 0}}", False),
        ('{text = "error lengths-decrease"}', False),
    ],
)
def test_what_matches(match: str, truth: bool) -> None:
    assert _covers(match, str(CASE)) is truth


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ("{qkv_fromat = 'thd'}", "'qkv_fromat' is no field of a problem; there are text, cp_size"),
        ("{window_size = [0, 1]}", "'window_size' is no field"),
        ("{cp_size = []}", "cp_size is []; it must be a value, a list of values"),
        ("{cp_size = [[1]]}", "cp_size is [[1]]; it must be a value"),
        ("{cp_size = [{low = 1}]}", "it must be a value"),
        ("{cp_size = {}}", "a range has the numbers low and high"),
        ("{cp_size = {least = 1}}", "a range has the numbers low and high"),
        ("{cp_size = {low = '1'}}", "a range has the numbers low and high"),
        ("{cp_size = {low = true}}", "a range has the numbers low and high"),
        ("{cp_size = 2026-01-01}", "it must be a value"),
    ],
)
def test_what_is_no_match(match: str, message: str) -> None:
    with pytest.raises(KnownFailuresError) as error:
        _known(match)
    assert message in str(error.value)
    assert str(error.value).startswith("known failures: entry 1: ")


def test_every_field_has_a_value_in_every_drawn_case() -> None:
    for case in drawn_cases(100):
        assert {"text", *field_values(str(case))} == set(FIELDS)
    assert field_values(str(Case(Problem(2, (), qkv_format="thd"))))["longest_q"] == 0


def test_a_name_alone_is_judged_by_its_text() -> None:
    assert _covers('{text = "error a"}', "error a")
    assert not _covers("{cp_size = {low = 0}}", "error a")  # it is about no case
    assert _covers("{cp_size = 2}", "special a", str(CASE))
    assert _covers('{text = "special a"}', "special a", str(CASE))


@pytest.mark.parametrize("verdict", ["wrong", "crashed", "hung"])
def test_a_known_failure(verdict: str) -> None:
    known = _known('{qkv_format = "thd"}').judge(_played(verdict))
    assert known == replace(_played("known"), findings=("known: R (I)", "one", "two"))
    assert _known('{qkv_format = "bshd"}').judge(_played(verdict)).verdict == verdict


@pytest.mark.parametrize("verdict", ["right", "unsupported", "missing", "out of memory", "known"])
def test_what_is_no_failure_stays_as_it_is(verdict: str) -> None:
    assert _known('{qkv_format = "thd"}').judge(_played(verdict)) == _played(verdict)


def test_tier_and_level_narrow_an_entry() -> None:
    known = _known("{}", tier="probes", level="kernel")
    assert known.match(_played("wrong", tier="probes", level="kernel"))
    assert not known.match(_played("wrong", tier="logic", level="kernel"))
    assert not known.match(_played("wrong", tier="probes", level="schedule"))


def _passes(known: KnownFailures, *verdicts: str) -> tuple[str, ...]:
    return known.unexpected_passes(RunRecord({}, tuple(_played(verdict) for verdict in verdicts)))


def test_an_entry_that_no_longer_fails_has_to_go() -> None:
    known = _known('{qkv_format = "thd"}')
    (sentence,) = _passes(known, "right", "right", "unsupported", "missing")
    assert "entry 1" in sentence
    assert "no longer fails: remove it" in sentence
    assert "all 2 problems" in sentence
    assert not _passes(known, "right", "known")
    assert not _passes(known, "right", "crashed")
    assert not _passes(known, "unsupported")  # nothing was judged
    assert not _passes(known)
    assert not _passes(_known('{qkv_format = "bshd"}'), "right")
    assert not _passes(_known('{qkv_format = "thd"}', quarantine=True), "right")


def test_quarantine() -> None:
    known = _known('{qkv_format = "thd"}', quarantine=True)
    assert known.quarantined(str(CASE)) == "quarantined: R (I)"
    assert known.judge(_played("crashed")).verdict == "known"
    assert _known('{qkv_format = "thd"}').quarantined(str(CASE)) is None
    narrow = _known("{}", quarantine=True, tier="logic", level="schedule")
    assert narrow.quarantined(str(CASE)) is None
    assert narrow.quarantined(str(CASE), tier="probes") is None
    assert narrow.quarantined(str(CASE), tier="logic")
    assert narrow.quarantined(str(CASE), tier="logic", level="kernel") is None
    assert known.quarantined("special a") is None
    assert known.quarantined("special a", cases=[str(CASE)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[entry]", "known failures: "),
        ("entry = 3", "tables"),
        (f"a = {'[' * 3000}", "nested too deeply"),
        (f"a = {'{b = ' * 3000}", "nested too deeply"),
        (f"a = {'9' * 5000}", "digits"),
        ("xfail = true", "not xfail"),
        ("[[xfail]]\nreason = 'R'", "not xfail"),
        ("entry = [3]", "entry 1 is 3"),
        ("[[entry]]\nmatch = {}", "entry 1 lacks reason, issue"),
        ("[[entry]]\nmatch = {}\nreason = 'R'\nissue = 'I'\ncolour = 1", "entry 1 has colour"),
        ("[[entry]]\nmatch = true\nreason = 'R'\nissue = 'I'", "match is True; it must be a table"),
        ("[[entry]]\nmatch = {}\nreason = ''\nissue = 'I'", "reason is ''; it must be a text"),
        ("[[entry]]\nmatch = {}\nreason = 'R'\nissue = 7", "issue is 7; it must be a text"),
        ("[[entry]]\nmatch = {}\nreason = 'R'\nissue = 'I'\nquarantine = 1", "quarantine is 1"),
        ("[[entry]]\nmatch = {}\nreason = 'R'\nissue = 'I'\nlevel = 'roof'", "level is 'roof'"),
    ],
)
def test_malformed_files(text: str, message: str) -> None:
    with pytest.raises(KnownFailuresError) as error:
        KnownFailures.parse(text)
    assert message in str(error.value)
    assert str(error.value).startswith("known failures")


def test_files(tmp_path: Path) -> None:
    with pytest.raises(KnownFailuresError, match=r"nowhere\.toml"):
        KnownFailures.load(tmp_path / "nowhere.toml")
    assert KnownFailures.parse("") == KnownFailures()
    assert KnownFailures().judge(_played("wrong")) == _played("wrong")


def test_the_example_in_the_documentation() -> None:
    known = KnownFailures.load(Path(__file__).parents[3] / "docs" / "conformance" / "known_failures.toml")
    window = replace(CASE, problem=replace(CASE.problem, cp_comm_type="all_gather"))
    first = known.match(_played("wrong", window))
    assert first is known.entries[0]
    assert known.quarantined(str(Case(Problem(2, (), qkv_format="thd"))))
    assert not known.quarantined(str(CASE))
