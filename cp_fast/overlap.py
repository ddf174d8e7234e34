"""Messages and kernels on one GPU at the same time.

An exchange that was posted runs on a stream of its own, and begins when the current stream has come so far: at the very
moment when the kernel that is launched next may begin too. An attention kernel fills every multiprocessor at once. If
it is first, the messages wait until its last blocks drain, and are not hidden but added (seen with NCCL on H200s: 0.5
to 0.8 ms a step of 3.3). If they are first, it starts on the multiprocessors that they leave, and they are hidden.
"""

from __future__ import annotations

import torch

__all__ = ["head_start"]

_CYCLES = 16_000  # about 9 us on an H200: the exchange's stream needs 2 to 4 to see that it may begin


def head_start(device: torch.device) -> None:
    """Keep the current stream busy on one multiprocessor for a moment, so that what was posted before runs first.

    Nothing on a CPU.
    """
    if device.type == "cuda":
        torch.cuda._sleep(_CYCLES)  # on the stream; the host goes on
