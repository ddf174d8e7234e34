"""The report in a real browser: its cells have the colours that they say, nothing overflows, and it works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import conformance.report
from conformance.record import RunRecord
from conformance.report import write_report
from conformance.report.page import summary
from conformance.report.states import STATES
from tests.meta.browser import Seen, look, needs_chromium
from tests.meta.report_records import made_up

pytestmark = pytest.mark.thorough

_STYLE = (Path(conformance.report.__file__).parent / "templates" / "style.css").read_text()
Colour = tuple[int, int, int]

ASK = """
const box = (x) => { const r = x.getBoundingClientRect(); return [r.left, r.top, r.width, r.height].map(Math.round); };
const all = (query) => [...document.querySelectorAll(query)];
const cells = all(".large .c").map((c) => ({box: box(c), name: c.className, text: c.textContent, title: c.title}));
const out = {
  width: document.documentElement.scrollWidth,
  wide: innerWidth,
  failed: document.querySelector("[data-failed]").dataset.failed,
  verdicts: Object.fromEntries(all("[data-verdict]").map((v) => [v.dataset.verdict, Number(v.dataset.count)])),
  cells,
  keys: all(".legend .key").map((k) => ({box: box(k), name: k.className})),
  over: all(".panel, .problem, .budget, .wide, .command, figure, h1, .cells").filter(
    (x) => x.getBoundingClientRect().right > innerWidth + 0.5 || x.getBoundingClientRect().left < 0).length,
  clipped: all(".panel .cells th[scope=row], .meta dd, .badge, .chip").filter(
    (x) => x.scrollWidth > x.clientWidth + 1).map((x) => x.textContent),
  problems: all("article.problem").length,
  masks: all("svg.mask").length,
  pairs: box(document.querySelector("svg.pairs")),
};
// what the script does, last: it changes the page
const cell = document.querySelector(".large a.c");
cell.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
out.says = document.getElementById("cell-says").textContent;
cell.click();
out.shown = all("[data-number]").filter((p) => !p.hidden).map((p) => Number(p.dataset.number));
out.wanted = cell.dataset.f.split(" ").map(Number);
out.filter = document.getElementById("filter").textContent;
document.querySelector("#filter button").click();
out.again = all("[data-number]").filter((p) => !p.hidden).length;
out.copy = all(".copy").filter((b) => !b.hidden).length;
const square = document.querySelector("svg.pairs .l5");
const at = square.getScreenCTM(), x = document.querySelector("svg.pairs").dataset;
const first = square.getAttribute("d").match(/M([\\d.]+) ([\\d.]+)/).slice(1).map((n) => Number(n) + 3);
const point = new DOMPoint(...first).matrixTransform(at);
document.querySelector("svg.pairs").dispatchEvent(
  new PointerEvent("pointermove", {clientX: point.x, clientY: point.y, bubbles: true}));
out.pair = document.getElementById("pair-says").textContent;
scrollTo(0, 0);
return out;
"""


def _palette(dark: bool) -> dict[str, Colour]:
    """The style sheet's colours: name -> (red, green, blue)."""
    light, _, rest = _STYLE.partition("@media screen and (prefers-color-scheme: dark)")
    texts = [light.split("}")[0], rest.split("}")[0]] if dark else [light.split("}")[0]]
    found = {}
    for text in texts:
        for name, value in re.findall(r"--([\w-]+): #(\w{6})", text):
            found[name] = tuple(int(value[n : n + 2], 16) for n in (0, 2, 4))
    return found


@pytest.fixture(scope="module")
def record() -> RunRecord:
    return made_up(600)


