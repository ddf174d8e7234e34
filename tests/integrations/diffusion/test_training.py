"""Training of diffusers' transformers over ranks: adapters, checkpointing, wrappers, compiled blocks, whole steps."""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cp_fast
from cp_fast.integrations import diffusers as ours
from cp_ref import SimGroup
from tests.dist.workers import Processes
from tests.integrations.diffusion.families import (
    FAMILIES,
    Batch,
    Found,
    alone,
    batch_of,
    check,
    flux,
    grads_of,
    loss_of,
    outputs,
    tiny,
)
from tests.meta.step.step_processes import StepProcesses

diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[test-integrations]'")

QUICK = ("wan", "flux", "minimax_h3")


def adapted(model: Any) -> nn.Module:
    peft = pytest.importorskip("peft", reason="needs peft: pip install '.[test-integrations]'")
    torch.manual_seed(3)
    return peft.get_peft_model(model, lora(peft))


def with_adapter(model: Any) -> nn.Module:
    peft = pytest.importorskip("peft", reason="needs peft: pip install '.[test-integrations]'")
    torch.manual_seed(3)
    model.add_adapter(lora(peft))
    return model


def lora(peft: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)


def checkpointed(model: Any) -> nn.Module:
    model.train()
    model.enable_gradient_checkpointing()
    return model


def all_changes(model: Any) -> nn.Module:
    return copy.deepcopy(checkpointed(with_adapter(model)))


CHANGES = {"PeftModel": adapted, "adapter": with_adapter, "checkpointing": checkpointed, "copied": copy.deepcopy}
CHANGES |= {"all": all_changes}


def changed(change: str, family: str, batches: list[Batch], member: Any = None) -> Found:
    """A model that is changed in one of these ways, of one process or over ranks."""
    model, size = tiny(family), 1
    if member is not None:
        cp = cp_fast.ContextParallel(member)
        model, size = ours.use(model, cp), cp.size
    model = CHANGES[change](model)
    outs = [out for batch in batches for out in outputs(model, batch)]
    (loss_of(outs) / size).backward()
    return [out.detach() for out in outs], grads_of(model)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *((family, change) for family in QUICK for change in CHANGES if change != "all"),
        *(pytest.param(family, "all", marks=pytest.mark.thorough) for family in FAMILIES if family not in QUICK),
    ],
)
@pytest.mark.one_in(5)
def test_a_changed_model(family: str, change: str) -> None:
    """Of Flux also two calls before one backward pass, whose slices have the same rows and other tokens."""
    batches = [batch_of(family), flux(1, 12, 6)] if family == "flux" else [batch_of(family)]
    found = SimGroup(2).run(lambda member: changed(change, family, batches, member))
    check(found, changed(change, family, batches))


def adapters_before(member: Any) -> Found:
    cp = cp_fast.ContextParallel(member)
    model = ours.use(adapted(tiny("wan")), cp)
    outs = outputs(model, batch_of("wan"))
    (loss_of(outs) / cp.size).backward()
    return [out.detach() for out in outs], grads_of(model)


def test_adapters_that_came_before() -> None:
    check(SimGroup(2).run(adapters_before), changed("PeftModel", "wan", [batch_of("wan")]))


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_compiled_blocks(family: str) -> None:
    def compiled(member: Any) -> Found:
        cp = cp_fast.ContextParallel(member)
        model = ours.use(tiny(family), cp)
        model.compile_repeated_blocks(backend="aot_eager")
        outs = outputs(model, batch_of(family))
        (loss_of(outs) / cp.size).backward()
        return [out.detach() for out in outs], grads_of(model)

    torch.compiler.reset()
    check(SimGroup(2).run(compiled), alone(family))


# ---- processes


def wrapped(family: str, kind: str) -> Found:
    """A rank's outputs in a wrapper, and gradients, whose sum over ranks is that of one process."""
    cp = cp_fast.ContextParallel(dist.group.WORLD)
    model: Any = ours.use(tiny(family), cp)
    outer: Any = model
    if kind == "DDP":
        outer = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        mesh = init_device_mesh("cpu", (cp.size,))
        for name, module in model.named_modules():
            if type(module).__name__.endswith("Block"):
                fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)
        if kind == "FSDP, checkpointing":
            model.train()
            model.enable_gradient_checkpointing()
    outs = [out for _ in range(2) for out in outputs(outer, batch_of(family))]
    loss_of(outs[: len(outs) // 2]).backward()  # averaged over the ranks by the wrapper
    grads = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads_of(model).items()}
    return [out.detach() for out in outs[: len(outs) // 2]], {n: g / cp.size for n, g in grads.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "FSDP, checkpointing") for family in ("wan", "flux", "qwen_image", "ltx2", "minimax_h3")),
        *((family, "DDP") for family in ("flux", "ltx2")),
        ("wan", "FSDP"),
    ],
)
def test_wrappers(two: Processes, family: str, kind: str) -> None:
    check(two.run(wrapped, family, kind), alone(family))


def step_of(cp: Any, family: str) -> Any:
    """A model and its step, for `compare_step`."""
    model = tiny(family)
    if cp is not None:
        ours.use(model, cp)

    def step(batch: Batch) -> torch.Tensor:
        loss = loss_of(outputs(model, batch))
        (loss if cp is None else loss / cp.size).backward()
        for weight in model.parameters() if cp is not None else []:
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
        return loss.detach()

    return model, step, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("family", [*QUICK, "ltx2", "cosmos3"])
def test_a_step_is_that_of_one_process(steps: StepProcesses, family: str) -> None:
    report = steps.compare(partial(step_of, family=family), partial(batch_of, family), 2)
    assert report.right, str(report)


def of_config(family: str, ring: int, ulysses: int) -> Found:
    """With the configuration that diffusers' own `enable_parallelism` takes."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config = diffusers.ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh)
    model = ours.use(tiny(family), config)
    outs = outputs(model, batch_of(family))
    (loss_of(outs) / (ring * ulysses)).backward()
    return [out.detach() for out in outs], grads_of(model)


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
def test_the_configuration_of_diffusers(two: Processes, degrees: tuple[int, int]) -> None:
    check(two.run(of_config, "wan", *degrees), alone("wan"))


@pytest.mark.thorough
def test_both_degrees(four: Processes) -> None:
    check(four.run(of_config, "wan", 2, 2), alone("wan"))


def test_a_configuration_of_less_precision() -> None:
    config = diffusers.ContextParallelConfig(ring_degree=2, convert_to_fp32=False)
    with pytest.raises(ValueError, match="convert_to_fp32 is False"):
        ours.use(tiny("wan"), config)
