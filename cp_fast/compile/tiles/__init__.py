"""Tiles of a schedule as segments of few launches, so that a kernel library gets large batches from any planner.

windows        a tile's diagonal band as a kernel's window; tiles split so that few windows serve all of them
segments       the queries and keys of a launch: rows from anywhere, with one window
joins          tiles of an attention slice merged: touching ones, causal squares, tiles without hidden pairs
shared_keys    queries that share keys, as few segments
sharing        attention slices that share rows, in few launches without common queries
atoms          sets of rows as integers
split_queries  segments of many queries and few keys
launches       segments of equal windows in one launch
groups         the tiles of a step by heads, with their launches; both passes and all head chunks share them
"""
