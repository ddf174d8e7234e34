"""Whether Numba simulates a GPU in this process. It reads the same variable, once, when it is imported."""

from __future__ import annotations

import os

__all__ = ["SIMULATED"]

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
