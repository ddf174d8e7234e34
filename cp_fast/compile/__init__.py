"""The compiler: a rank's schedule becomes an executable plan.

instructions   the executable plan: buffers and a flat list of instructions
lower          a rank's schedule as such a plan, right and slow
buffers, sums  which buffer holds the rows that are read; where partial results go
tiles          tiles as few launches of few windows
passes         functions from plan to plan that make it fast; `pipeline` lists them
row_maps       where global rows lie in a buffer
index_tables   the row numbers and cumulative lengths of a whole plan, in one upload
link           a plan with its tables on the device
in_place       plans that the next batch's lengths are written into
text           a plan as text
"""
