"""Skip marks that several folders share."""

import pytest

from cp_fast import build

__all__ = ["needs_cxx"]

needs_cxx = pytest.mark.skipif(build.why_not("cpu") is not None, reason="needs a C++ compiler")
