"""The messages of a simulated group: their content at the time of posting, and their delivery."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_ref.spec import Parcel

__all__ = ["MessageError", "PostedMessage", "deliver", "poison", "recorded_event", "same"]


class MessageError(RuntimeError):
    """Messages that do not fit: another tag, shape or dtype, a send buffer that changed too early, one nobody took."""


@dataclass
class PostedMessage:
    """A message under way, with its content at the time of posting."""

    tag: int
    original: torch.Tensor
    content: torch.Tensor
    ready: torch.cuda.Event | None


def deliver(message: PostedMessage, parcel: Parcel, rank: int) -> None:
    """Copy a message into `rank`'s buffer; MessageError where tag, shape or dtype differ."""
    where = f"rank {rank}: the next message from rank {parcel.peer}"
    if message.tag != parcel.tag:
        raise MessageError(f"{where} has tag {message.tag}, but tag {parcel.tag} is expected")
    content, buffer = message.content, parcel.tensor
    if (content.shape, content.dtype) != (buffer.shape, buffer.dtype):
        raise MessageError(
            f"{where} (tag {message.tag}) is {content.dtype} {list(content.shape)}, "
            f"the buffer {buffer.dtype} {list(buffer.shape)}"
        )
    if message.ready is not None:
        torch.cuda.current_stream(content.device).wait_event(message.ready)
    with torch.no_grad():
        buffer.copy_(content)


def poison(buffer: torch.Tensor) -> None:
    """Fill a receive buffer with values that must not be read: NaN, or the lowest integer."""
    with torch.no_grad():
        if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
            buffer.fill_(float("nan"))
        elif buffer.dtype != torch.bool:
            buffer.fill_(torch.iinfo(buffer.dtype).min)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise, NaN included."""
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A copy with plain strides: `contiguous` keeps odd ones where a size is 1."""
    return x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def recorded_event(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """An event recorded where the content was cloned, for a receiver on another stream."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
