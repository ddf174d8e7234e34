"""The compiler: a rank's schedule becomes two programs, one for each direction.

Read from the bottom up; a chapter imports those above it.

- index_tables         the row numbers and cumulative lengths of a whole plan, in one upload
- program              a flat list of instructions on numbered buffers
- machine              a machine as data, and `machines` that are built in
- chosen_head_chunks   how many heads are exchanged at a time
- own_keys             own keys attend first, or wait for others
- chosen_schedule      the schedule that runs, by these choices
- packing              between users' formats and packed rows, and equal sequences folded into heads
- buffers              the buffers and sums of a program, while it is made
- lower                one rank's schedule as programs: right but slow
- instruction_passes   passes on instructions: functions from program to program
- pipeline             lowering and passes, and tables on the device
- exchange_program     the exchanges of a layer as programs
- in_place             plans updated in place with the next batch's lengths

`cp_fast.tiles` makes the launches of a step. `cp_fast.passes` lists every pass, with its switch.
"""
