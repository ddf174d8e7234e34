"""The documents' programs run, their commands have the options that they name, and their links lead somewhere."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from itertools import pairwise
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import conformance.cli
import conformance.step_command
import cp_fast
import cp_fast.tools.cli
import cp_ref
import cp_ref.cli
from conformance.case import Case
from cp_fast.kernels.attention import choose_backend
from cp_fast.kernels.attention.choose_backend import BACKENDS, KERNEL_FEATURES, features_of
from cp_fast.passes import PASSES
from cp_ref.batches.area_rows import MOST_ROWS
from cp_ref.schedules.linear_schedules import DocumentFragments, document_fragments, make_states
from cp_ref.schedules.planners.make_schedule import SCHEDULES, make_schedule
from cp_ref.schedules.problem import Problem, Sequence, table_of
from cp_ref.schedules.values import MOST_RANKS
from cp_ref.schedules.words import CP_COMM_TYPES, Feature, describe
from cp_ref.show.svg_pictures import LINE, SOFT, Drawing, ink_on, rank_colour
from cp_ref.show.text_pictures import areas_picture, ownership_picture, text_picture
from tests.dist.workers import run_program

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("csrc/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
APPS = {"cp_fast": cp_fast.tools.cli.app, "cp_ref": cp_ref.cli.app, "conformance": conformance.cli.app}
STEP = conformance.step_command.app
TREE = re.compile(r"(?:cp_ref|cp_fast|conformance|csrc|tests|benchmarks|docs)/[\w./*-]*\w")


def blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


def commands(path: Path) -> list[str]:
    """Lines of indented or fenced code that call a module or a script."""
    return re.findall(
        r"^(?:    |\$ |.* && )?((?:torchrun .* |python )-m (?:cp_fast|cp_ref|conformance) .*)$",
        path.read_text(),
        re.MULTILINE,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("page", "processes"),
    [
        ("integration", 4),
        ("gradients", 4),
        ("plans", 2),
        ("long_context", 2),
        ("hybrid", 2),
        ("sparse", 2),
        ("compressed", 2),
    ],
)
def test_the_blocks_of_a_page_are_a_program(tmp_path: Path, page: str, processes: int) -> None:
    program = tmp_path / "program.py"
    end = "dist.destroy_process_group()\n"  # without it gloo's threads may abort a process that ends
    text = "\n\n".join(blocks(f"docs/how_to/{page}.md"))
    text = text.replace("fullgraph=True)", 'fullgraph=True, backend="aot_eager")')  # inductor takes each rank seconds
    program.write_text(text if text.endswith(end) else f"{text}\n\n{end}")
    run_program(program, processes)


@pytest.mark.extras
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("page", "package"),
    [
        ("transformers", "transformers"),
        ("trainer", "accelerate"),
        ("peft", "peft"),
        ("megatron", "megatron.core"),
        ("video", "diffusers"),
    ],
)
def test_the_first_program_of_a_framework_s_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, package: str
) -> None:
    pytest.importorskip(package, reason=f"needs {package}")
    monkeypatch.chdir(tmp_path)  # where Trainer writes
    (text,) = blocks(f"docs/how_to/{page}.md")
    program = tmp_path / "program.py"
    program.write_text(text)
    run_program(program, 2)


def test_the_first_program_of_the_drop_ins_runs(tmp_path: Path) -> None:
    (text,) = blocks("docs/how_to/drop_ins.md")
    program = tmp_path / "program.py"
    program.write_text(text)
    run_program(program, 2)


@pytest.mark.thorough
def test_log_probabilities_have_the_same_bits_for_any_number_of_ranks(tmp_path: Path) -> None:
    (text,) = blocks("docs/how_to/bits.md")
    program = tmp_path / "logprobs.py"
    program.write_text(text)
    printed = {run_program(program, ranks) for ranks in (1, 2, 4)}
    assert len(printed) == 1, printed
    program.write_text(text.replace('"a2a"', '"p2p"'))
    assert run_program(program, 4) not in printed


@pytest.mark.parametrize("page", ["schedule", "kernel_library", "layer"])
def test_what_a_page_adds_runs(monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    monkeypatch.setattr(choose_backend, "BACKENDS", BACKENDS)  # the pages add to these
    monkeypatch.setattr(cp_fast.ContextParallel, "backends", (*cp_fast.ContextParallel.backends, "plain"))
    monkeypatch.setitem(SCHEDULES, "at_once", SCHEDULES["p2p"])
    exec(compile("\n\n".join(blocks(f"docs/extend/{page}.md")), page, "exec"), {"__name__": __name__})


def test_the_tutorial_is_a_program() -> None:
    program = compile("\n\n".join(blocks("docs/tutorial.md")), "tutorial", "exec")  # all ranks in this process
    found: dict[str, Any] = {}
    exec(program, found)
    assert found["loss"] > 0


def test_the_five_lines_of_the_readme_run(tmp_path: Path) -> None:
    five, _ = blocks("README.md")
    assert len(list(filter(None, five.splitlines()))) == 1 + 5 + 1  # what is imported, the lines, and the end
    program = tmp_path / "five_lines.py"
    program.write_text(five + "assert out.shape == q.shape\n")
    printed = re.sub(r"[\d.]+$", "", run_program(program, 4), flags=re.MULTILINE).splitlines()
    shown = re.search(r"^    (rank 0 of 4: .*)[\d.]{5}$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert shown is not None
    assert sorted(printed) == [shown[1].replace("rank 0", f"rank {rank}") for rank in range(4)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_on_pages_fits_a_small_screen(path: Path) -> None:
    """92 columns, which a page of 1,280 pixels shows."""
    if {"benchmarks", "csrc"} & set(path.parts):  # which the site does not have
        return
    code = False
    for line in path.read_text().splitlines():
        code = not code if line.lstrip().startswith("```") else code
        shown = line if code else line[4:] if line.startswith("    ") else ""
        assert len(shown) <= 92, line


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("https://") or (path.parent / target).exists(), target
    for target in set(TREE.findall(text)) - {"cp_fast/csrc"}:  # which is in the wheel alone
        assert any(ROOT.glob(target)), target


def test_benchmarks_are_called_as_modules() -> None:
    """They import each other from the checkout, which a script's path leaves out where the package is installed."""
    paths = [*DOCUMENTS, *ROOT.glob("benchmarks/**/*.py")]
    text = "\n".join(path.read_text() for path in paths)
    assert "python benchmarks/" not in text
    called = {name.replace(".", "/") for name in re.findall(r"python -m (benchmarks(?:\.\w+)+)", text)}
    assert "benchmarks/attention" in called
    assert [name for name in called if not (ROOT / f"{name}.py").exists()] == []


