"""The compiler: a rank's schedule becomes an executable plan.

planning       the schedule that runs: its head chunks, and own keys that wait, by a machine's numbers.
instructions   the executable plan: buffers and a flat list of instructions.
lower          one rank's schedule as such a plan: right but slow.
buffers, sums  the buffers of operands; the sums of partial results.
tiles          tiles as few launches of few windows.
passes         functions from plan to plan that make it fast. `pipeline` lists them.
row_maps       the positions of global rows in a buffer.
index_tables   the row numbers and cumulative lengths of a whole plan, in one upload.
link           a plan with its tables on the device.
in_place       plans updated in place with the next batch's lengths.
text           a plan as text.
"""
