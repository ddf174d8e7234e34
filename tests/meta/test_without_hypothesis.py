"""Without the extra 'test' the command line says what it lacks."""

import subprocess
import sys

from tests.marks import HANGS_S

WITHOUT = """
import runpy, sys
sys.modules["hypothesis"] = None
sys.argv = ["conformance", "--impl", "cp_ref"]
runpy.run_module("conformance", run_name="__main__")
"""


def test_the_missing_packages_are_named() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 1
    assert "pip install hypothesis jinja2" in done.stderr
    assert "Traceback" not in done.stderr
