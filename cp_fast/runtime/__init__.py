"""The runtime: one loop over the operations of a program.

run, operations     attention's two passes and their loop; instructions as operations, resolved once a shape
pass_buffers        the tensors of buffers, and their rows
prepared_exchange   the messages of a step, prepared once
row_exchange        an exchange of a layer: rows are gathered, and results given back
row_positions       the places of rows in their sequences, for scores that depend on them
slices              the user's slices as packed rows, for layers
handles             plans and contexts as tensors, for compiled graphs; what selective checkpointing sees
graph_break         calls that leave a compiled graph
"""
