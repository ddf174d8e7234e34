"""What ends a command before its own code runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cp_ref.common.cli.lazy_commands import lazy_commands


def test_an_import_that_refuses_the_environment_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of `doctor` with CP_FAST_CHECK=x."""
    (tmp_path / "reads_the_environment.py").write_text("raise ValueError('CP_FAST_CHECK is x; it must be 0 or 1')")
    monkeypatch.syspath_prepend(tmp_path)

    app = lazy_commands("Looks.", {"look": ("reads_the_environment", "Look.")})
    app.callback()(lambda: None)  # as one command alone would be the whole command line
    done = CliRunner().invoke(app, ["look"])
    assert done.exit_code == 2
    assert done.stderr == "error: CP_FAST_CHECK is x; it must be 0 or 1\n"
