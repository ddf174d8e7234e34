"""Tiles of a schedule as segments of few launches: a kernel library gets large batches, whatever the planner made.

windows    a tile's band as a kernel's window; tiles cut so that few windows serve all of them
joins      tiles that are one tile: touching ones, own causal squares, keys in any order where nothing is hidden
sharing    areas that share rows: few rectangles that share none
spreading  many queries that see few keys
launches   segments of equal windows in one launch
groups     the tiles of a step by heads, with their launches; both passes and all head chunks share them
"""
