"""The schedule that runs: `cp_ref.schedules` plans it, with parameters chosen by a machine's numbers. Here it
is rewritten.

- choose_head_chunks   the head chunks of an a2a schedule
- waiting_keys         own keys that wait for those of other ranks
- chosen_schedule      the schedule with both
- fold_batch           equal sequences as heads of one sequence
- message_order        the tags of a user's schedule
- machine              a machine as data, and `machines` that are built in
- machine_costs        the numbers of one machine that decide
"""
