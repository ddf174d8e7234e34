"""Megatron's recomputation around our core attention: what the selected modules say is what runs twice.

It saves the states of CUDA's random numbers; on a CPU, and without dropout, there are none to save.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.dist.workers import Processes

pytestmark = pytest.mark.thorough

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install '.[test-integrations]'")

from tests.integrations.frameworks.test_megatron import layer_of, run  # noqa: E402  (a module that is skipped without Megatron)

MODULES = {"none": [], "without attention": ["mlp"], "attention": ["core_attn"]}


def steps() -> dict[str, tuple[int, list[torch.Tensor]]]:
    """How often attention ran forward on this rank, the output and the gradients: for each choice of modules."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import random

    from cp_fast.api import attention as api
    from cp_fast.integrations.megatron import CoreAttention

    states: Any = random
    states._get_all_rng_states, states._set_all_rng_states = lambda: (), lambda *_: None
    states._fork_rng = nullcontext
    forwards, inner = [], api.forward_pass

    def counted(*given: Any, **how: Any) -> Any:
        forwards.append(1)
        return inner(*given, **how)

    api.forward_pass = counted
    found = {}
    for name, modules in MODULES.items():
        forwards.clear()
        more: dict[str, Any] = {
            "add_bias_linear": False
        }  # A bias that a checkpoint returns becomes its own gradient's.
        if modules:
            more |= {"recompute_granularity": "selective", "recompute_modules": modules}
        layer = layer_of("p2p", dist.get_world_size(), CoreAttention, **more).train()
        x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
        y = run(layer, x.requires_grad_(), None)
        y.square().sum().backward()
        tensors = [y.detach(), x.grad, *(weight.grad for weight in layer.parameters())]
        found[name] = (len(forwards), [one for one in tensors if one is not None])
    api.forward_pass = inner
    return found


def test_recomputing_what_is_not_attention_runs_attention_once(four: Processes) -> None:
    for found in four.run(steps):
        _, expected = found["none"]
        assert {name: count for name, (count, _) in found.items()} == {
            "none": 1,
            "without attention": 1,
            "attention": 2,
        }
        for _, tensors in found.values():
            assert len(tensors) == len(expected)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, expected, strict=True))
