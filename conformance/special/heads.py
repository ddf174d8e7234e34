"""Special numbers of heads and of ranks, and head dims."""

from __future__ import annotations

from conformance.judge.named_entries import TableEntry, dense
from conformance.special.entry import entry
from cp_ref.schedules.problem import Sequence

__all__ = ["HEADS"]


HEADS: dict[str, TableEntry] = {
    # heads and head dims
    "fewer-kv-heads-than-ranks": entry("2 kv heads on 4 ranks: replicated", 4, dense(16), heads_q=8, heads_kv=2),
    "one-kv-head": entry("multi-query attention on 4 ranks", 4, dense(16), heads_q=4, heads_kv=1),
    "one-query-head-per-rank": entry("8 heads on 8 ranks", 8, dense(16), heads_q=8, heads_kv=8),
    "groups-of-six": entry("12 query heads over 2", 2, dense(8), heads_q=12, heads_kv=2),
    "three-kv-heads": entry("6 query heads over 3, on 3 ranks", 3, dense(12), heads_q=6, heads_kv=3),
    "head-dim-1": entry("d_qk 1, d_v 1", 2, dense(8), d_qk=1, d_v=1),
    "head-dim-odd": entry("d_qk 5, d_v 3", 2, dense(8), d_qk=5, d_v=3),
    "head-dim-192-128": entry("latent attention, grouped", 2, dense(8), d_qk=192, d_v=128),
    "head-dim-128-192": entry("d_v larger than d_qk", 2, dense(8), d_qk=128, d_v=192),
    "head-dim-256": entry("the largest of most kernels", 2, dense(8), d_qk=256, d_v=256),
    "head-dim-264": entry("larger than that of most kernels", 2, dense(8), d_qk=264, d_v=264),
    # groups
    "group-of-one": entry("cp_size 1", 1, dense(8), Sequence(3, 3, 4, 4)),
    "group-of-seven": entry("a prime number of ranks", 7, dense(14), heads_q=7, heads_kv=1),
    "group-of-sixteen": entry(
        "more ranks than any head count here", 16, dense(32), heads_q=16, heads_kv=4, tiers=("logic",)
    ),
    "inner-group-of-one": entry("a2a+p2p that is a ring", 4, dense(16), cp_comm_type="a2a+p2p", a2a_size=1),
    "inner-group-of-all": entry("a2a+p2p that is an a2a", 4, dense(16), cp_comm_type="a2a+p2p", a2a_size=4),
}
