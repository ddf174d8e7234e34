"""The disk cache of FlashAttention 4's compiled kernels, so that processes do not each compile a shape class again.

The library has this cache, but uses it only if its environment variables say so. It reads them at import; the user's
values stay. Inside the folder, each release has a folder named by a checksum of its sources.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

from cp_fast.log import log_once

__all__ = ["keep_on_disk", "kept_where", "says_when_it_compiles"]

ENABLED, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_NAME = "flash_attn_4"
_LONG = 1.0  # Seconds: longer than any launch, shorter than any compilation.


def keep_on_disk() -> None:
    """Set the library's variables, unless the user has, to a folder next to our builds. Call it before the import."""
    if ENABLED in os.environ or FOLDER in os.environ or "flash_attn.cute.cache_utils" in sys.modules:
        return
    from cp_fast.build import Unavailable  # The build code is not imported with the package.
    from cp_fast.build.cache import own_folder

    with suppress(OSError, Unavailable):  # No home, or a folder that others can write to: no disk cache.
        folder = own_folder(_NAME)
        os.environ[ENABLED], os.environ[FOLDER] = "1", str(folder)


def kept_where() -> str:
    """The folder of compiled kernels, in words.

    >>> import os
    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, {ENABLED: "0"}):
    ...     kept_where()
    'nowhere: every process compiles anew (FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is not 1)'
    """
    if os.environ.get(ENABLED) != "1":
        return f"nowhere: every process compiles anew ({ENABLED} is not 1)"
    return os.environ.get(FOLDER) or "the library's own folder of temporary files"


@contextmanager
def says_when_it_compiles(function: Any) -> Iterator[None]:
    """Run one of the library's functions; if it compiled a kernel, report it once."""
    compiled = getattr(function, "compile_cache", None)
    known = getattr(compiled, "cache", {})
    before, began = len(known), monotonic()
    yield
    if len(known) > before and (took := monotonic() - began) > _LONG:
        log_once(
            f"FlashAttention 4 compiles its kernels on the first call of each shape class (the first one took "
            f"{took:.0f} s); they are kept {'in ' if kept_where()[0] == '/' else ''}{kept_where()}"
        )
