"""One process: builds the model, runs the step, and gives back what is compared."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from conformance.adapters.cp_fast_step import context, watched_calls
from conformance.run.process_ranks import own_gpu
from conformance.run.processes import say
from conformance.step.evidence.step_record import Look
from conformance.step.evidence.step_without import without
from conformance.step.jobs import Job, StepError

__all__ = ["plain_name", "run"]

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_ROUNDINGS = 2.0  # by which a weight moves where rounding errors are added, in units of its dtype's eps


def run(job: Job) -> dict[str, Any]:
    """Build, step, and return losses, gradients, parameters and, where asked for, all that was seen on the way."""
    torch.set_num_threads(job.threads)
    local, size, backend = job.rank, job.world or 1, "gloo"
    if job.device.startswith("cuda"):
        local = own_gpu(job.rank, size).index if job.world else int(job.device.partition(":")[2])
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"  # a step may send tensors of either
    os.environ |= {"RANK": str(job.rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size)}
    how: dict[str, Any] = {"init_method": f"file://{job.store}", "rank": job.rank, "world_size": size}
    dist.init_process_group(backend, timeout=timedelta(seconds=job.limit_s), **how)
    try:
        return _found(job)
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _found(job: Job) -> dict[str, Any]:
    cp = _context(job) if job.world else None
    build, batch = _resolved(job.build), _resolved(job.batch)
    say("builds the model")
    with without(job.without):
        built = build(cp)
    model, step, optimizer = _parts(built)
    if callable(batch):
        batch = batch()
    weights = _weights(model)
    if job.noise:
        _add_rounding(weights, job.noise)
    plans: list[Any] = []
    look = Look(model) if job.look else None

    def seen(problem: Any, offset: Any) -> None:
        if not plans or plans[-1] != problem:
            plans.append(problem)
        if look is not None:
            look.call(problem, offset)

    with contextlib.ExitStack() as stack:
        stack.enter_context(watched_calls(seen))
        if job.look or job.without:
            torch.compiler.set_stance("force_eager")
        stack.enter_context(without(job.without))
        if look is not None:
            stack.enter_context(look)
        found = _stepped(job, step, batch, optimizer, weights, look)
    found |= {"plans": plans, "rank": job.rank, "dtype": _dtype(weights), "shared": _shared(model)}
    return found | ({} if look is None else {"look": look.record()})


def _stepped(job: Job, step: Any, batch: Any, optimizer: Any, weights: dict[str, Any], look: Any) -> dict[str, Any]:
    """The step, once, or twice with an optimizer; gradients are those that its first step is given."""
    found: dict[str, Any] = {"losses": [], "tokens": None}
    stepped = 0

    def before(*_: Any) -> None:
        nonlocal stepped
        stepped += 1
        found.setdefault("grads", {name: _whole(w.grad) for name, w in weights.items()})

    hook = optimizer.register_step_pre_hook(before) if optimizer is not None else None
    steps = 1 if optimizer is None or look is not None else 2
    for number in range(steps):
        say(f"step {number + 1} of {steps}")
        torch.manual_seed(number)
        given = step(batch)
        loss, tokens = given if isinstance(given, tuple) else (given, None)
        found["losses"].append(_number(loss))
        if number == 0:
            found["tokens"] = None if tokens is None else [x.detach().cpu() for x in _listed(tokens)]
        found.setdefault("grads", {name: _whole(w.grad) for name, w in weights.items()})
        if look is not None:
            look.close()
        if optimizer is not None and stepped == number:  # the user's step does not step
            optimizer.step()
            optimizer.zero_grad()
    if hook is not None:
        hook.remove()
    say("compares parameters with rank 0's")
    if all(grad is None for grad in found["grads"].values()):
        raise StepError(
            "no parameter has a gradient after step(batch); step runs the backward pass, and leaves gradients where "
            "they are. If it steps and clears them itself, return the optimizer too: (model, step, optimizer)"
        )
    after = {name: _whole(w) for name, w in weights.items()} if optimizer is not None else {}
    for what, values in (("grads", found.pop("grads")), ("params", after)):
        found[what], found[f"unlike_{what}"] = _compared(values)
    return found


def _compared(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """All values on rank 0; on another rank those that differ from rank 0's, and their names."""
    digests = {
        name: None if x is None else crc32(x.reshape(-1).view(torch.uint8).numpy()) for name, x in values.items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digests)
    unlike = [name for name in values if digests[name] != everyone[0].get(name)]
    if dist.get_rank() == 0 or set(values) != set(everyone[0]):
        return values, []
    return {name: values[name] for name in unlike}, unlike


