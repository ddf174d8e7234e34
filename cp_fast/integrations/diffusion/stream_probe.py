"""Run a model a few times on slices of a call's own tokens, with attention that passes each token on alone, and find
out what each attention is made of. Nothing is sent, and no gradients are kept.

Streams are spoilt with NaN where they are cut, one after the other. The rows of queries and keys that are NaN then are
those of this stream: so it is seen which streams a layer joins, in which order, and which keys every rank has whole. If
the first token alone is spoilt, no other row may be NaN before attention: nothing else mixes tokens. At last the same
tokens are computed in a slice and in a window of twice its length. Where positions are counted from the slice's
beginning, or something depends on its length, their queries and keys differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from cp_fast.integrations.diffusion.cut_points import Cut, is_stream
from cp_fast.integrations.diffusion.joint_attention import Seen, lengths
from cp_fast.integrations.diffusion.token_cuts import SlicedCall, inside

__all__ = ["Learned", "Probe", "learn"]

Local = Callable[..., torch.Tensor]
_ALL = "*"


@dataclass
class Learned:
    """A kind of call, as the runs have seen it.

    Attributes:
        attention: by the layer's name, with "*" for numbers, what each of its calls of attention is made of.
        gathers: by the module's name, the stream that it gives back.
    """

    attention: dict[str, list[Seen]] = field(default_factory=dict)
    gathers: dict[str, str] = field(default_factory=dict)


@dataclass
class Looked:
    """One attention of one run, or a place where a stream becomes whole (no keys).

    rows: which rows of queries (or of the stream) and of keys are spoilt. prints: a number for each row, of queries,
    keys and values.
    """

    where: str
    rows: tuple[torch.Tensor, torch.Tensor | None]
    prints: tuple[torch.Tensor, ...]


@dataclass
class Probe(SlicedCall):
    """A call of one of these runs.

    Attributes:
        spoilt: the stream that is spoilt, "*" for all.
        first: whether only its first row is.
        over: which attentions are over ranks, in the order of their calls; those of unspoilt runs ask for it.
        looked: what was seen.
    """

    spoilt: str = ""
    first: bool = False
    over: list[bool] = field(default_factory=list)
    looked: list[Looked] = field(default_factory=list)

    def cut(self, x: torch.Tensor, row: Cut) -> torch.Tensor:
        mine = super().cut(x, row)
        if mine is x or not is_stream(row) or self.spoilt not in (_ALL, row.of) or not x.is_floating_point():
            return mine
        mine = mine.clone()
        mine.narrow(row.axis, 0, 1 if self.first else mine.shape[row.axis]).fill_(torch.nan)
        return mine

    def attend(self, where: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: Local) -> torch.Tensor:
        """Attend in a run: to all keys that are whole; of others each token has its own value."""
        rows = _spoilt(q), _spoilt(k)
        number = sum(one.rows[1] is not None for one in self.looked)
        self.looked.append(Looked(where, rows, () if self.spoilt else tuple(map(_prints, (q, k, v)))))
        over = bool(rows[1].any()) if self.spoilt else self.over[number]
        if not over:
            return local()
        if q.shape[1] != k.shape[1]:
            return q if q.shape[-1] == v.shape[-1] else q.mean(-1, keepdim=True).expand(*q.shape[:-1], v.shape[-1])
        return v.repeat_interleave(q.shape[2] // k.shape[2], 2) + 0 * q.sum(-1, keepdim=True)

    def whole(self, x: torch.Tensor, axis: int, where: str) -> torch.Tensor:
        rows = x.movedim(axis, 1) if axis else x[None]
        self.looked.append(Looked(where, (_spoilt(rows), None), () if self.spoilt else (_prints(rows),)))
        shape = list(x.shape)
        shape[axis] = max(self.streams.values())  # Of the stream; which one is not known yet.
        found = [n for n in self.streams.values() if self.window.of(n)[1] == x.shape[axis]]
        shape[axis] = found[0] if found else shape[axis]
        return x.new_zeros(shape)


def _spoilt(x: torch.Tensor) -> torch.Tensor:
    """Which rows of [b, rows, ...] have NaN."""
    return x.isnan().flatten(2).any(-1).any(0).cpu()


def _prints(x: torch.Tensor) -> torch.Tensor:
    """A sum of each row of [b, rows, ...] with fixed weights, and how far it may be off: float64 [b, rows, 2]."""
    flat = x.detach().flatten(2).double()
    weights = torch.cos(1.7 * torch.arange(flat.shape[-1], device=x.device, dtype=torch.float64) ** 1.5)
    tolerance = 1e-3 if torch.finfo(x.dtype).bits >= 32 else 1e-1
    return torch.stack([flat @ weights, tolerance * (flat * weights).norm(dim=-1)], -1)


def learn(model: nn.Module, run: Callable[[], Any], call: SlicedCall) -> Learned:
    """Find how a call's attention joins its streams.

    Args:
        run: calls the model with the call's arguments.
        call: of this rank; the streams are found in the runs.

    Raises:
        NotImplementedError: something else than attention mixes tokens, or the model does not run on slices.
    """
    name = type(model).__name__
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return _learn(name, run, call)
    finally:
        for module, mode in modes:
            module.training = mode


def _learn(name: str, run: Callable[[], Any], call: SlicedCall) -> Learned:
    def probe(**how: Any) -> Probe:
        one = Probe(call.cp, replace(call.window, wide=how.pop("wide", False)), **how)
        try:
            with inside(one):
                run()
            one.check()
        except (NotImplementedError, ValueError):
            raise
        except Exception as error:
            slices = ", ".join(f"{one.window.of(n)[1]} of {n} {stream}" for stream, n in one.streams.items())
            raise NotImplementedError(
                f"{name} does not run on {slices} with these arguments: {type(error).__name__}: {error}. An argument "
                "with a row for each token may be missing in its plan"
            ) from error
        return one

    everything = probe(spoilt=_ALL)
    if not everything.streams:
        raise NotImplementedError(f"{name} was called without any of the tokens that its plan cuts")
    over = [_is_over(one) for one in everything.looked if one.rows[1] is not None]
    several = len(everything.streams) > 1
    by_stream = {s: probe(spoilt=s).looked if several else everything.looked for s in everything.streams}
    found = Learned()
    made: list[tuple[Any, Any]] = []
    for n, one in enumerate(everything.looked):
        here = {stream: looked[n] for stream, looked in by_stream.items()}
        queries = _made_of({s: x.rows[0] for s, x in here.items()}, everything)
        keys = None
        if one.rows[1] is None:
            if queries is None or len(queries) != 1:
                raise NotImplementedError(f"{one.where} of {name} gives back what is no slice of one stream")
            found.gathers[one.where] = queries[0]
        else:
            if one.rows[1].any():
                keys = _made_of({s: x.rows[1] for s, x in here.items() if x.rows[1] is not None}, everything)
                if keys is None or queries is None:
                    raise NotImplementedError(
                        f"the attention of {one.where} in {name} has {'keys' if keys is None else 'queries'} that are "
                        "no slices of streams, one after the other: tokens were mixed, or parts of them taken"
                    )
            seen = found.attention.setdefault(one.where, [])
            if Seen(queries, keys) not in seen:
                seen.append(Seen(queries, keys))
            queries = queries if keys else None
        made.append((queries, keys))
    for where, seen in found.attention.items():
        found.attention[where] = _told_apart(f"{where} in {name}", seen)
    _refuse_mixing(name, probe(spoilt=_ALL, first=True), made)
    _refuse_counting(name, probe(over=over), probe(over=over, wide=True), made)
    return found


def _told_apart(where: str, seen: list[Seen]) -> list[Seen]:
    """Find the streams of a layer's calls. Calls with whole keys need to be told from others, by their queries."""
    over = [one for one in seen if one.keys is not None]
    if not over:
        return [Seen(None, None)]
    if any(one.keys is None and (one.queries is None or one.queries in [x.queries for x in over]) for one in seen):
        raise NotImplementedError(f"the attention of {where} has keys that are cut, and at times keys that are whole")
    return seen


