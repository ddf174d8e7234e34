"""One process: builds the model, runs the step, and gives back what is compared."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from conformance.adapters.cp_fast_step import context, watched_calls
from conformance.runner.processes import own_gpu, say
from conformance.step.judge import Rounded, narrowest
from conformance.step.step_record import Job, Look, StepError, without

__all__ = ["found_of", "plain_names", "run"]

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_MOST_STEPS = 8  # of which those that a GradScaler skips are no optimizer steps


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
        return found_of(job)
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def found_of(job: Job) -> dict[str, Any]:
    """`run` in a process whose group is there."""
    cp = _context(job) if job.world else None
    build, batch = _resolved(job.build), _resolved(job.batch)
    say("builds the model")
    with without(job.without):
        built = build(cp)
    model, step, optimizer = _parts(built)
    weights = _weights(model)
    rounded = Rounded(weights, job.noise, job.dtype) if job.noise else None
    plans: list[Any] = []
    look = Look(model, plain_names(model)) if job.look else None

    def seen(problem: Any, offset: Any, what: str) -> None:
        if not plans or plans[-1] != problem:
            plans.append(problem)
        if look is not None:
            look.call(problem, offset, what)

    with contextlib.ExitStack() as stack:
        stack.enter_context(watched_calls(seen))
        if job.look or job.without:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(without(job.without))
        if rounded is not None:
            rounded.move_weights()
            stack.enter_context(rounded)
        if look is not None:
            stack.enter_context(look)
        found = _stepped(step, _Copies(batch), optimizer, model, weights, look, rounded)
    found |= {"plans": plans, "rank": job.rank, "shared": _shared(model)}
    found["dtype"] = narrowest({w.dtype for w in weights.values()}.union(*(rounded.dtypes if rounded else ())))
    return found | ({} if look is None else {"look": look.record()})


class _Copies:
    """The batch, a copy for each step: a step may pop from its batch, or change it in place."""

    def __init__(self, batch: Any) -> None:
        self._given, self._first = batch, batch() if callable(batch) else batch

    def __call__(self) -> Any:
        try:
            return copy.deepcopy(self._first)
        except Exception as error:  # whatever a class of the user's raises
            if callable(self._given):
                return self._given()
            said = f"batch, a {type(self._first).__name__}, cannot be copied for each step ({error})"
            raise StepError(f"{said}; give a function that makes it") from None


def _stepped(
    step: Any,
    batch: Callable[[], Any],
    optimizer: Any,
    model: Any,
    weights: dict[str, Any],
    look: Any,
    rounded: Rounded | None,
) -> dict[str, Any]:
    """Steps until the optimizer has stepped twice, or once without an optimizer or with a look at it.

    It keeps the gradients that the optimizer is given first. If it does not step, it keeps those at the end.
    """
    found: dict[str, Any] = {"losses": [], "tokens": None, "skipped": []}
    before = _buffers(model)
    wanted = 1 if optimizer is None or look is not None else 2
    with _Watched(optimizer, weights, rounded) as watched:
        for number in range(_MOST_STEPS):
            say(f"step {number + 1} of {wanted + len(found['skipped'])}")
            _seed(number)
            watched.begin()
            if look is not None:
                look.begin()
            given = step(batch())
            loss, tokens = given if isinstance(given, tuple) else (given, None)
            found["losses"].append(_number(loss))
            if tokens is not None and (found["tokens"] is None or found["skipped"] == list(range(number))):
                found["tokens"] = [x.detach().cpu() for x in _listed(tokens)]
            skipped = watched.end()
            found["skipped"] += [number] * skipped
            if optimizer is not None and not watched.steps and not skipped:  # the user's step does not step
                optimizer.step()
                optimizer.zero_grad()
            if _anywhere(number + 1 - len(found["skipped"])) >= wanted:
                break
            if _anywhere(not skipped and not watched.finite(found["losses"][-1])):
                break  # what follows would be computed from NaN
    if look is not None:
        look.close()
    say("compares parameters with rank 0's")
    grads = watched.grads or watched.left
    if all(grad is None for grad in grads.values()):
        raise StepError(
            "no parameter has a gradient after step(batch). step runs the backward pass, and leaves gradients where "
            "they are; or it clears them by zero_grad() of the model or of an optimizer of torch.optim"
        )
    after = {name: _whole(w) for name, w in weights.items()} if optimizer is not None else {}
    buffers = _buffers(model)
    found["changed"] = [name for name, x in buffers.items() if not _same(x, before.get(name))]
    for what, values in (("grads", grads), ("params", after), ("buffers", buffers)):
        found[what], found[f"unlike_{what}"] = _compared(values)
    return found


class _Watched:
    """Watches a step's gradients, as a context: the optimizer steps, a scaler skips a step, somebody clears them.

    Attributes:
        steps: of the optimizer in this step. grads: by name, on the CPU; None as long as there are none. left: those of
            the last step that was skipped.
    """

    def __init__(self, optimizer: Any, weights: dict[str, torch.Tensor], rounded: Rounded | None) -> None:
        self._optimizer, self._weights, self._rounded = optimizer, weights, rounded
        self._ids = {id(weight) for weight in weights.values()}
        self._stack = contextlib.ExitStack()
        self._cleared: dict[str, Any] | None = None
        self._skips, self.steps, self._moved = 0, 0, False
        self.grads: dict[str, Any] | None = None
        self.left: dict[str, Any] = {}

    def __enter__(self) -> _Watched:
        if self._optimizer is None:
            hook = register_optimizer_step_pre_hook(self._before)
        else:
            hook = self._optimizer.register_step_pre_hook(self._before)
        self._stack.callback(hook.remove)
        for owner in (Optimizer, torch.nn.Module):
            self._stack.enter_context(patch.object(owner, "zero_grad", self._clears(owner.zero_grad)))
        scaler = torch.amp.GradScaler
        self._stack.enter_context(patch.object(scaler, "step", self._scales(scaler.step)))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def begin(self) -> None:
        """A step begins."""
        self.steps, self._skips, self._cleared, self._moved = 0, 0, None, False

    def end(self) -> bool:
        """A step ends: whether it was skipped."""
        skipped = not self.steps and (self._skips > 0 or (self._cleared is not None and self._optimizer is not None))
        skipped = bool(_anywhere(int(skipped)))
        if self.grads is None and not skipped:
            self._move()
            left = self._now()
            self.grads = left if self._some(left) else self._cleared
        elif self.grads is None:
            self.left = self._cleared or self._now()
        return skipped

    def finite(self, loss: float) -> bool:
        """Whether a loss and the gradients are."""
        grads = (self.grads or {}).values()
        return math.isfinite(loss) and all(grad is None or bool(grad.isfinite().all()) for grad in grads)

    def _now(self) -> dict[str, Any]:
        return {name: _whole(weight.grad) for name, weight in self._weights.items()}

    def _some(self, grads: dict[str, Any]) -> bool:
        return any(grad is not None for grad in grads.values())

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        groups = optimizer.param_groups
        if self._optimizer is None and not any(id(weight) in self._ids for x in groups for weight in x["params"]):
            return None
        self.steps += 1
        closure = kwargs.get("closure") if "closure" in kwargs else (args[1] if len(args) > 1 else None)
        if callable(closure):
            watched = self._computes(closure)
            return ((*args[:1], watched, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": watched})
        self._keep()
        return None

    def _keep(self) -> None:
        self._move()
        if self.grads is None:
            self.grads = self._now()

    def _move(self) -> None:
        """Give gradients that were just computed their rounding errors, once."""
        if self._rounded is not None and not self._moved:
            self._rounded.move_gradients()
        self._moved = True

    def _computes(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def computes() -> Any:
            out = closure()
            self._moved = False
            self._keep()
            return out

        return computes

    def _clears(self, original: Any) -> Any:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if self.grads is None and not self.steps and any(w.grad is not None for w in self._weights.values()):
                self._move()
                self._cleared = self._now()
            return original(owner, *args, **kwargs)

        return zero_grad

    def _scales(self, original: Any) -> Any:
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            steps = self.steps
            out = original(scaler, *args, **kwargs)
            self._skips += self.steps == steps
            return out

        return step


def _of_all(mine: Any) -> list[Any]:
    """The values of all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _anywhere(number: int) -> int:
    """The largest of all ranks."""
    return max(_of_all(number))


