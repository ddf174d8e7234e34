"""One rank's plan of a batch, worked out for all sequences at once.

The specification plans with one object a tile and a message piece; here each step is a few loops over columns, arrays
with one number a sequence, so that ten thousand sequences take milliseconds. What is sent and computed is the same,
message by message and step by step, and the tests compare the two.

    columns     what is known of all sequences: tokens, ranges, bands, tiles, rows
    loops       the loops over them: C++, or numpy where there is no compiler; plans are the same, bit for bit
    batch       a problem's columns: lengths, bands, and who owns what
    views       what two units are to each other by their chunks, without a look at the sequences
    tiles       what a unit sees of another: rectangles cut into shapes that share few windows
    blocks      where tokens lie in a buffer, and which of them travel
    placing     tiles to launches on rows
    ring        the steps of p2p, and of the rings of a2a+p2p and a2a (a ring of one)
    halo        the same under a window on both sides, where nothing goes round
    gather      the steps of all_gather
    exchange    the rows that the a2a schedules exchange for heads
    tables      rows and lengths of a whole plan in one upload

A plan that is updated in place goes on from there:

    shape       what a captured graph has baked in: messages, launches and their largest sizes
    padded      tables of constant size, and what pads them
    fit         a batch's draft in the shape of a plan
    fixed       its tables on the device, written over by one copy
"""
