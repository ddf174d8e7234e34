"""Makers of attention slices, for `attention(..., areas=...)`: see `cp_ref.common.masks`."""

from cp_ref.common import masks
from cp_ref.common.masks import *  # noqa: F403  # the same on both sides

__all__: list[str] = []
__all__ += masks.__all__
