"""The compiler: a rank's schedule becomes an executable plan.

- planning          the schedule that runs: its head chunks, own keys that wait, folded sequences, ordered messages
- executable_plan   a flat list of instructions for each pass
- instructions      the instructions, and the buffers that they work on
- lowering          one rank's schedule as such a plan: right but slow
- pass_table        every pass, with its switch
- pipeline          runs the passes
- tiles             passes on tiles, which become few launches of few windows
- passes            passes on instructions: functions from plan to plan
- row_maps          the positions of global rows in a buffer
- row_numbers       how many rows a buffer may have
- index_tables      the row numbers and cumulative lengths of a whole plan, in one upload
- link              a plan with its tables on the device
- in_place          plans updated in place with the next batch's lengths
- instruction_text  a plan as text
"""
