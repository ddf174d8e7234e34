"""Which rank is lost. A rank may wait for a neighbour that also waits, so the ranks tell each other by the job's store.

A rank whose messages do not come through writes down the peer that it misses. It then follows the others' entries: this
peer may miss another one, and so on. A missed rank without an entry does not answer.

    rank 2 is lost      rank 3 misses 2         rank 0 misses 3, which misses 2        all name rank 2
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

__all__ = ["follow", "silent_rank"]

_GRACE = 3.0  # Seconds in which a peer can write that it also waits.
_FRESH = 3600.0  # Seconds after which an entry belongs to an earlier failure.


def silent_rank(here: int, missing: int) -> int | None:
    """The silent rank that kept a peer from answering this one. None if it cannot be found: the store is gone too, or
    every rank answers.

    Args:
        here, missing: this rank and the peer, by their numbers in the job.
    """
    found: list[int | None] = []

    def ask() -> None:
        with suppress(Exception):  # Any error of the store: there is an error to report already.
            found.append(follow(_job_store(), here, missing, _GRACE))

    asks = threading.Thread(target=ask, daemon=True)  # A store whose process is stopped never answers.
    asks.start()
    asks.join(2 * _GRACE)
    return found[0] if found else None


def _job_store() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    return PrefixStore("cp_attention/missing", store.clone() if hasattr(store, "clone") else store)


def follow(store: Any, here: int, missing: int, grace: float) -> int | None:
    """Write down that this rank misses a peer. Then follow the others' entries to a rank that has written nothing for
    `grace` seconds, and return it. None if every rank has written.

    >>> store = dist.HashStore()
    >>> follow(store, 3, 2, 0), follow(store, 0, 3, 0), follow(store, 2, 0, 0)
    (2, 2, None)
    """
    store.set(str(here), json.dumps([time.time(), missing]))
    until = time.monotonic() + grace
    while True:
        at, seen = missing, {here}
        while at not in seen:
            seen.add(at)
            if (then := _missed_by(store, at)) is None:
                break
            at = then
        else:
            return None
        if time.monotonic() >= until:
            return at
        time.sleep(0.05)


def _missed_by(store: Any, rank: int) -> int | None:
    """The peer that a rank misses, by its entry."""
    if not store.check([str(rank)]):
        return None
    at, missing = json.loads(store.get(str(rank)))
    return int(missing) if time.time() - at < _FRESH else None