def test_the_design_names_files_that_exist() -> None:
    names = set(re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`", (ROOT / "DESIGN.md").read_text()))
    assert len(names) > 30
    files = [
        path.as_posix()
        for folder in ("cp_ref", "cp_fast", "conformance", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert [name for name in names if not any(path.endswith("/" + name) for path in files)] == []


def test_the_page_on_speed_has_the_table_of_passes() -> None:
    rows = re.findall(
        r"^\| (\w+)(\*?) \| (schedule|tiles|instructions|launches) \| (.+) \|$",
        (ROOT / "docs" / "performance.md").read_text(),
        re.M,
    )
    table = [(one.name, "*" * one.needs_position_free_scores, one.on, one.does) for one in PASSES]
    assert [(name, star, on, does.replace("`", "")) for name, star, on, does in rows] == table


def test_commands_have_the_options_that_are_named() -> None:
    seen = 0
    for path in DOCUMENTS:
        for line in commands(path):
            words = line.split("#")[0].split()
            words = words[words.index("-m") + 1 :] if words[0] == "python" else words[words.index("-m", 3) + 1 :]
            command: Any = typer.main.get_command(STEP if words[:2] == ["conformance", "step"] else APPS[words[0]])
            if words[0] != "conformance":
                command = command.get_command(None, words[1]).imported
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            named = {word for word in words if word.startswith("--")}
            assert named <= known | {"--help"}, line
            pictures = [value for option, value in pairwise(words) if option == "--svg"]
            assert all(value.endswith(".svg") for value in pictures), line  # others are refused
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_installs_are_from_a_checkout(path: Path) -> None:
    """No package index has this project."""
    for line in re.findall(r"pip install .*", path.read_text()):
        assert not re.search(r"(?<!\./)cp-attention", line), line


def test_errors_install_nothing_that_no_index_has() -> None:
    for path in (path for package in ("cp_ref", "cp_fast", "conformance") for path in (ROOT / package).rglob("*.py")):
        for line in re.findall(r"pip install .*", path.read_text()):
            assert "cp-attention" not in line, f"{path}: {line}"


PICTURES = {"plan": ["--seqlens", "96,32,56"]} | {
    name.replace("+", "_"): ["--seqlen", "64", "--heads-q", "8", "--heads-kv", "4", "--cp-comm-type", name]
    for name in CP_COMM_TYPES
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_are_what_plan_draws(tmp_path: Path, name: str) -> None:
    drawn = tmp_path / "plan.svg"
    done = CliRunner().invoke(cp_fast.tools.cli.app, ["plan", "--cp-size", "4", *PICTURES[name], "--svg", str(drawn)])
    assert done.exit_code == 0, done.output
    assert drawn.read_text() == (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()


def test_the_picture_of_states_is_that_of_the_page() -> None:
    """Of the program on the page about hybrid models, but for three ranks."""
    lengths = tuple(Sequence(n, n, n, n) for n in (36, 12, 12, 12))
    problem = Problem(3, lengths, qkv_format="thd", attn_mask_type="padding_causal", layout="balanced")
    assert states_svg(table_of(problem)) == (ROOT / "docs" / "pictures" / "states.svg").read_text()


@pytest.mark.thorough
def test_the_bytes_in_the_choice_of_a_schedule_are_what_plan_says() -> None:
    """The rows of the table, each of the four schedules."""
    text = (ROOT / "docs" / "how_to" / "choosing.md").read_text()
    window = ["--window", "4096,0"]
    rows = {
        "one sequence": [],
        "window 4,096": window,
        "window 4,096, `contiguous`": [*window, "--layout", "contiguous"],
    }
    for row, options in rows.items():
        sent = []
        for name in CP_COMM_TYPES:
            arguments = ["plan", "--cp-size", "8", "--seqlen", "65536", "--cp-comm-type", name, *options]
            said = CliRunner(env={"COLUMNS": "200"}).invoke(cp_fast.tools.cli.app, arguments).output
            sent.append(re.findall(r"; ([\d.]+ .B) sent by all", said)[0])
        assert f"| {row} | {' | '.join(sent)} |" in text


def test_the_work_and_the_bytes_in_the_choice_of_a_layout_are_what_plan_says() -> None:
    text = (ROOT / "docs" / "how_to" / "choosing.md").read_text()
    lengths = re.findall(r"`--seqlens ([\d,]+)`", text)[0]
    found = []
    for layout in ("dual_chunk", "contiguous", "balanced"):
        arguments = ["plan", "--cp-size", "8", "--seqlens", lengths, "--cp-comm-type", "all_gather", "--layout", layout]
        said = CliRunner(env={"COLUMNS": "200"}).invoke(cp_fast.tools.cli.app, arguments).output
        found += re.findall(r"balance ([\d.]+) .*; ([\d.]+ .B) sent by all", said)
    for n, row in enumerate(("the mean rank's work over the busiest's", "sent by all ranks")):
        assert f"| {row} | {' | '.join(cells[n] for cells in found)} |" in text


def test_no_docstring_makes_links_by_accident() -> None:
    """The site takes "[n][2]" for a link to "2", and a link that leads nowhere ends its build."""
    code = re.compile(r"^>>> .*(?:\n(?!\n).+)*|^ {4,}.*\[ .*$|`[^`]*`", re.MULTILINE)
    link = re.compile(r"\w\][\[(]\w.*")
    for path in (path for package in ("cp_ref", "cp_fast", "conformance") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(text)) if link.search(text := path.read_text()) else ():
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (said := ast.get_docstring(node)):
                assert not link.findall(code.sub("", said)), (path, node)


@pytest.mark.extras
def test_pictures_of_pages_can_be_opened() -> None:
    """At 390 pixels they are too small to read; a link shows the file itself."""
    pytest.importorskip("mkdocs", reason="needs mkdocs, which the extra docs has")
    hooks = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))
    page = SimpleNamespace(file=SimpleNamespace(src_uri="concepts.md"))
    made = hooks["on_page_markdown"]((ROOT / "docs" / "concepts.md").read_text(), page)
    assert "[![p2p on four ranks](pictures/p2p.svg)](pictures/p2p.svg)" in made


def test_what_makes_the_site_is_pinned() -> None:
    """So that a reader's site is that of CI, which reports newer versions."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", need) for need in extras["docs"])
    assert {"mkdocs", "mkdocstrings", "mkdocs-autorefs"} <= {need.split("==")[0] for need in extras["docs"]}


@pytest.mark.extras
def test_forms_and_workflows_are_yaml() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which the extra docs has")
    for path in [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


def test_the_project_s_forms_say_what_is_true() -> None:
    folder, project = ROOT / ".github", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "- run: .ci/run\n" in (folder / "workflows" / "ci.yml").read_text()
    release = (folder / "workflows" / "release.yml").read_text()
    assert "- run: .ci/run\n" in release
    assert all("twine check --strict" in text for text in (release, (ROOT / ".ci" / "run").read_text()))
    changes = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[:2] == ["Unreleased", project["version"]]
    for script in set(re.findall(r"bin/(cp-\w+)", release)):
        assert script in project["scripts"]
    form = (folder / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    assert "python -m cp_fast doctor --json" in form
    assert "--repro" in form
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\nlicense: {project['license']}\n" in citation
    assert re.findall(r"^keywords: \[(.*)\]$", citation, re.MULTILINE) == [", ".join(project["keywords"])]
    limits = (ROOT / "SECURITY.md").read_text()
    assert f"more than {MOST_RANKS:,} ranks" in limits
    assert f"of more than {MOST_ROWS:,} rectangles" in limits
    assert f"at most {MOST_ROWS:,} in a call" in (ROOT / "docs" / "how_to" / "masks.md").read_text()


def test_the_table_of_backends_is_what_they_declare() -> None:
    devices = frozenset({Feature.CPU, Feature.CUDA})
    dtypes = frozenset({Feature.FLOAT16, Feature.BFLOAT16, Feature.FLOAT32, Feature.FLOAT64})
    lines = ["| backend | where | dtypes | lacks |", "| --- | --- | --- | --- |"]
    for backend in BACKENDS:
        has = features_of(backend)
        where = describe(has & devices).replace("device ", "")
        lacks = describe(KERNEL_FEATURES - has - devices - dtypes) or "nothing"
        lines.append(f"| `{backend.name}` | {where} | {describe(has & dtypes)} | {lacks} |")
    assert "\n".join(lines) in (ROOT / "docs" / "support.md").read_text()


def test_the_designs_tables_and_pictures_are_what_the_code_prints() -> None:
    lengths = Sequence(7, 7, 8, 8), Sequence(4, 4, 4, 4)
    problem = Problem(2, lengths, qkv_format="thd", attn_mask_type="padding_causal")
    tables, schedule = problem.workload, make_schedule(problem)
    program = str(schedule).partition("forward rank 1")[0]
    _, _, picture = text_picture(problem, schedule, "all").split("\n", 2)
    queries = "\n".join(ownership_picture(tables.ownership).splitlines()[:3])
    design = (ROOT / "DESIGN.md").read_text()
    for shown in (str(tables.areas), areas_picture(tables.areas), queries, program, picture.partition("\n")[2]):
        assert indent(shown.strip("\n"), "    ") in design, shown


def test_the_design_shows_the_messages_of_states() -> None:
    problem = Problem(2, (Sequence(8, 8, 8, 8),), qkv_format="thd")
    design = (ROOT / "DESIGN.md").read_text()
    shown = str(make_states(problem)).partition("forward rank 1")[0]
    assert indent(shown.strip("\n"), "    ") in design, shown


def test_the_findings_can_be_replayed() -> None:
    """Texts read back, and name objects that their adapter exports; the libraries are not needed for that."""
    text = (ROOT / "docs" / "conformance" / "findings.md").read_text()
    cases = re.findall(r"`(Case\([^`]*\))`", text)
    assert len(cases) > 10
    for case in cases:
        assert Case.parse(str(Case.parse(case))) == Case.parse(case), case
    modules = "pytorch|ring_flash_attn|yunchang|transformer_engine|magi_attention"
    for module, name in re.findall(rf"`({modules}):(\w+)`", text):
        assert f'"{name}"' in (ROOT / "conformance" / "adapters" / f"{module}.py").read_text(), (module, name)


def test_the_debugging_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"})
    said = runner.invoke(cp_ref.cli.app, ["explain"]).output
    runner.invoke(cp_ref.cli.app, ["record", "--save", "good.pt"])
    runner.invoke(cp_ref.cli.app, ["record", "--plant", "lost-half", "--save", "bad.pt"])
    said += runner.invoke(cp_ref.cli.app, ["compare", "good.pt", "bad.pt"]).output
    printed = {line.rstrip() for line in said.splitlines()}
    fences = (ROOT / "docs" / "how_to" / "debugging.md").read_text().split("\n```")
    shown = [line for block in fences[1::2] if not block.startswith("python") for line in block.splitlines()[1:]]
    assert len(shown) > 50
    for line in shown:
        assert line.startswith("$ ") or line.strip() in ("", "...") or line.rstrip() in printed, line


def test_the_debugging_page_compares_the_fast_path_with_the_oracle() -> None:
    *_, program = blocks("docs/how_to/debugging.md")
    exec(compile(program, "debugging", "exec"), {})


def test_the_gpus_of_the_records_are_those_that_the_page_of_support_names() -> None:
    """The records' names say which GPUs were measured, and how many."""
    names = [path.name for path in (ROOT / "benchmarks" / "results").glob("*_[0-9]x_*.csv")]
    found = {re.findall(r"_(\d)x_(\w+)\.csv", name)[0] for name in names}
    assert {gpu for _, gpu in found} == {"h100", "h200"}
    page = (ROOT / "docs" / "support.md").read_text()
    for gpu in ("h100", "h200"):
        *first, last = sorted({count for count, name in found if name == gpu} | {"1"})
        assert f"| {gpu.upper()} (Hopper) | yes: {', '.join(first)} and {last} of one host |" in page


def test_every_promise_has_a_test_in_the_table() -> None:
    """A row names a promise by the words with which it begins."""
    promises, table = (ROOT / "docs" / "guarantees.md").read_text().split("\n## The tests\n")
    rows = re.findall(r"^\| (.+) \| (`tests/.+`) \|$", table, re.MULTILINE)
    assert len(rows) == len(table.strip().splitlines()) - 4  # a sentence, an empty line, and the table's head
    tests = [re.fullmatch(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", test) for _, cell in rows for test in cell.split(", ")]
    for test in tests:
        assert test is not None
        assert f"def {test[2] or 'test_'}" in (ROOT / test[1]).read_text(), test[0]
    assert "tests/" not in promises
    said = " ".join(promises.split())
    assert [begin for begin, _ in rows if said.count(begin) != 1] == []
    for section in ("What is checked when", "What a fault does", "The build cache"):
        text = promises.split(f"\n## {section}\n")[1].split("\n## ")[0]
        for promise in re.findall(r"^- (.+(?:\n  .+)*)", text, re.MULTILINE):
            words = " ".join(promise.split())
            seen_on_gpus = words.startswith("Where NCCL carries the messages")  # PyTorch's part; a record has it
            assert seen_on_gpus or any(words.startswith(begin) for begin, _ in rows), words


# ---- the picture on the page about hybrid models: a lane for each rank, a box for each fragment, an arrow for each map


_WIDE, _LEFT, _TOP, _LANE, _HIGH = 720, 84, 116, 84, 36  # pixels


def states_svg(problem: Problem) -> str:
    """The forward messages of `make_states` as an SVG document.

    An arrow is a map that is sent. It leads from its fragment to the receiver's next fragment of the document. Hovering
    over a box or an arrow names it.
    """
    fragments, page = document_fragments(problem), Drawing()
    pixels = _WIDE / max(problem.starts_q[-1], 1)
    _heading(page, problem, pixels)
    for source, reader, start, stop in _sent(problem):
        lanes, target = 7 * abs(reader - source), _next_start(fragments, reader, start)
        name = f"map of rows {start}:{stop}, from rank {source} to rank {reader}"
        _arrow(page, _LEFT + stop * pixels - lanes, source, _LEFT + target * pixels + lanes, reader, name)
    for document, _, rank, start, stop, _ in fragments.rows():
        colour, name = rank_colour(rank), f"document {document}, rows {start}:{stop}, on rank {rank}"
        x, wide = _LEFT + start * pixels, (stop - start) * pixels
        page.box(x + 1, _y(rank), wide - 2, _HIGH, colour, name, rx=4)
        if wide > 40:
            page.text(x + wide / 2, _y(rank) + 23, f"{start}:{stop}", ink_on(colour), text_anchor="middle")
    high = _y(problem.cp_size)
    page.text(_LEFT, high, "An arrow is the map (M, B) of a fragment, sent once to each rank that needs it.", SOFT)
    return page.document("state messages of a linear layer", _LEFT + _WIDE + 24, high + 20)


def _heading(page: Drawing, problem: Problem, pixels: float) -> None:
    said = f"a linear layer on {problem.cp_size} ranks; boxes are fragments, rows of the packed buffer"
    page.text(_LEFT, 34, "Who sends which state", size=20, font_weight=600)
    page.text(_LEFT, 56, said, SOFT, 13.5)
    for rank in range(problem.cp_size):
        page.text(20, _y(rank) + 23, f"rank {rank}", rank_colour(rank), 13, font_weight=600)
    bottom = _y(problem.cp_size - 1) + _HIGH + 12
    for number, (first, last) in enumerate(zip(problem.starts_q, problem.starts_q[1:], strict=False)):
        x, y = _LEFT + first * pixels, _TOP - 22
        page.text(x + (last - first) * pixels / 2, y, f"document {number}", SOFT, text_anchor="middle")
        if number:
            page.element("path", "", f'd="M{x:.1f} {y - 12}V{bottom}"', stroke=LINE, stroke_dasharray="4 4")


def _y(rank: int) -> int:
    return _TOP + rank * _LANE


def _sent(problem: Problem) -> list[tuple[int, int, int, int]]:
    """(sender, receiver, first row, behind the last row) of every piece of the forward messages."""
    return [
        (rank, message.peer, start, stop)
        for rank, steps in enumerate(make_states(problem).forward)
        for step in steps
        for message in step.sends
        for start, stop, *_ in message.pieces.rows()
    ]


def _next_start(fragments: DocumentFragments, rank: int, row: int) -> int:
    """The first row of a rank's next fragment behind a row."""
    return next(start for _, _, _, start, _, _ in fragments.of(rank).rows() if start > row)


def _arrow(page: Drawing, x: float, source: int, to: float, reader: int, name: str) -> None:
    """From the lower or upper edge of a box to the edge of another that faces it."""
    down = reader > source
    y, end = _y(source) + _HIGH * down, _y(reader) + _HIGH * (not down)
    tip, middle = (-6 if down else 6), (y + end) / 2
    curve = f'd="M{x:.1f} {y}C{x:.1f} {middle:.1f} {to:.1f} {middle:.1f} {to:.1f} {end + tip}"'
    colour = rank_colour(source)
    page.element("path", name, curve, fill="none", stroke=colour, stroke_width=2)
    page.element("path", "", f'd="M{to - 4:.1f} {end + tip}H{to + 4:.1f}L{to:.1f} {end}Z"', fill=colour)
