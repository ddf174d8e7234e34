"""Backend "fa2": FlashAttention 2, on the kernels of the flash-attn package if it is installed, else on PyTorch's.

backend: common code. varlen: the kernels' arguments, and facts about the kernels. built_in: on PyTorch's operators.
package: on the flash-attn package, which has more features.
"""

from __future__ import annotations

import warnings
from functools import cache

from cp_fast.backends.backend_probe import probe
from cp_fast.backends.fa2.fa2_backend import Fa2Backend
from cp_fast.backends.fa2.fa2_built_in import BuiltIn
from cp_fast.backends.fa2.fa2_package import Package
from cp_ref.spec import describe

__all__ = ["BUILT_IN", "PACKAGE", "Fa2Backend", "installed", "origin_of"]

BUILT_IN, PACKAGE = BuiltIn(), Package()
_ALONE = describe(PACKAGE.features - BUILT_IN.features)  # what the package alone has


@cache
def installed() -> Fa2Backend:
    """The package's kernels if they work, else PyTorch's. Warns once if the package is broken.

    Builds and releases differ from the one whose source was read, so the package must first pass `probe` here.
    """
    reason = PACKAGE.why_not() or _wrong_here()
    if reason is None:
        return PACKAGE
    if BUILT_IN.why_not() is None and _broken() is not None:
        warnings.warn(
            f"the flash-attn package is installed, but backend 'fa2' does without it and its {_ALONE}: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return BUILT_IN


def origin_of(backend: Fa2Backend) -> str:
    """The origin of its kernels and, unless that is the package, the reason: for `doctor`."""
    origin = f"{backend.origin}, {backend.version()}"
    if backend is PACKAGE:
        return origin
    broken = _broken()
    return f"{origin}; no {_ALONE}: " + (
        f"the flash-attn package does not work: {broken}" if broken else "the flash-attn package is not installed"
    )


def _broken() -> str | None:
    """Why the installed package is not used; None if it is used or not installed."""
    found = PACKAGE.broken()
    return _wrong_here() if found is None and PACKAGE.why_not() is None else found


@cache
def _wrong_here() -> str | None:
    """The first error of the package's kernels on this GPU in a few launches. Call it only if they can be launched."""
    try:
        return probe(PACKAGE, "cuda")
    except Exception as error:  # A build without kernels for this GPU, or with another signature.
        return f"launching it failed: {type(error).__name__}: {error}"
