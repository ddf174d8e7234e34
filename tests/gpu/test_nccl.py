"""cp_fast with processes on GPUs, over NCCL and through peer memory: the simulated group's bits; lost ranks.

On a machine with one GPU two ranks share it.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu import lost_ranks, over_processes

GPUS = torch.cuda.device_count()
RANKS = max(GPUS, 2)
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


def test_processes_give_what_the_simulated_group_gives() -> None:
    """One play in eleven, so that each schedule, layout and mask comes, all graphs and all layers; the command
    `over_processes` plays all.
    """
    every = over_processes.plays(RANKS, "cuda")
    todo = [play for n, play in enumerate(every) if n % 11 == 0 or play.way == "graph" or play.layer]
    found = over_processes.run(todo, "cuda", 150.0)
    assert found["counts"]["right"] + found["counts"]["refused"] == len(todo), found
    assert all(", updated, " in case["case"] for case in found["cases"] if case["verdict"] == "refused"), found
    assert found["exit codes"] == [0] * RANKS


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_killed_rank_is_named_in_time_and_no_number_comes_out() -> None:
    (found,) = lost_ranks.play([lost_ranks.Case("peer_memory", "SIGKILL", "forward", 2, "cuda", 8.0)])
    (survivor,) = found["survivors"]
    assert found["verdict"] == "right", found
    assert any(
        "forward, step 0 of 2: global rank 0: messages with global rank 1 did not" in x for x in survivor["words"]
    )
    assert 7 < survivor["seconds"] < 30, found