def _seed(number: int) -> None:
    """The step's random numbers: the same on all ranks, as in the one process, unless build gave each rank its own."""
    states = _of_all(crc32(torch.get_rng_state().numpy().tobytes()))
    torch.manual_seed(number if len(set(states)) == 1 else number + 1000 * dist.get_rank())


def _compared(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """All values on rank 0; on another rank those that differ from rank 0's, and their names."""
    digests = {
        name: None if x is None else crc32(x.reshape(-1).view(torch.uint8).numpy()) for name, x in values.items()
    }
    first = _of_all(digests)[0]
    unlike = [name for name in values if digests[name] != first.get(name)]
    if dist.get_rank() == 0 or set(values) != set(first):
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


def plain_names(model: torch.nn.Module) -> Callable[[str], str]:
    """A function that gives names of modules and parameters without what wrappers add.

    A wrapper is a module that has one module and no other parameters. The inner module has a name that DDP, FSDP,
    torch.compile or checkpointing gives.

    >>> plain = plain_names(torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"out": torch.nn.Linear(2, 2)})}))
    >>> plain("module.out.weight")
    'out.weight'
    """
    held = set()
    for path, module in model.named_modules(remove_duplicate=False):
        inside = list(module._modules)
        if len(inside) == 1 and inside[0] in _WRAPPERS and not module._parameters:
            held.add(f"{path}.{inside[0]}".removeprefix("."))

    def plain(name: str) -> str:
        parts = name.split(".")
        return ".".join(part for n, part in enumerate(parts) if ".".join(parts[: n + 1]) not in held)

    return plain


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    plain, found = plain_names(model), dict[str, torch.Tensor]()
    for name, weight in model.named_parameters():
        if plain(name) in found:
            raise StepError(f"two parameters have the name {plain(name)!r}; rename one of them (the other: {name!r})")
        found[plain(name)] = weight
    return found


def _buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers of floating point numbers that a checkpoint has."""
    plain, found = plain_names(model), dict[str, torch.Tensor]()
    for path, module in model.named_modules():
        for name, x in module._buffers.items():
            if x is not None and x.is_floating_point() and name not in module._non_persistent_buffers_set:
                whole = _whole(x)
                assert whole is not None
                found[plain(f"{path}.{name}".removeprefix("."))] = whole
    return found


def _same(x: torch.Tensor, y: torch.Tensor | None) -> bool:
    return y is not None and x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num())


def _shared(model: torch.nn.Module) -> dict[str, str]:
    """Further names of parameters that several modules have, with the first name of each."""
    plain, names, found = plain_names(model), dict[int, str](), dict[str, str]()
    for name, weight in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(weight), plain(name))
        if first != plain(name):
            found[plain(name)] = first
    return found


def _whole(x: Any) -> torch.Tensor | None:
    """A copy on the CPU, dense; of a tensor that is sharded over ranks all of it. Collective then."""
    if x is None:
        return None
    x = x.detach()
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    x = x if x.layout == torch.strided else x.to_dense()
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
