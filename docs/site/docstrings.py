"""An extension of griffe, which reads docstrings for the site."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).+)*", re.MULTILINE)
PROSE = re.compile(r"^(Returns|Raises):\n((?:    .*\n?)+)", re.MULTILINE)


class Docstrings(Extension):
    """Worked examples have no heading. What is returned and raised is prose, not a list."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = PROSE.sub(
                lambda found: (
                    f"**{found[1]}:**\n{re.sub('^    ', '', found[2], flags=re.M)}"
                ),
                obj.docstring.value,
            )
            obj.docstring.value = EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0]}\n```", text
            )

    def on_class(self, *, cls: Any, **_: Any) -> None:
        for name in [
            name for name in cls.members if name.startswith("__") and name != "__init__"
        ]:
            cls.del_member(name)
