"""Problems of the lower levels as one line of text, like `Case`: a dataclass whose fields are plain values."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

from cp_ref.schedules.values import parse_call

__all__ = ["LevelCase"]


class LevelCase:
    """Base of the dataclasses that one level's problems are. A text begins with the class's name.

    Every field has a default; the text has those that differ from it, and `parse` reads it back.
    """

    def __str__(self) -> str:
        """One line that `parse` reads back."""
        listed: tuple[Any, ...] = fields(self)  # type: ignore[arg-type]
        words = [f"{f.name}={v!r}" for f in listed if (v := getattr(self, f.name)) != f.default]
        return f"{type(self).__name__}({', '.join(words)})".replace("'", '"')  # so that a shell's '...' holds it

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that `str` printed. Raises ValueError on anything else."""
        try:
            _, unnamed, values = parse_call(text, [cls.__name__])
            if unnamed:
                raise ValueError("every field has to be named")
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot read a problem of {cls.__name__} from {text!r}: {error}") from error
