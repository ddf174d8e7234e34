"""Operations on streams: copies, and words of memory that streams write and wait for.

A word is waited for until it is a number or a later one. Waiting costs no multiprocessor: the stream itself waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch

__all__ = ["CudaStreams", "Streams", "why_not_driver"]

_WRITE = 2  # CU_STREAM_MEM_OP_WRITE_VALUE_32
_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: the difference as int32 is not negative, so that numbers may wrap around


class Streams(Protocol):
    """What an exchange does on a device. A word is whatever `signal` and `wait` of the implementation take."""

    def capturing(self) -> bool:
        """Whether a CUDA graph is captured on the current stream."""
        ...

    def signal(self, *words: tuple[Any, int]) -> None:
        """Write a number to each of these words, of this rank or of a peer, when the current stream has come so far."""
        ...

    def wait(self, word: Any, number: int) -> None:
        """Let the current stream wait until a word of this rank is this number, or one after it."""
        ...

    def aside(self) -> AbstractContextManager[Any]:
        """A block whose operations go to the stream aside; it begins when the current stream has come here."""
        ...

    def mark(self) -> Any:
        """A point of the current stream."""
        ...

    def join(self, mark: Any) -> None:
        """Let the current stream wait for a point of another one."""
        ...


@cache
def _driver() -> tuple[Callable[..., int], Callable[..., int]]:
    """cuStreamWaitValue32 and cuStreamBatchMemOp of CUDA 12 and later, which every GPU since Volta has."""
    library = ctypes.CDLL("libcuda.so.1")
    wait, batch = library.cuStreamWaitValue32_v2, library.cuStreamBatchMemOp_v2
    wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    batch.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    wait.restype = batch.restype = ctypes.c_int
    return wait, batch


class _Write(ctypes.Structure):
    """CUstreamBatchMemOpParams of a write: 6 words of 8 bytes, whatever the operation."""

    _fields_ = (
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


def why_not_driver() -> str | None:
    """Why streams cannot wait for words here; None if they can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    try:
        _driver()
    except (OSError, AttributeError) as error:
        return f"the CUDA driver has no stream operations on memory: {error}"
    return None


class CudaStreams:
    """`Streams` of a GPU; words are addresses."""

    def __init__(self, device: torch.device) -> None:
        self._aside = torch.cuda.Stream(device, priority=-1)
        self._wait, self._batch = _driver()

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def signal(self, *words: tuple[int, int]) -> None:
        writes = (_Write * len(words))(*((_WRITE, word, number & 0xFFFFFFFF, 0, 0, 0) for word, number in words))
        _check(self._batch(torch.cuda.current_stream().cuda_stream, len(words), writes, 0))

    def wait(self, word: int, number: int) -> None:
        _check(self._wait(torch.cuda.current_stream().cuda_stream, word, number & 0xFFFFFFFF, _GEQ))

    def aside(self) -> AbstractContextManager[Any]:
        self._aside.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._aside)

    def mark(self) -> Any:
        return torch.cuda.current_stream().record_event()

    def join(self, mark: Any) -> None:
        torch.cuda.current_stream().wait_event(mark)


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"a CUDA stream operation on memory failed with error {code}")