def _is_over(one: Looked) -> bool:
    queries, keys = one.rows
    assert keys is not None
    if keys.any() != keys.all():
        raise NotImplementedError(
            f"the attention of {one.where} has keys of tokens that are cut and of tokens that are not; the plan has to "
            "cut both"
        )
    if keys.any() and not queries.all():
        raise NotImplementedError(
            f"the attention of {one.where} has queries that are not cut, and keys that are; the plan has to cut both"
        )
    return bool(keys.all()) and len(keys) > 0


def _made_of(rows: dict[str, torch.Tensor], call: SlicedCall) -> tuple[str, ...] | None:
    """The streams whose slices are these rows, one after the other; None if they are not. rows: which are whose."""
    count = len(next(iter(rows.values())))
    owners = [[stream for stream, mine in rows.items() if mine[row]] for row in range(count)]
    found: list[str] = []
    at = 0
    while at < count:
        if len(owners[at]) != 1:
            return None
        (stream,) = owners[at]
        stop = at + lengths((stream,), call)
        if stop > count or any(owner != [stream] for owner in owners[at:stop]):
            return None
        found.append(stream)
        at = stop
    return tuple(found) or None


def _refuse_mixing(name: str, probe: Probe, made: list[tuple[Any, Any]]) -> None:
    for one, parts in zip(probe.looked, made, strict=True):
        for rows, streams in zip(one.rows, parts, strict=True):
            if rows is None or streams is None:
                continue
            expected, at = torch.zeros(len(rows), dtype=torch.bool), 0
            for stream in streams:
                expected[at] = True
                at += lengths((stream,), probe)
            if not torch.equal(rows, expected):
                raise NotImplementedError(
                    f"{name} mixes tokens without attention before {one.where}; a rank would do so on its slice"
                )


def _refuse_counting(name: str, mine: Probe, wide: Probe, made: list[tuple[Any, Any]]) -> None:
    for here, there, (queries, keys) in zip(mine.looked, wide.looked, made, strict=True):
        for x, y, streams in zip(here.prints, there.prints, (queries, keys, keys), strict=False):
            if streams is None:
                continue
            for stream in streams:
                at, other = 0, 0
                for before in streams[: streams.index(stream)]:
                    at, other = at + lengths((before,), mine), other + lengths((before,), wide)
                start, rows = mine.window.of(mine.streams[stream])
                real = max(0, min(rows, mine.streams[stream] - start))
                other += start - wide.window.of(mine.streams[stream])[0]
                a, b = x[:, at : at + real], y[:, other : other + real]
                if bool(((a - b)[..., 0].abs() > a[..., 1] + 1e-9).any()):
                    raise NotImplementedError(
                        f"{name} gives tokens of {stream} other queries or keys in a slice than in a longer one, at "
                        f"{here.where}: it counts tokens, or takes their positions, from a slice's beginning"
                    )
