"""The tables of figures of the README and of docs/ are what `benchmarks/readme_tables.py` makes."""

from __future__ import annotations

import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks.readme_tables import RESULTS, ROOT, commit_table, replaced, speed_table, tables_of


@pytest.mark.parametrize("name", tables_of())
def test_a_document_has_what_the_records_say(name: str) -> None:
    text = (ROOT / name).read_text()
    for table in tables_of()[name]:
        assert replaced(text, table) == text


def test_the_page_of_records_says_which_commit_each_is_of() -> None:
    """Mended by `python -m benchmarks.readme_tables --write`, also where what a record measures has changed."""
    text = (RESULTS / "README.md").read_text()
    table = commit_table(text)
    assert table is None or replaced(text, table) == text  # None: a shallow clone, which does not know
    listed = {line.split("`")[1] for line in text.split("## Commits")[1].splitlines() if line.startswith("| `")}
    assert listed == {path.name for path in RESULTS.iterdir() if path.name != "README.md"}
    cells = [line.split("|")[1] for line in text.split("## Commits")[0].splitlines() if line.startswith("| `")]
    told = {name for cell in cells for name in cell.replace("`", "").strip().split(", ")}
    endings = {first.split(".")[0] + name for cell in cells for first, _, name in [cell.strip(" `").partition("`, `")]}
    assert {name for name in listed if not any(fnmatch(name, pattern) for pattern in told | endings)} == set()


PAGE = "| `said.txt` | at {one}, and before at 1234567 |\n| `rebased.csv` | of b52f186 |\n"


def test_what_has_changed_since_a_record(tmp_path: Path) -> None:
    tree, results = tmp_path / "tree", tmp_path / "tree" / "benchmarks" / "results"
    for folder in (results, tree / "csrc", tree / "cp_fast"):
        folder.mkdir(parents=True)

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "protocol.file.allow=always")
        return subprocess.run(
            ["git", *who, *words], cwd=tree, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(file: str, text: str) -> str:
        (tree / file).write_text(text)
        git("add", "-A")
        git("commit", "-qm", file)
        return git("rev-parse", "HEAD")

    git("init", "-q")
    first, one = commit("csrc/a.cpp", "one"), commit("cp_fast/a.py", "one")
    commit("cp_fast/a.py", "two")
    commit("benchmarks/results/kernels_a.csv", f"us,commit\n1,{first[:7]}\n2,{one[:9]}\n")
    commit("benchmarks/results/speed_a.json", f'{{"commit": "{one}"}}')
    commit("benchmarks/results/said.txt", "12")
    commit("benchmarks/results/rebased.csv", "us\n1\n")

    def lines() -> dict[str, list[str]]:
        table = commit_table(PAGE.format(one=one[:8]), tree)
        assert table is not None
        rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
        return {row[0].strip("`"): [row[1][:8], row[3]] for row in rows}

    found = {"kernels_a.csv": [one[:8], "no"], "rebased.csv": ["none of ", "unknown"], "said.txt": [one[:8], "yes"]}
    assert lines() == found | {"speed_a.json": [one[:8], "yes"]}
    (tree / "csrc" / "a.cpp").write_text("not committed")
    assert lines()["kernels_a.csv"][1] == "yes"
    git("clone", "-q", "--depth", "1", f"file://{tree}", str(tmp_path / "shallow"))
    assert commit_table(PAGE, tmp_path / "shallow") is None
    shutil.rmtree(tmp_path / "shallow" / ".git")
    assert commit_table(PAGE, tmp_path / "shallow") is None


@pytest.fixture
def records(tmp_path: Path) -> Path:
    records = [f"{name}_2x_h200.csv" for name in ("speed_libraries", "speed", "side_by_side")]
    for name in (*records, "speed_peers_2x_h100.csv", "features.csv", "conformance_1x.json"):
        shutil.copy(RESULTS / name, tmp_path)
    return tmp_path / "speed_libraries_2x_h200.csv"


def test_another_record_is_another_table(records: Path) -> None:
    text = records.read_text()
    assert text.count(",0.864,0.851,") == 1
    records.write_text(text.replace(",0.864,0.851,", ",0.864,0.902,"))
    table = speed_table("2 x H200", records.parent)
    assert "| window of 4,096 | **0.90 / 0.87 / 0.75** | 0.68 | refused | refused | refused / 0.29 / 0.65 |" in table
    page = (ROOT / "docs" / "conformance" / "comparison.md").read_text()
    assert replaced(page, table) != page


def test_a_library_that_was_not_there_has_not_refused(records: Path) -> None:
    file = records.with_name("speed_peers_2x_h100.csv")
    assert "| head dims 192 and 128 | **0.94 / 0.94 / 0.94** | refused |" in speed_table("2 x H100", records.parent)
    missing = "magi_attention p2p: this adapter needs magi_attention"
    file.write_text(file.read_text().replace("magi_attention p2p: MagiAttention, FFA for bfloat16", missing))
    assert "| head dims 192 and 128 | **0.94 / 0.94 / 0.94** | - |" in speed_table("2 x H100", records.parent)


def test_lines_that_are_not_there_or_twice_are_named(records: Path) -> None:
    text = records.read_text()
    window = next(line for line in text.splitlines() if ",4096,fa4," in line)
    records.write_text(text + window + "\n")
    with pytest.raises(ValueError, match=r"speed_libraries_2x_h200\.csv has cp_fast .* more than once"):
        speed_table("2 x H200", records.parent)
    records.write_text("\n".join(line for line in text.splitlines() if ",4096,fa4," not in line) + "\n")
    with pytest.raises(ValueError, match="has no row of cp_fast for 'window of 4,096'"):
        speed_table("2 x H200", records.parent)
    with pytest.raises(ValueError, match="it must have one"):
        replaced("no table", "| | a |\n| --- | --- |\n")
