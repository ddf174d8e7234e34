"""The README's claims that can be read off the code are kept equal to it."""

from __future__ import annotations

from pathlib import Path

import cp_fast
import cp_ref
from cp_fast.features import backend_table

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_backend_table_is_what_the_backends_declare() -> None:
    assert backend_table() in README


def test_every_name_in_the_table_of_names_exists() -> None:
    table = README.split("| name | what it does |")[1].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        for word in line.split("|")[1].split("`")[1::2]:
            name = word.split("(")[0]
            module = cp_ref if name.startswith("cp_ref.") else cp_fast
            assert hasattr(module, name.removeprefix("cp_ref.").removeprefix("cp_fast.")), name
