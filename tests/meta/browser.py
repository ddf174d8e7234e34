"""A real browser for the tests: headless Chromium, which draws a page and says where everything is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.marks import HANGS_S

__all__ = ["Seen", "look", "needs_chromium"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_CHROMIUM = next((path for name in _NAMES if (path := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(_CHROMIUM is None, reason="needs a Chromium")

_CSP = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
_NARROWEST = 500  # of a window; what is narrower is drawn in a frame


@dataclass
class Seen:
    """What a look at a page gave: `data` is what the asked script returned, `console` what the page complained of."""

    picture: Image.Image
    data: dict[str, Any]
    console: list[str] = field(default_factory=list)


def look(page: Path, folder: Path, ask: str, *, width: int = 1280, height: int = 2400, dark: bool = False) -> Seen:
    """Draw a page and ask it something.

    Args:
        page: the HTML file; a copy of it, which may run one more script, is what is drawn.
        folder: for the copy and the picture.
        ask: the body of a JavaScript function, run when the page is there; it returns an object.
        width: of the window, in pixels.
        dark: whether the reader prefers dark pages.
    """
    script = (
        "<script>addEventListener('load', () => {"
        f"const data = JSON.stringify((() => {{{ask}}})());"
        "if (parent === window) document.body.dataset.answer = data; else parent.postMessage(data, '*');"
        "});</script></body>"
    )
    asked = folder / f"asked-{width}-{dark}.html"
    text = page.read_text(encoding="utf-8")
    asked.write_text(_CSP.sub("", text).replace("</body>", script), encoding="utf-8")
    plain, shown = page, asked
    if width < _NARROWEST:
        plain, shown = (_framed(path, folder, width, height) for path in (page, asked))
    picture = folder / f"picture-{width}-{dark}.png"
    console = _run(plain, width, height, dark, f"--screenshot={picture}")[1]
    dom, more = _run(shown, width, height, dark, "--dump-dom", "--virtual-time-budget=5000")
    answer = re.search(r'data-answer="([^"]*)"', dom)
    assert answer, f"the page did not answer: {more}\n{dom[:500]}"
    text = answer[1].replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return Seen(Image.open(picture).convert("RGB"), json.loads(text), console + more)


def _framed(page: Path, folder: Path, width: int, height: int) -> Path:
    """A page with the page in a frame, which hands on its answer."""
    frame = folder / f"frame-{page.stem}.html"
    listen = "addEventListener('message', (event) => { document.body.dataset.answer = event.data; })"
    style = f"border:0;width:{width}px;height:{height}px"
    inside = f'<script>{listen}</script><iframe src="{page.as_uri()}" style="{style}"></iframe>'
    frame.write_text(f'<body style="margin:0">{inside}</body>')
    return frame


def _run(page: Path, width: int, height: int, dark: bool, *options: str) -> tuple[str, list[str]]:
    """Standard output, and the lines that the page wrote to its console."""
    assert _CHROMIUM
    command = [
        *(_CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"),
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--window-size={max(width, _NARROWEST)},{height}",
        *(*options, page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
