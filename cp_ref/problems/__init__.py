"""From the arguments of a call to a problem on integers, and what every call checks. No tensor is known here.

    arguments        the table of the arguments that say what attention is; signatures and checks come from it
    read_problem     a `Problem` from these arguments
    room             the sizes of a plan that is updated in place
    call_checks      one call against the problem that it was planned for
    cuts             which rows of a global tensor a rank's slice has
    compare_layouts  the cost of a batch under each layout and schedule

These modules import the standard library, numpy, `cp_ref.schedules` and `cp_ref.groups.group`.
"""
