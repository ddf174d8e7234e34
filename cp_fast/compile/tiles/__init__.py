"""Tiles of a schedule as segments of few launches, so that a kernel library gets large batches from any planner.

windows    a tile's band as a kernel's window; tiles cut so that few windows serve all of them.
joins      tiles joined into one: touching ones, causal squares, tiles without hidden pairs.
sharing    areas that share rows, as few rectangles without shared rows.
spreading  segments of many queries and few keys.
launches   segments of equal windows in one launch
groups     the tiles of a step by heads, with their launches; both passes and all head chunks share them
"""
