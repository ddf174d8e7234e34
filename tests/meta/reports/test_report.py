"""The report's numbers, and its page as text: what it says, what it escapes, how large it is."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import cast
from xml.etree import ElementTree

import pytest
from markupsafe import escape
from rich.console import Console
from typer.testing import CliRunner

from conformance.case import Case
from conformance.cli import print_separating, print_table
from conformance.record import FAILING, VERDICTS, Played, RunRecord, TierResult, replay_command
from conformance.report import read_record, unwritable, write_report
from conformance.report.__main__ import app
from conformance.report.coverage import SYMBOLS, matrix, ratios, worst
from conformance.report.failures import failures, refusals
from conformance.report.page import summary
from cp_ref.schedules.problem import Problem, Sequence
from cp_ref.schedules.words import CP_COMM_TYPES, MASKS, QKV_FORMATS
from tests.meta.reports.report_records import META, made_up

SQUARE = (Sequence(8, 8, 8, 8),)


def _played(verdict: str, tokens: int = 8, tier: str = "logic", cp_size: int = 2, **more: object) -> Played:
    case = Case(Problem(cp_size, (Sequence(tokens, tokens, tokens, tokens),)))
    return Played("schedule", tier, str(case), verdict, **more)  # type: ignore[arg-type]


class _Tags(HTMLParser):
    """Every tag with its attributes, and the text of each element with a class or an id that was asked for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def record() -> RunRecord:
    return made_up(200)


