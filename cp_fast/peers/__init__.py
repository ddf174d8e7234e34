"""Messages without multiprocessors: bytes that copy engines pull out of the peers' memory.

An NCCL message is a kernel. Beside an attention kernel, which fills every multiprocessor, it costs more than its bytes.
Where all ranks of a group are GPUs of one host that reach each other's memory, a message needs no kernel at all:

    sender      filling   wait until the place in the lane is free; copy the tensor there; signal `ready`
    receiver    pulling   wait for `ready`; copy the bytes to where they are wanted; signal `done`

Both are streams of the exchange, beside PyTorch's current one (`here`), whose kernels go on meanwhile. Where a tensor
could go after the copy, and a kernel that is launched beside it wants the memory, `here` fills the lane itself. The
copies are done by copy engines, and waits and signals by the streams themselves (cuStreamWaitValue32,
cuStreamBatchMemOp): nothing spins on a multiprocessor.

    lanes     where in the sender's memory the bytes of each message lie: both ends count, and nobody asks
    streams   the operations on streams, and words of memory that streams wait for
    exchange  an exchange of parcels through lanes
    sharing   the memory that the ranks of a group share, and the trial of it
    group     which groups can do that
    crossed   two groups that cross in a rank
    watch     a peer that does not answer within the time-out

`CP_FAST_MESSAGES` says who carries: "auto" takes peers' memory where it can be had, "peers" insists on it, "group"
takes what the process group has (NCCL). It must be the same on all ranks. `make_plan` makes the choice, for the plan.
Whatever it is, the group's own messages carry what is captured in a CUDA graph (a replay would wait for numbers that
are long past), what does not fit into a lane, a call without a plan, and a schedule of the user's own (whose two ends
may cut their messages into steps differently).
"""

from __future__ import annotations

from cp_fast.peers.group import VARIABLE, Messages, carried_by, carries, messages_for, why_not

__all__ = ["VARIABLE", "Messages", "carried_by", "carries", "messages_for", "why_not"]
