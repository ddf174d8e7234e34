"""Whether the context of this process on its GPU still works.

A device-side assertion, or a launch that reads where nothing is, ends a process's context on its GPU: every later call
fails with the same error, whoever makes it. So a problem that did that is judged, and its process is not used again.
"""

from __future__ import annotations

import torch

__all__ = ["ASSERTED", "context_error"]

ASSERTED = "device-side assert"  # in the error of what a kernel asserted


def context_error(device: str) -> str:
    """The error that ended this process's context on the GPU; empty while it works, and on a CPU. Waits for the GPU.

    >>> context_error("cpu")
    ''
    """
    if not device.startswith("cuda"):
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as error:  # torch.AcceleratorError, RuntimeError: by release
        return str(error).partition("\n")[0] or type(error).__name__
    return ""
