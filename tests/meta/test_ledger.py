"""The ledger of known failures: what its predicates mean, what they refuse, and that it is strict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conformance.case import Case
from conformance.ledger import Ledger, LedgerError
from conformance.predicate import NAMES, Predicate, PredicateError
from conformance.record import Played, RunRecord
from cp_ref.spec import Problem, Sequence
from tests.meta.report_records import drawn_cases

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


def _ledger(predicate: str, **more: str | bool) -> Ledger:
    lines = [f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in more.items()]
    return Ledger.parse(
        "\n".join(["[[entry]]", f"predicate = '''{predicate}'''", 'reason = "R"', 'issue = "I"', *lines])
    )


def _played(verdict: str, case: Case = CASE, tier: str = "logic", level: str = "schedule") -> Played:
    return Played(level, tier, str(case), verdict, ("one", "two"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("predicate", "truth"),
    [
        ('qkv_format == "thd"', True),
        ('qkv_format != "thd"', False),
        ('qkv_format == "thd" and window_size[1] > 0 and window_size[0] < 0', True),
        ('qkv_format in ("bshd", "sbhd") or not causal', True),
        ("not (bottom_right or causal)", True),
        ("len_q != len_kv", True),
        ("len_q == (7, 0)", True),
        ("len_q == [7, 0]", True),
        ("0 in len_q and 0 not in len_kv", True),
        ("max(len_q) - min(len_kv) == 3 and sum(slots_q) == 12 and len(len_q) == 2", True),
        ("1 < cp_size <= 2 <= group_size", True),
        ("len_q[-1] == 0 and window_size == (-1, 3)", True),
        ("pairs % 2 + pairs // 1000 * 5 == pairs % 2", True),
        ('"q" in grads and return_lse and tail_q', True),
        ("softmax_scale == None", True),
        ("tail_kv", False),
        ('text == "error lengths-decrease"', False),
        ("True", True),
    ],
)
def test_predicates(predicate: str, truth: bool) -> None:
    assert Predicate.parse(predicate).holds(str(CASE)) is truth


@pytest.mark.parametrize(
    "predicate",
    [
        "",
        "qkv_format ==",
        "qkv_fromat == 'thd'",
        "__import__('os').system('true')",
        "().__class__",
        "len_q.count(0)",
        "[n for n in len_q]",
        "lambda: 1",
        "max(len_q, key=len)",
        "max(len_q, len_kv)",
        "open('x')",
        "len",
        "f'{cp_size}'",
        "cp_size ** 9",
        "cp_size << 9",
        "'x' * 1000000000",
        "(1,) * 1000000000",
        "len_q[0:1]",
        "len_q[cp_size]",
        "len_q[True]",
        "cp_size is 2",
        "cp_size if causal else 1",
        "(x := 1)",
        "{1: 2}",
        "{1, 2}",
        "b'x' == b'x'",
        "1j",
        "...",
        "~cp_size",
        "qkv_format < 3",
        "not " * 5000 + "causal",
        "max(cp_size)",
        "cp_size / 2 == 1",
        "*len_q,",
        "cp_size // (cp_size - 2)",
    ],
)
def test_what_is_not_in_the_language(predicate: str) -> None:
    with pytest.raises(PredicateError):
        Predicate.parse(predicate)
    with pytest.raises(LedgerError, match=r"^ledger: entry 1"):
        _ledger(predicate)


def test_every_name_has_a_value_in_every_drawn_case() -> None:
    predicates = [Predicate.parse(f"{name} == {name}") for name in NAMES]
    for case in drawn_cases(100):
        assert all(p.holds(str(case)) for p in predicates)
        assert Predicate.parse("max(len_q) >= min(len_q) >= 0").holds(str(case))  # also of no sequences


def test_a_name_alone_is_judged_by_its_text() -> None:
    assert Predicate.parse('text == "error a"').holds("error a")
    assert not Predicate.parse('text == "error a" or cp_size > 0').holds("error a")  # not about a case at all
    assert Predicate.parse("cp_size == 2").holds("special a", str(CASE))
    assert Predicate.parse('text == "special a"').holds("special a", str(CASE))


def test_a_predicate_that_breaks_on_a_case_names_its_entry() -> None:
    ledger = _ledger("len_q[1] == 0")
    assert ledger.match(_played("wrong"))
    short = replace(CASE, problem=replace(CASE.problem, sequences=CASE.problem.sequences[:1]))
    with pytest.raises(LedgerError, match=r"entry 1 \(len_q\[1\] == 0\): cannot be judged for Case"):
        ledger.match(_played("wrong", short))


@pytest.mark.parametrize("verdict", ["wrong", "crashed", "hung"])
def test_a_known_failure(verdict: str) -> None:
    known = _ledger('qkv_format == "thd"').judge(_played(verdict))
    assert known == replace(_played("known"), findings=("known: R (I)", "one", "two"))
    assert _ledger('qkv_format == "bshd"').judge(_played(verdict)).verdict == verdict


@pytest.mark.parametrize("verdict", ["right", "unsupported", "missing", "out of memory", "known"])
def test_what_is_no_failure_stays_as_it_is(verdict: str) -> None:
    assert _ledger('qkv_format == "thd"').judge(_played(verdict)) == _played(verdict)


def test_tier_and_level_narrow_an_entry() -> None:
    ledger = _ledger("True", tier="probes", level="kernel")
    assert ledger.match(_played("wrong", tier="probes", level="kernel"))
    assert not ledger.match(_played("wrong", tier="logic", level="kernel"))
    assert not ledger.match(_played("wrong", tier="probes", level="schedule"))


def _passes(ledger: Ledger, *verdicts: str) -> tuple[str, ...]:
    return ledger.unexpected_passes(RunRecord({}, tuple(_played(verdict) for verdict in verdicts)))


def test_an_entry_that_no_longer_fails_has_to_go() -> None:
    ledger = _ledger('qkv_format == "thd"')
    (sentence,) = _passes(ledger, "right", "right", "unsupported", "missing")
    assert "entry 1" in sentence
    assert "no longer fails: remove it" in sentence
    assert "all 2 problems" in sentence
    assert not _passes(ledger, "right", "known")
    assert not _passes(ledger, "right", "crashed")
    assert not _passes(ledger, "unsupported")  # nothing was judged
    assert not _passes(ledger)
    assert not _passes(_ledger('qkv_format == "bshd"'), "right")
    assert not _passes(_ledger('qkv_format == "thd"', quarantine=True), "right")


def test_quarantine() -> None:
    ledger = _ledger('qkv_format == "thd"', quarantine=True)
    assert ledger.quarantined(str(CASE)) == "quarantined: R (I)"
    assert ledger.judge(_played("crashed")).verdict == "known"
    assert _ledger('qkv_format == "thd"').quarantined(str(CASE)) is None
    narrow = _ledger("True", quarantine=True, tier="logic", level="schedule")
    assert narrow.quarantined(str(CASE)) is None
    assert narrow.quarantined(str(CASE), tier="probes") is None
    assert narrow.quarantined(str(CASE), tier="logic")
    assert narrow.quarantined(str(CASE), tier="logic", level="kernel") is None
    assert ledger.quarantined("special a") is None
    assert ledger.quarantined("special a", cases=[str(CASE)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[entry]", "ledger: "),
        ("entry = 3", "tables"),
        ("xfail = true", "not xfail"),
        ("[[xfail]]\nreason = 'R'", "not xfail"),
        ("entry = [3]", "entry 1 is 3"),
        ("[[entry]]\npredicate = 'True'", "entry 1 lacks reason, issue"),
        ("[[entry]]\npredicate = 'True'\nreason = 'R'\nissue = 'I'\ncolour = 1", "entry 1 has colour"),
        ("[[entry]]\npredicate = true\nreason = 'R'\nissue = 'I'", "predicate is True; it must be a text"),
        ("[[entry]]\npredicate = 'True'\nreason = ''\nissue = 'I'", "reason is ''; it must be a text"),
        ("[[entry]]\npredicate = 'True'\nreason = 'R'\nissue = 7", "issue is 7; it must be a text"),
        ("[[entry]]\npredicate = 'True'\nreason = 'R'\nissue = 'I'\nquarantine = 1", "quarantine is 1"),
        ("[[entry]]\npredicate = 'True'\nreason = 'R'\nissue = 'I'\nlevel = 'roof'", "level is 'roof'"),
    ],
)
def test_malformed_ledgers(text: str, message: str) -> None:
    with pytest.raises(LedgerError) as error:
        Ledger.parse(text)
    assert message in str(error.value)
    assert str(error.value).startswith("ledger")


def test_files(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"nowhere\.toml"):
        Ledger.load(tmp_path / "nowhere.toml")
    assert Ledger.parse("") == Ledger()
    assert Ledger().judge(_played("wrong")) == _played("wrong")


def test_the_example_in_the_documentation() -> None:
    ledger = Ledger.load(Path(__file__).parents[2] / "docs" / "xfails.toml")
    window = replace(CASE, problem=replace(CASE.problem, cp_comm_type="all_gather"))
    first = ledger.match(_played("wrong", window))
    assert first is ledger.entries[0]
    assert ledger.quarantined(str(Case(Problem(2, (), qkv_format="thd"))))
    assert not ledger.quarantined(str(CASE))
