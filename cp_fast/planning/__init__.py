"""Lowering: from one rank's schedule to a program of kernel launches, copies and messages on rows of buffers.

`cp_ref.spec` plans; what it plans is lowered here, whichever schedule it is. All of it is host work on columns (arrays
with one number a tile or a span), step by step:

    rows        where global rows lie in a buffer
    tables      row indices and cumulative lengths of a whole plan in one upload
    draft       the lowered program on the host
    operands    which buffer has the rows that a step needs; what no single buffer has is put together in a new one
    results     where partial results go: into a message's buffer, or home
    windows     a tile's band as a kernel's window; tiles cut so that few windows serve all of them
    joins       tiles that are one tile: the own causal square, keys in any order where nothing is hidden
    launches    tiles with equal windows in one kernel launch
    groups      the tiles of a step by heads, with their launches; both passes and all stages of heads share them
    lower       a rank's programs, both passes
    link        the program with its tables on the device

A plan that is updated in place goes on from there: `fit` puts the next batch's draft into the shape of the first.
"""