def _context(job: Job) -> Any:
    """This rank's context; the ranks of one are consecutive, as in a mesh [dp, cp]."""
    pair = job.cp_comm_type == "a2a+p2p"
    inner = 2 if pair else job.cp_size
    mine: dict[str, Any] = {}
    for first in range(0, job.world, job.cp_size):
        ranks = list(range(first, first + job.cp_size))
        rows = [ranks[i : i + inner] for i in range(0, job.cp_size, inner)]
        columns = [ranks[i::inner] for i in range(inner)] if pair else []
        for kind, members in [("a2a", row) for row in rows] + [("p2p", column) for column in columns]:
            group = dist.group.WORLD if len(members) == job.world else dist.new_group(members)
            if job.rank in members:
                mine[kind] = group
    return context((mine["a2a"], mine["p2p"]) if pair else mine["a2a"], job.cp_comm_type, job.layout)


def _resolved(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    module, _, name = given.partition(":")
    if not module or not name:
        raise StepError(f"{given!r} is no module:name, such as train:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # of an import in the module
            raise
        raise StepError(f"{given!r}: there is no module {error.name!r} here or on Python's path") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise StepError(f"{given!r}: {module} has no {name!r}")
        found = getattr(found, part)
    return found


def _parts(built: Any) -> tuple[torch.nn.Module, Callable[[Any], Any], Any]:
    given = built if isinstance(built, tuple) else (built,)
    model, step, optimizer = (*given, None, None)[:3]
    if len(given) > 3 or not isinstance(model, torch.nn.Module) or not callable(step):
        kinds = ", ".join(type(part).__name__ for part in given)
        raise StepError(f"build returned {kinds}; it must return (model, step) or (model, step, optimizer)")
    if optimizer is not None and not hasattr(optimizer, "register_step_pre_hook"):
        raise StepError(f"build returned a {type(optimizer).__name__} as optimizer; it must be a torch.optim.Optimizer")
    return model, step, optimizer


def plain_name(name: str) -> str:
    """The name of a module or parameter without what wrappers add.

    >>> plain_name("module._orig_mod.blocks.0._checkpoint_wrapped_module.out.weight")
    'blocks.0.out.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {plain_name(name): weight for name, weight in model.named_parameters()}


def _shared(model: torch.nn.Module) -> list[str]:
    """Parameters that several modules have."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(plain_name(name))
    return [several[0] for several in names.values() if len(several) > 1]


def _dtype(weights: dict[str, torch.Tensor]) -> torch.dtype:
    """The narrowest of the weights' dtypes: that with the largest eps."""
    kinds = {w.dtype for w in weights.values() if w.dtype.is_floating_point}
    return max(kinds, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _add_rounding(weights: dict[str, torch.Tensor], seed: int) -> None:
    """Move every weight up or down by some roundings."""
    with torch.no_grad():
        for number, weight in enumerate(weights.values()):
            local: Any = weight.to_local() if hasattr(weight, "to_local") else weight  # type: ignore[operator]
            if not (local.is_floating_point() or local.is_complex()):
                continue
            chance = torch.Generator(local.device).manual_seed(1000 * seed + number)
            how = {"generator": chance, "device": local.device, "dtype": torch.float64}
            sign = torch.randint(0, 2, local.shape, **how).mul_(2).sub_(1)
            local.mul_(1 + sign * (_ROUNDINGS * torch.finfo(local.dtype).eps))


def _whole(x: Any) -> torch.Tensor | None:
    """A copy on the CPU; of a tensor that is sharded over ranks all of it. Collective then."""
    if x is None:
        return None
    x = x.detach()
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.clone().cpu().contiguous()


def _number(loss: Any) -> float:
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    if isinstance(loss, torch.Tensor) and loss.numel() != 1:
        raise StepError(f"step returned a loss of shape {list(loss.shape)}; it must be one number, or (loss, tokens)")
    if not isinstance(loss, torch.Tensor | float | int):
        raise StepError(f"step returned a {type(loss).__name__}; it must return the loss")
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)


def _listed(tokens: Any) -> list[torch.Tensor]:
    return list(tokens) if isinstance(tokens, list | tuple) else [tokens]
