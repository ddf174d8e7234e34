"""The version of the installed package: the one that pyproject.toml had when it was installed."""

from __future__ import annotations

from importlib import metadata

__all__ = ["__version__"]

try:
    __version__: str | None = metadata.version("cp-attention")
except metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = None
