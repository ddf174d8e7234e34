"""Operations on streams: copies, and words of memory that streams write and wait for.

A stream waits until a word has a number or a later one. Waiting costs no multiprocessor: the stream itself waits. These
are calls of the CUDA driver on addresses. PyTorch's equivalents take ten times the host time each (a tensor's view, a
stream's context, an event), and an exchange has a dozen of them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Protocol

import torch

__all__ = ["CudaStreams", "Streams", "why_not_driver"]

_WRITE = 2  # CU_STREAM_MEM_OP_WRITE_VALUE_32
_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: the difference as int32 is not negative, so numbers may wrap around.
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class Streams(Protocol):
    """The operations of an exchange on a device, on two separate streams. The type of a word is that of `signal` and
    `wait` in the implementation; memory is an address.
    """

    filling: Any  # The stream that copies sent bytes into staging buffers.
    pulling: Any  # The stream that copies received bytes from the peers' staging buffers.

    def here(self) -> Any:
        """PyTorch's current stream."""
        ...

    def capturing(self) -> bool:
        """Whether a CUDA graph is captured on the current stream."""
        ...

    def copy(self, stream: Any, to: int, source: int, size: int) -> None:
        """Copy `size` bytes."""
        ...

    def signal(self, stream: Any, *words: tuple[Any, int]) -> None:
        """Write a number to each of these words, of this rank or of a peer, in the order of the stream."""
        ...

    def wait(self, stream: Any, word: Any, number: int) -> None:
        """Let a stream wait until a word of this rank has this number or a later one."""
        ...

    def fork(self, here: Any, *streams: Any) -> None:
        """Let further work of these streams wait for the work on the stream `here` so far."""
        ...

    def meet(self) -> None:
        """Let further work of the pulling stream wait for the work on the filling one so far."""
        ...

    def mark(self) -> None:
        """Mark the current end of the pulling stream's work."""
        ...

    def join(self, here: Any) -> None:
        """Let the stream `here` wait for the last mark."""
        ...


_POINTER, _NUMBER, _ADDRESS = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64
_FUNCTIONS = {  # With their arguments; every GPU since Volta has them with CUDA 12 and later.
    "cuStreamWaitValue32_v2": (_POINTER, _ADDRESS, ctypes.c_uint32, _NUMBER),
    "cuStreamBatchMemOp_v2": (_POINTER, _NUMBER, _POINTER, _NUMBER),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, ctypes.c_size_t, _POINTER),
    "cuEventCreate": (_POINTER, _NUMBER),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuStreamWaitEvent": (_POINTER, _POINTER, _NUMBER),
}


@cache
def _driver() -> Any:
    """The CUDA driver with these functions."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


class _Write(ctypes.Structure):
    """CUstreamBatchMemOpParams of a write: 6 words of 8 bytes, as for any operation."""

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
    """`Streams` of a GPU; words are addresses, streams their handles.

    Three events serve all exchanges: a wait for an event refers to its last record before the wait. The driver reads
    the writes of a signal during the call, so one table serves all signals with the same number of words.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(2)]
        self._index, driver = self._streams[0].device.index, _driver()
        self._copy, self._write, self._wait = (
            driver.cuMemcpyAsync,
            driver.cuStreamBatchMemOp_v2,
            driver.cuStreamWaitValue32_v2,
        )
        self._record, self._wait_event = driver.cuEventRecord, driver.cuStreamWaitEvent
        self._writes: dict[int, Any] = {}
        self._forked, self._filled, self._marked = (self._event() for _ in range(3))
        self.filling, self.pulling = (stream.cuda_stream for stream in self._streams)

    def _event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        _check(_driver().cuEventCreate(ctypes.byref(event), _NO_TIMING))
        return event

    def here(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._index)  # pyright: ignore[reportPrivateUsage]  # a tenth of the time

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def copy(self, stream: int, to: int, source: int, size: int) -> None:
        if code := self._copy(to, source, size, stream):
            _check(code)

    def signal(self, stream: int, *words: tuple[int, int]) -> None:
        count = len(words)
        writes = self._writes.get(count)
        if writes is None:
            writes = self._writes[count] = (_Write * count)(*[(_WRITE,)] * count)
        for write, (word, number) in zip(writes, words, strict=True):
            write.address, write.value = word, number & 0xFFFFFFFF
        if code := self._write(stream, count, writes, 0):
            _check(code)

    def wait(self, stream: int, word: int, number: int) -> None:
        if code := self._wait(stream, word, number & 0xFFFFFFFF, _GEQ):
            _check(code)

    def fork(self, here: int, *streams: int) -> None:
        code = self._record(self._forked, here)
        for stream in streams:
            code = code or self._wait_event(stream, self._forked, 0)
        if code:
            _check(code)

    def meet(self) -> None:
        if code := self._record(self._filled, self.filling) or self._wait_event(self.pulling, self._filled, 0):
            _check(code)

    def mark(self) -> None:
        if code := self._record(self._marked, self.pulling):
            _check(code)

    def join(self, here: int) -> None:
        if code := self._wait_event(here, self._marked, 0):
            _check(code)


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"a CUDA stream operation failed with error {code}")
