"""`save_attention` in Transformers, with FSDP2 and without, over processes."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import cp_fast
from cp_fast.api import autograd_function as autograd
from cp_fast.api import library_operators as compiled
from cp_fast.checkpoint import save_attention
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.loss import loss_for_backward
from tests.dist.workers import Processes
from tests.integrations.hugging_face.families import batch_of, tiny

pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
NAME = "LlamaForCausalLM"
WAYS = ("none", "plain", "saved", "offloaded")


def step(way: str, sharded: bool) -> tuple[int, torch.Tensor, dict[str, torch.Tensor]]:
    """How often attention ran forward on this rank in one step; the loss; the gradients."""
    forwards, inner = [], autograd.forward_pass

    def counted(*given: Any, **how: Any) -> Any:
        forwards.append(1)
        return inner(*given, **how)

    cp = cp_fast.ContextParallel(dist.group.WORLD)
    model: Any = ours.prepare(tiny(NAME), cp).train()
    if way != "none":
        contexts = {} if way == "plain" else {"context_fn": save_attention(offload=way == "offloaded")}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **contexts})
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    autograd.forward_pass = compiled.forward_pass = counted
    try:
        loss = model(**ours.shard_batch(batch_of(NAME), cp=cp, model=model)).loss
        loss_for_backward(loss, averaged_over=model if sharded else None).backward()
    finally:
        autograd.forward_pass = compiled.forward_pass = inner
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
    return len(forwards), loss.detach(), whole


def layers() -> int:
    """The model's layers."""
    return tiny(NAME).config.num_hidden_layers


def steps(sharded: bool) -> dict[str, tuple[int, torch.Tensor, dict[str, torch.Tensor]]]:
    """A step of each way, in this process."""
    return {way: step(way, sharded) for way in WAYS}


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_model_of_transformers_computes_attention_once_a_layer(two: Processes, sharded: bool) -> None:
    for found in two.run(steps, sharded):
        count, loss, grads = found["none"]
        assert count == layers()
        assert found["plain"][0] == 2 * count
        for way in ("saved", "offloaded"):
            assert found[way][0] == count
            assert torch.equal(found[way][1], loss)
            assert grads.keys() == found[way][2].keys()
            assert all(torch.equal(found[way][2][name], grad) for name, grad in grads.items())
