"""Entries of configurations whose small values cannot be told from their names, by the configuration's class."""

from __future__ import annotations

from typing import Any

__all__ = ["EXCEPTIONS"]

# "default": of the configuration that is to be made small. "as it is": the class's own value.
EXCEPTIONS: dict[str, dict[str, Any]] = {}
