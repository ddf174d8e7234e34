"""The table of mistakes of a training step in docs/conformance/detection.md is what the reports say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.workers import Processes
from tests.meta.step.detection import MISTAKES, REASONS, WAYS, Cells

DOCS = Path(__file__).parents[3] / "docs"
TABLE = (DOCS / "conformance" / "detection.md").read_text()
PAGE = " ".join((DOCS / "how_to" / "training.md").read_text().split())
SHOWN = (  # in docs/how_to/training.md, as the way "plain", or "padded", has them
    *(("plain", "a layer scaled on one rank"), ("plain", "a z-loss of each rank")),
    *(("padded", "padding in the denominator"), ("plain", "a rank skips a micro-batch")),
)


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    groups = [Processes(size) for size in (1, 2, 4)]
    yield Cells(*groups)
    for group in groups:
        group.close()


def in_table(mistake: str, way: str) -> str:
    [row] = [line for line in TABLE.splitlines() if line.startswith(f"| {mistake} |")]
    return row.strip("| ").split(" | ")[1 + WAYS.index(way)]


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_each_mistake_is_found_and_named_in_each_way(way: str, cells: Cells) -> None:
    if way == "Trainer":
        pytest.importorskip("accelerate", reason="needs transformers: pip install '.[test-integrations]'")
    for mistake, cause in MISTAKES.items():
        said = cells.cell(way, mistake)
        assert said == in_table(mistake, way), (way, mistake)
        assert said in (f"`{cause}`", REASONS.get((mistake, way))), (way, mistake, cells.report(way, mistake))


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_the_same_step_without_a_mistake_is_right(way: str, cells: Cells) -> None:
    if way == "Trainer":
        pytest.importorskip("accelerate", reason="needs transformers: pip install '.[test-integrations]'")
    report = cells.report(way, "")
    assert report.right, report


@pytest.mark.thorough
def test_the_page_shows_what_is_said(cells: Cells) -> None:
    for way, mistake in SHOWN:
        report = cells.report(way, mistake)
        assert report.findings[0].text in PAGE, report
