"""Makers of areas, for `attention(..., areas=...)`: the same in both packages."""

from cp_ref.batches.masks import *  # noqa: F403
from cp_ref.batches.masks import __all__ as __all__
