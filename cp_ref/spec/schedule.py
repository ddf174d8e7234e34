"""A schedule as data: for every rank, step by step, what it sends, what it receives and which tiles it computes.

What a step means
    1. at its start the rank posts all its sends and receives; a send carries what the rank has at that moment,
    2. it computes its tiles with the operands that it has at that moment,
    3. the step ends when its tiles are done and its messages have arrived: they can be used from the next step on.

So the messages of a step travel while its tiles are computed, and a schedule shows what hides behind what.

What travels, by name
    operands, copied to the receiver:    q     query rows                    kv    key and value rows
                                         do    rows of the output's gradient, with the final lse and delta
    results, handed over and added up:   out   partial output rows with their lse (the receiver merges them by lse)
                                         dq    gradient of query rows        dkv   gradient of key and value rows

A tile of the forward pass needs q and kv and adds to out; a tile of the backward pass needs q, kv and do, and adds to
dq and dkv.

The text form, one line each, reads back to an equal schedule:

    schedule p2p cp_size 2 saved -
    forward rank 0
      step
        send kv 0[0:2] 0[6:8] to 1 tag 0
        recv kv 0[2:6] from 1 tag 0
        tile 0 q[0:2] kv[0:2]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cp_ref.spec.mask import Rect

__all__ = ["OPERANDS", "RESULTS", "Message", "Piece", "Schedule", "Step", "Tile", "tag"]

OPERANDS = ("kv", "q", "do")
RESULTS = ("out", "dq", "dkv")
KINDS = OPERANDS + RESULTS

Heads = tuple[int, int]


def tag(step: int, what: str) -> int:
    """The tag of a step's messages of one kind.

    >>> tag(0, "kv"), tag(1, "kv")
    (0, 6)
    """
    return step * len(KINDS) + KINDS.index(what)


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions [start, stop) of one sequence, for heads [heads[0], heads[1]), or None for all heads.

    Heads count query heads in q, do, out and dq, and kv heads in kv and dkv.
    """

    seq: int
    start: int
    stop: int
    heads: Heads | None = None

    def __str__(self) -> str:
        return f"{self.seq}[{self.start}:{self.stop}]{_heads_text(self.heads)}"


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces of one kind to, or from, one peer. A send and its receive are equal but for the peer."""

    what: str
    pieces: tuple[Piece, ...]
    peer: int
    tag: int

    def text(self, verb: str) -> str:
        """`verb` is "send" or "recv"."""
        pieces = " ".join(map(str, self.pieces))
        return f"{verb} {self.what} {pieces} {'to' if verb == 'send' else 'from'} {self.peer} tag {self.tag}"


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of one sequence's score matrix, for the query heads `heads` (None for all). The mask is the
    problem's.
    """

    seq: int
    rect: Rect
    heads: Heads | None = None

    def __str__(self) -> str:
        r = self.rect
        return f"tile {self.seq}{_heads_text(self.heads)} q[{r.q0}:{r.q1}] kv[{r.k0}:{r.k1}]"


@dataclass(frozen=True, slots=True)
class Step:
    """Messages posted together, and the tiles that are computed meanwhile."""

    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()
    tiles: tuple[Tile, ...] = ()

    def lines(self) -> Iterator[str]:
        """The step's lines, without indentation."""
        yield from (m.text("send") for m in self.sends)
        yield from (m.text("recv") for m in self.recvs)
        yield from map(str, self.tiles)


Program = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Both passes of every rank: `forward[rank][step]`, `backward[rank][step]`.

    `saved` names the operands that a rank keeps after the forward pass, received ones included, and has again at the
    start of the backward pass; otherwise it starts the backward pass with what it owns.
    """

    name: str
    forward: tuple[Program, ...]
    backward: tuple[Program, ...]
    saved: tuple[str, ...] = ()

    @property
    def cp_size(self) -> int:
        """How many ranks it is for."""
        return len(self.forward)

    def __str__(self) -> str:
        lines = [f"schedule {self.name} cp_size {self.cp_size} saved {','.join(self.saved) or '-'}"]
        for direction, programs in (("forward", self.forward), ("backward", self.backward)):
            for rank, program in enumerate(programs):
                lines.append(f"{direction} rank {rank}")
                for step in program:
                    lines.append("  step")
                    lines += [f"    {line}" for line in step.lines()]
        return "\n".join(lines) + "\n"

    @staticmethod
    def parse(text: str) -> Schedule:
        """The schedule that `str` printed. Raises ValueError naming the first line that is not understood."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        head = re.fullmatch(r"schedule (\S+) cp_size (\d+) saved (\S+)", lines[0] if lines else "")
        if head is None:
            raise ValueError("a schedule begins with 'schedule NAME cp_size N saved KINDS'")
        cp_size = int(head[2])
        programs: dict[str, list[list[Step]]] = {d: [[] for _ in range(cp_size)] for d in ("forward", "backward")}
        program: list[Step] | None = None
        for line in lines[1:]:
            if found := re.fullmatch(r"(forward|backward) rank (\d+)", line):
                if int(found[2]) >= cp_size:
                    raise ValueError(f"{line!r}: cp_size is {cp_size}")
                program = programs[found[1]][int(found[2])]
            elif program is None:
                raise ValueError(f"{line!r} stands before any 'forward rank R'")
            elif line == "step":
                program.append(Step())
            elif program:
                program[-1] = _with_line(program[-1], line)
            else:
                raise ValueError(f"{line!r} stands before any 'step'")
        forward, backward = (tuple(map(tuple, programs[d])) for d in ("forward", "backward"))
        return Schedule(head[1], forward, backward, () if head[3] == "-" else tuple(head[3].split(",")))


_HEADS = r"(?:h(\d+):(\d+))?"
_PIECE = re.compile(rf"(\d+)\[(\d+):(\d+)\]{_HEADS}")
_MESSAGE = re.compile(r"(send|recv) (\S+) (.*?) ?(?:to|from) (\d+) tag (\d+)")
_TILE = re.compile(rf"tile (\d+){_HEADS} q\[(\d+):(\d+)\] kv\[(\d+):(\d+)\]")


def _heads_text(heads: Heads | None) -> str:
    return "" if heads is None else f"h{heads[0]}:{heads[1]}"


def _heads(first: str | None, last: str | None) -> Heads | None:
    return None if first is None or last is None else (int(first), int(last))


def _with_line(step: Step, line: str) -> Step:
    if found := _TILE.fullmatch(line):
        rect = Rect(*(int(found[n]) for n in (4, 5, 6, 7)))
        return Step(step.sends, step.recvs, (*step.tiles, Tile(int(found[1]), rect, _heads(found[2], found[3]))))
    if found := _MESSAGE.fullmatch(line):
        words = [_PIECE.fullmatch(word) for word in found[3].split()]
        if found[2] in OPERANDS + RESULTS and all(words):
            pieces = tuple(Piece(int(w[1]), int(w[2]), int(w[3]), _heads(w[4], w[5])) for w in words if w)
            message = Message(found[2], pieces, int(found[4]), int(found[5]))
            if found[1] == "send":
                return Step((*step.sends, message), step.recvs, step.tiles)
            return Step(step.sends, (*step.recvs, message), step.tiles)
    raise ValueError(f"{line!r} is no line of a schedule")
