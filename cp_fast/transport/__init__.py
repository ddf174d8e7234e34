"""Messages without multiprocessors: copy engines pull the bytes from the peers' memory.

An NCCL message is a kernel. Next to an attention kernel, which fills every multiprocessor, it costs more than its
bytes. If all ranks of a group are GPUs of one host that reach each other's memory, a message needs no kernel:

    sender      filling   wait until the place in the staging buffer is free; copy the tensor there; signal `ready`
    receiver    pulling   wait for `ready`; copy the bytes to where they are wanted; signal `done`

The exchange has two streams, in addition to PyTorch's current one (`here`), whose kernels run at the same time. If a
tensor could be freed after the copy and a concurrent kernel needs the memory, `here` fills the staging buffer itself.
Copy engines do the copies, and the streams themselves do the waits and signals (cuStreamWaitValue32,
cuStreamBatchMemOp): nothing spins on a multiprocessor.

    streams           the operations on streams, and words of memory that streams wait for
    peer_exchange     an exchange of parcels through staging buffers: both ends count where each message lies
    memory_group      the memory that the ranks of a group share, which groups can do that, and two that cross in a rank
    watch             a peer that does not answer within the time-out

`CP_FAST_MESSAGES` chooses the transport: "auto" takes peer memory if available, "peer_memory" requires it, "group"
takes the process group's (NCCL). It must be the same on all ranks. `make_plan` makes the choice for the plan. With any
choice, the group's own messages carry calls captured in a CUDA graph (a replay would wait for numbers of the past),
calls without a plan, and messages larger than a staging buffer. They also carry a user's own schedule: its two ends may
cut their messages into steps differently.
"""