@pytest.fixture(scope="module")
def page(record: RunRecord, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(record, tmp_path_factory.mktemp("page"))[1]


LOOKS = [(1280, False), (1280, True), (390, False), (390, True)]


@pytest.fixture(scope="module", params=LOOKS, ids=["laptop", "laptop dark", "phone", "phone dark"])
def seen(request: pytest.FixtureRequest, page: Path) -> tuple[Seen, int, bool]:
    width, dark = request.param
    return look(page, page.parent, ASK, width=width, height=2400, dark=dark), width, dark


@needs_chromium
def test_the_page_is_drawn_where_it_should_be(seen: tuple[Seen, int, bool]) -> None:
    look, width, dark = seen
    assert not look.console, look.console
    assert look.picture.size == (max(width, 500), 2400)
    assert look.data["wide"] == width
    assert look.data["width"] <= width, "the page is wider than the window"
    assert look.data["over"] == 0
    assert not look.data["clipped"]
    colours = look.picture.crop((0, 0, width, 2400)).getcolors(1 << 20)
    assert colours is not None
    assert len(colours) > 200, "the page is blank"
    most = max(colours)[1]
    assert most in (_palette(dark)["page"], _palette(dark)["card"])


@needs_chromium
def test_what_it_says_is_what_was_recorded(seen: tuple[Seen, int, bool], record: RunRecord) -> None:
    data, found = seen[0].data, summary(record)
    assert int(data["failed"]) == found.failed > 0
    assert data["verdicts"] == dict(found.counts)
    assert data["problems"] == min(24, len(found.failures))
    assert data["masks"] > 0
    cells = [cell for _, row in found.panels[0].rows for _, _, cell in row]
    assert len(data["cells"]) == len(cells) == 72
    for shown, cell in zip(data["cells"], cells, strict=True):
        assert cell.state.name in shown["name"].split()
        assert shown["text"].startswith(cell.state.symbol)
        assert shown["title"] == (cell.words if cell.total else "")


@needs_chromium
def test_cells_have_the_colours_of_their_states(seen: tuple[Seen, int, bool]) -> None:
    look, _, dark = seen
    palette, drawn = _palette(dark), set()
    for cell in (*look.data["cells"], *look.data["keys"]):
        left, top, wide, high = cell["box"]
        if top + high >= look.picture.height:
            continue
        state = next(name for name in STATES if name in cell["name"].split())
        if state in ("none", "missing"):  # no colour of their own
            continue
        got = look.picture.getpixel((left + wide // 2, top + 2))  # above the symbol
        assert isinstance(got, tuple)
        assert all(abs(a - b) <= 2 for a, b in zip(got, palette[state], strict=True)), (cell, got, palette[state])
        drawn.add(state)
    assert drawn == {"wrong", "stopped", "known", "right", "unsupported"}


@needs_chromium
def test_a_cell_leads_to_its_problems(seen: tuple[Seen, int, bool], record: RunRecord) -> None:
    data = seen[0].data
    assert data["shown"] == sorted(data["wanted"])
    assert len(data["shown"]) < data["again"] == len(summary(record).failures)
    assert re.match(r"(p2p|all_gather|a2a|a2a\+p2p) · (bshd|sbhd|thd) · \w+: .*\d+ (wrong|hung|crashed)", data["says"])
    assert data["says"].split(":")[0] in data["filter"]
    assert data["copy"] == 1 + sum(len(f.commands) for f in summary(record).failures[:24])
    assert re.match(r"\w[\w ]*: .*, with .*: \d{3} problems", data["pair"])


@needs_chromium
def test_a_broken_script_would_be_heard(page: Path, tmp_path: Path) -> None:
    """The check of the console is one that can fail, and so is the page's rule against other scripts."""
    text = page.read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace("</body>", "<script>document.title = 1</script></body>"), encoding="utf-8")
    assert any("Content Security Policy" in line for line in look(broken, tmp_path, "return {}").console)


# what colour-blind eyes see of a colour in linear light (Vienot, Brettel and Mollon 1999)
EYES = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "deuteranopia": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
    "protanopia": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
}


def _lab(colour: Colour, eye: Any) -> tuple[float, ...]:
    """A colour of sRGB in CIELAB, as an eye sees it."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    seen = [min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in eye]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(m * c for m, c in zip(row, seen, strict=True)) for row in to_xyz]
    white = (0.9505, 1.0, 1.089)
    ratios = (c / w for c, w in zip(xyz, white, strict=True))
    x, y, z = (r ** (1 / 3) if r > 0.008856 else 7.787 * r + 16 / 116 for r in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("eye", EYES)
def test_states_stay_apart_for_colour_blind_eyes(eye: str, dark: bool) -> None:
    palette = _palette(dark)
    names = ("right", "wrong", "stopped", "known", "unsupported", "card")
    labs = {name: _lab(palette[name], EYES[eye]) for name in names}
    for n, one in enumerate(names):
        for other in names[n + 1 :]:
            apart = sum((a - b) ** 2 for a, b in zip(labs[one], labs[other], strict=True)) ** 0.5
            assert apart > 15, (one, other, apart)