@pytest.fixture(scope="module")
def files(record: RunRecord, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_report(record, tmp_path_factory.mktemp("made") / "a" / "report")


def test_every_verdict_has_a_symbol_and_failing_ones_outweigh_the_others() -> None:
    assert sorted(SYMBOLS) == sorted(VERDICTS)
    for verdict in FAILING:
        assert worst(dict.fromkeys(("right", "unsupported", "missing", "known", verdict), 1)) == verdict
    assert worst({"right": 0}) == ""


def test_failures_are_grouped_and_sorted_by_size() -> None:
    record = RunRecord(
        {"impl": "x"},
        (
            Played("schedule", "errors", "error a", "wrong"),
            _played("wrong", 9, tier="budget"),
            _played("right", 1),
            _played("crashed", 7),
            _played("wrong", 7, tier="probes"),
            _played("wrong", 7, cp_size=1),
            _played("wrong", 64, shrunk=True),
            _played("known", 2),
            _played("unsupported", 2),
        ),
    )
    found = failures(record)
    assert [f.number for f in found] == [1, 2, 3, 4]
    sizes = ["64 tokens, 2 ranks", "7 tokens, 2 ranks", "9 tokens, 2 ranks", ""]
    assert [f.size for f in found] == sizes
    assert found[0].drawn == (_played("wrong", 7, cp_size=1).text,)  # drawn right before the smallest one
    assert [p.tier for p in found[1].played] == ["logic", "probes"]
    assert len(found[1].commands) == 2
    assert found[3].text == "error a"
    assert found[3].difference is None
    assert [f.problems for f in found] == [1, 2, 1, 1]
    assert sum(f.problems for f in found) == summary(record).failed


def test_what_was_drawn_and_shrunk_to_is_one_problem_and_counted_once() -> None:
    drawn = _played("wrong", 9, findings=("a",))
    record = RunRecord({}, (drawn, replace(drawn, shrunk=True, pairs=((0, 0),)), _played("right", 3)))
    found = summary(record)
    assert found.failed == 1
    assert dict(found.counts) == {"wrong": 1, "right": 1}
    (failure,) = found.failures
    assert failure.shrunk
    assert failure.difference is not None
    assert failure.difference.wrong == (44, 0)
    assert len(failure.played) == 1


def test_a_known_failure_that_passes_has_no_replay_command() -> None:
    complaint = Played(
        "schedule", "known failures", "entry 1 no longer fails: remove it", "wrong", ("entry 1 no longer fails",)
    )
    (failure,) = failures(RunRecord({}, (complaint,)))
    assert failure.commands == ()


def test_commands_play_the_problem_again() -> None:
    case = Case(Problem(2, SQUARE, softmax_type="learnable"), grads="o")
    played = Played("schedule", "probes", str(case), "wrong")
    words = shlex.split(replay_command({"impl": "a.b:c", "device": "cuda (a large one)"}, played))
    assert words[:3] == ["python", "-m", "conformance"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options == {"--impl": "a.b:c", "--device": "cuda", "--tier": "probes", "--repro": str(case)}
    assert Case.parse(options["--repro"]) == case
    assert "--device" not in replay_command({"impl": "x", "device": "cpu"}, played)


def test_the_matrix_by_hand() -> None:
    played = (
        _played("right"),
        _played("wrong", 9),
        _played("unsupported", 10),
        replace(_played("right"), text=str(Case(Problem(2, SQUARE, qkv_format="thd", window_size=(3, -1))))),
        replace(_played("unsupported"), text=str(Case(Problem(2, SQUARE, qkv_format="thd", window_size=(4, -1))))),
        Played(
            "schedule",
            "special",
            "special x",
            "missing",
            cases=((str(Case(Problem(2, SQUARE, qkv_format="sbhd"))), "missing"),),
        ),
        Played("helpers", "helpers", "helper x", "wrong"),
    )
    everything, *panels = matrix(RunRecord({}, played), {played[1].text: 7})
    cells = everything.cells
    assert set(cells) == {("p2p", fmt, "causal") for fmt in QKV_FORMATS}
    bshd, thd = cells["p2p", "bshd", "causal"], cells["p2p", "thd", "causal"]
    assert (bshd.counts, bshd.failing) == ({"wrong": 1, "right": 1, "unsupported": 1}, 7)
    assert (thd.counts, thd.failing) == ({"right": 1, "unsupported": 1}, None)
    assert cells["p2p", "sbhd", "causal"].counts == {"missing": 1}
    (left,) = [panel for panel in panels if str(panel.choice) == "window: left"]
    assert left.cells == {("p2p", "thd", "causal"): thd}
    rows = dict(left.rows)
    assert [len(row) for row in rows.values()] == [len(CP_COMM_TYPES) * len(QKV_FORMATS)] * len(MASKS)


def test_ratios_by_hand() -> None:
    values = (0.5, 1.0, 1.01, float("inf"), 0.02)
    played = [_played("right", n + 1, ratios={"dq max": value}) for n, value in enumerate(values)]
    played.append(_played("right", 60, ratios={"out mean": 0.25}))
    out, dq = ratios(RunRecord({}, tuple(played)))
    assert (out.name, out.beyond) == ("out mean", 0)
    assert dq.values == (0.02, 0.5, 1.0, 1.01, float("inf"))
    assert dq.worst is played[3]
    assert dq.beyond == 2
    assert dq.quantile(0.5) == 1.0
    (nan,) = ratios(RunRecord({}, (_played("wrong", ratios={"dk max": float("nan")}), *(played[:0]))))
    assert nan.beyond == 1


def test_refusals_are_grouped_by_reason() -> None:
    refused = [_played("unsupported", n, findings=("no",)) for n in (20, 3, 9)]
    record = RunRecord({}, (*refused, _played("missing", findings=("never",))))
    often, once = refusals(record)
    assert (often.reason, often.count, often.example) == ("no", 3, _played("right", 3).text)
    assert (once.verdict, once.reason, once.where) == ("missing", "never", ("schedule logic",))


def test_one_run_counts_in_one_way_and_begins_with_what_separates(tmp_path: Path) -> None:
    """Six of 37 causal problems are wrong, and two tiers shrink theirs to one."""
    played = [_played("right", 100 + n, tier="logic") for n in range(31)]
    for n, tier in enumerate(("logic", "logic", "logic", "probes", "probes", "probes")):
        played.append(_played("wrong", 50 + n, tier=tier))
        played.append(_played("wrong", 7, tier=tier, shrunk=True))
    open_mask = Case(Problem(2, SQUARE, attn_mask_type="no_mask"))
    played += [Played("schedule", "logic", str(replace(open_mask, seed=n)), "right") for n in range(31)]
    record = RunRecord({"impl": "x"}, tuple(played))
    found = summary(record)
    assert ("mask", "causal", True) in [(each.axis, each.name, each.fails_more) for each in found.separating]
    assert "mask: causal 6 of 37 failed; no_mask 0 of 31 failed" in [str(each) for each in found.separating]
    assert (found.failed, len(found.drawn), found.panels[0].counts["wrong"]) == (6, 68, 6)
    assert [f.problems for f in found.failures] == [6]
    assert found.panels[0].cells["p2p", "bshd", "causal"].failing == 1
    page = write_report(record, tmp_path)[1].read_text(encoding="utf-8")
    assert page.index("of 68 problems failed") < page.index("causal 6 of 37 failed") < page.index('id="matrix"')
    assert "6 failing problems, which shrink to 1 smallest" in page
    assert page.count('<summary class="wrong">') < 5  # and not each feature that a failing problem has
    console = Console(record=True, width=100)
    print_separating(console, record)
    assert "mask: causal 6 of 37 failed; no_mask 0 of 31 failed" in console.export_text()


def test_the_table_of_tiers_cuts_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    console = Console(record=True, soft_wrap=True, width=30)
    played = [_played("right", n) for n in range(1, 124)] + [_played("wrong", 500)]
    results = [TierResult("a tier with a name that is longer than most", played, 1234.0), TierResult("plan", [], 0.26)]
    print_table(console, results, "x")
    lines = console.export_text().splitlines()
    assert "a tier ...nger than most     124    123       1      0       0        0  1234" in lines
    assert lines[-2].split() == ["plan", "0", "0", "0", "0", "0", "0", "0.3"]


def test_the_json_reads_back_and_says_what_the_record_says(files: list[Path], record: RunRecord) -> None:
    assert read_record(files[0]) == record
    data = json.loads(files[0].read_text())["summary"]
    assert sum(data["counts"].values()) == len(record.played)
    assert sum(sum(c.values()) for c in data["levels"].values()) == len(record.played)
    assert sum(v for c in data["tiers"].values() for k, v in c.items() if k != "seconds") == len(record.played)
    assert {f["text"] for f in data["failures"]} == {p.text for p in record.played if p.verdict in FAILING}
    assert sum(f["problems"] for f in data["failures"]) == sum(data["counts"][v] for v in FAILING)
    cells = data["matrix"][0]["cells"]
    assert sum(sum(c.values()) for c in cells.values()) == sum(p.text.startswith("Case(") for p in record.played)


def test_what_is_no_number_survives(tmp_path: Path) -> None:
    played = _played("wrong", ratios={"dq max": float("inf"), "dq mean": float("nan")})
    file, page = write_report(RunRecord({"impl": "x", "path": Path("a")}, (played,)), tmp_path)
    (again,) = cast(RunRecord, read_record(file)).played
    assert again.ratios["dq max"] == float("inf")
    assert again.ratios["dq mean"] != again.ratios["dq mean"]
    assert "<td>inf</td>" in page.read_text(encoding="utf-8")


def test_the_page_asks_nobody_for_anything(files: list[Path]) -> None:
    text = files[1].read_text(encoding="utf-8")
    assert [f.name for f in files] == ["report.json", "report.html"]
    tags = _Tags(text).tags
    assert not {tag for tag, _ in tags} & {
        "link",
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "video",
    }
    for _, attributes in tags:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert set(re.findall(r"url\((.)", text)) <= {"#"}  # the clip paths of the plots
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_links_lead_somewhere(files: list[Path]) -> None:
    tags = _Tags(files[1].read_text(encoding="utf-8")).tags
    ids = [attributes["id"] for _, attributes in tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    links = {str(a["href"]) for tag, a in tags if tag == "a"}
    assert links
    assert {link.removeprefix("#") for link in links} <= set(ids)


def test_the_page_has_every_failure_and_its_command(files: list[Path], record: RunRecord) -> None:
    text = files[1].read_text(encoding="utf-8")
    found = summary(record)
    tags = _Tags(text).tags
    assert [a["data-number"] for _, a in tags if "data-number" in a] == [str(f.number) for f in found.failures]
    assert f'data-failed="{found.failed}"' in text
    for failure in found.failures[:24]:
        assert all(escape(command) in text for command in failure.commands)
    assert text.count('class="command"') == 1 + sum(len(f.commands) for f in found.failures[:24])


EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg onload=alert(3)>{{ 7 * 7 }}</style></title>"


def test_nothing_that_was_recorded_becomes_markup(tmp_path: Path) -> None:
    case = str(Case(Problem(2, SQUARE)))
    played = [
        Played("helpers", EVIL, "helper " + EVIL, verdict, (EVIL, EVIL), {f"{EVIL} max": 0.5})  # type: ignore[arg-type]
        for verdict in VERDICTS
    ]
    played += [Played("schedule", EVIL, case, verdict, (EVIL,), {f"{EVIL} max": 2.0}) for verdict in VERDICTS]
    meta = dict.fromkeys(("impl", "command", "device", "seed", EVIL), EVIL)
    meta |= {"notes": [EVIL], "versions": {EVIL: EVIL}}
    text = write_report(RunRecord(meta, tuple(played)), tmp_path)[1].read_text(encoding="utf-8")
    tags = _Tags(text).tags
    assert not [tag for tag, a in tags if tag in ("script", "img") or any(name.startswith("on") for name in a)]
    assert "<script>alert" not in text
    assert text.count("{{ 7 * 7 }}") > 10


def test_an_empty_run_is_a_page_too(tmp_path: Path) -> None:
    file, page = write_report(RunRecord({}, ()), tmp_path)
    assert read_record(file) == RunRecord({}, ())
    assert "Nothing was played." in page.read_text(encoding="utf-8")


def test_without_matplotlib_the_page_has_the_numbers(
    record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = write_report(record, tmp_path)[1].read_text(encoding="utf-8")
    assert "There are no plots: matplotlib is not installed." in text
    assert "<th>dq max</th>" in text


def test_without_jinja_a_run_with_a_report_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not unwritable(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "needs Jinja" in unwritable(tmp_path)


def test_junit_has_each_failure_and_each_entry_of_a_table(tmp_path: Path, record: RunRecord) -> None:
    small = _played("wrong", 3, findings=("out is \x00 wrong", "dq too"), shrunk=True, tier="budget")
    more = (_played("wrong", 9, tier="pairs"), small, replace(small, tier="pairs"))
    more += (Played("schedule", "errors", "error no-group", "unsupported", ("not here",)),)
    more += (_played("right", tier="a tier of an older record"),)
    [file] = write_report(replace(record, played=record.played + more), None, tmp_path / "junit.xml")
    root = ElementTree.parse(file).getroot()
    suites = {suite.get("name"): {str(case.get("name")): case for case in suite} for suite in root}
    assert next(iter(suites)) == "conformance.schedule.plan"
    assert list(suites["conformance.schedule.budget"]) == [small.text]
    assert list(suites["conformance.schedule.pairs"]) == [small.text]
    failure = suites["conformance.schedule.budget"][small.text][0]
    assert (failure.tag, failure.get("message")) == ("failure", "wrong: out is ? wrong")
    assert replay_command(record.meta, small) in str(failure.text)
    errors = suites["conformance.schedule.errors"]
    assert [[child.tag for child in case] for case in errors.values()] == [["failure"], [], ["skipped"]]
    assert suites["conformance.merge.merge"]["drawn problems"][0].tag == "skipped"
    for suite in root:
        assert int(suite.attrib["tests"]) == len(suite)
    assert int(root.attrib["failures"]) == sum(len(case.findall("failure")) for case in root.iter("testcase"))


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        ("right", "is right, in 1 problem."),
        ("unsupported", "nothing was checked"),
        ("wrong", "of 1 problem failed"),
    ],
)
def test_the_first_sentence(verdict: str, says: str, tmp_path: Path) -> None:
    page = write_report(RunRecord({"impl": "x"}, (_played(verdict),)), tmp_path)[1]
    assert says in page.read_text(encoding="utf-8")


@pytest.mark.thorough
def test_ten_thousand_problems_fit_in_two_megabytes(tmp_path: Path) -> None:
    record = made_up(10_000)
    assert sum(p.verdict in FAILING for p in record.played) > 200
    page = write_report(record, tmp_path)[1]
    assert page.stat().st_size < 2_000_000


@pytest.mark.thorough
def test_thousands_of_long_failures_fit_too(tmp_path: Path) -> None:
    long = "an error that goes on and on " * 50
    played = [_played("wrong", 1 + n % 300, cp_size=1 + n % 4000, findings=(long,) * 7) for n in range(1, 5_000)]
    page = write_report(RunRecord(META, tuple(played)), tmp_path)[1]
    assert page.stat().st_size < 2_000_000
    assert "more are in report.json" in page.read_text(encoding="utf-8")


def test_the_command_line_renders_again(files: list[Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [str(files[0]), "-o", str(tmp_path / "again")])
    assert done.exit_code == 0, done.output
    for file in files:
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    (tmp_path / "broken.json").write_text("{")
    for name in ("broken.json", "nowhere.json"):
        done = CliRunner().invoke(app, [str(tmp_path / name), "-o", str(tmp_path)])
        assert done.exit_code == 2
        assert "cannot read a record" in done.output
