"""How Triton's kernels of linear layers are tuned and cut, for scripts that cannot wait for compilers."""

from __future__ import annotations

import importlib.util
from typing import Any

__all__ = ["tune_only", "use_few_kernels", "use_pieces"]


def tune_only(part: int, parts: int) -> None:
    """Triton's tuners look at one of `parts` parts of their configurations, and at one configuration at least."""
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]

    init = Autotuner.__init__

    def first(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **options: Any) -> None:
        some = configs[part::parts] or configs[:1]
        init(self, fn, arg_names, some, *rest, **options)

    Autotuner.__init__ = first


def use_pieces(*, small: bool) -> bool:
    """Whether flash-linear-attention's fragments are now cut in small pieces; else they are cut as always."""
    try:
        from cp_fast.kernels.linear.fla import fla_pieces
    except ImportError:
        return False
    fla_pieces.LEAST, fla_pieces.PROGRAMS, fla_pieces.SCANS = (1, 2**40, -(2**40)) if small else (16, 64, 24)
    return small


def use_few_kernels() -> None:
    """For random problems: Triton's tuners take their first configuration, so that kernels compile in seconds, and
    fragments are cut in pieces of about one chunk, which short documents have too. To be called before a library of
    kernels is imported.
    """
    if importlib.util.find_spec("triton") is not None:
        tune_only(0, 1000)
        use_pieces(small=True)
