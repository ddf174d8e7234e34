"""The runtime: one loop over the operations of a program.

forward_backward    attention of one layer, both passes, on packed rows; `packed_tensors` has the users' formats
run, operations     the loop; instructions as operations, resolved once a shape
pass_buffers, tensors, row_selection    the tensors of buffers, and their rows
prepared_exchange   the messages of a step, prepared once
head_start          messages and kernels on one GPU at the same time
"""
