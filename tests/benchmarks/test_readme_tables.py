"""The README's tables and those of docs/conformance/comparison.md are what `benchmarks/readme_tables.py` makes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.readme_tables import RESULTS, ROOT, replaced, speed_table, tables_of


@pytest.mark.parametrize("name", tables_of())
def test_a_document_has_what_the_records_say(name: str) -> None:
    text = (ROOT / name).read_text()
    for table in tables_of()[name]:
        assert replaced(text, table) == text
    assert "none found in 8,839 random problems" in text


@pytest.fixture
def records(tmp_path: Path) -> Path:
    records = [f"{name}_2x_h200.csv" for name in ("speed_peers", "speed", "side_by_side")]
    for name in (*records, "features.csv", "conformance_1x.json"):
        shutil.copy(RESULTS / name, tmp_path)
    return tmp_path / "speed_2x_h200.csv"


def test_another_record_is_another_table(records: Path) -> None:
    text = records.read_text()
    assert text.count(",0.859,0.872,") == 1
    records.write_text(text.replace(",0.859,0.872,", ",0.859,0.902,"))
    table = speed_table(records.parent)
    assert "| window of 4,096 | **0.90 / 0.87 / 0.78** | - | - | refused / 0.29 / 0.65 |" in table
    page = (ROOT / "docs" / "conformance" / "comparison.md").read_text()
    assert replaced(page, table) != page


def test_lines_that_are_not_there_or_twice_are_named(records: Path) -> None:
    text = records.read_text()
    window = next(line for line in text.splitlines() if ",4096,fa4," in line)
    records.write_text(text + window + "\n")
    with pytest.raises(ValueError, match=r"speed_2x_h200\.csv has cp_fast .* more than once"):
        speed_table(records.parent)
    records.write_text("\n".join(line for line in text.splitlines() if ",192,128," not in line) + "\n")
    with pytest.raises(ValueError, match="has no row of cp_fast for 'head dims 192 and 128'"):
        speed_table(records.parent)
    with pytest.raises(ValueError, match="it must have one"):
        replaced("no table", "| | a |\n| --- | --- |\n")
