"""The contract of `cp_ref` and `cp_fast`: calls and their checks, contexts, cuts of tensors, scores, masks, groups.

It has no arithmetic but that of scores. It imports torch and, of the two packages, `cp_ref.schedules` alone.

    declared, attention_call, plan_arguments, layer, linear_calls, sharding, thd_*
                                    a public function's signature, docstring and checks of arguments
    arguments                       the table of the arguments of a problem, from which signatures and checks come
    read_problem, call_checks, room from arguments to a problem; what every call checks
    context, group, process_groups, collectives
                                    ranks that exchange, and errors that name the peer
    cuts, compare_layouts           which rows a rank holds; layouts compared by cost
    scores, score_mod               the definition of ALiBi, score_mod and dropout
    linear_schedules, verify_states the schedules of linear layers and convolutions, and their proof
    masks, area_rows, foreign_masks makers of areas; areas as tensors; readers of others' masks
    *_pictures                      problems, tables and schedules as text and SVG
    tensors                         autocast, derivatives, devices, DTensors
    cli                             options and tables of both command lines
"""
