"""Tier `hygiene`: nothing is read that is not an input, and nothing is written that is not a result.

    poison       fresh memory is full of NaN while the implementation runs, and so are padding and tail of every input:
                 what nobody wrote, and what nobody may read, shows
    margins      q, k, v and dout lie inside larger buffers; a write outside them shows
    inputs       every input, lengths included, has the same bytes after both passes
    aliases      no result has an element in the memory of an input, or of another result
    strides      transposed memory, every second element, a dout of stride 0 (what out.sum().backward() gives)
    again        the same inputs a second time give the same results
    state        PyTorch's settings and the random states are as they were (see `conformance.checks.hygiene`)

The implementation always runs before the oracle: a fresh allocation may hold the right answer.
"""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conformance.case import Case
from conformance.checks.budgets import Tensors, close, same_bits
from conformance.checks.play import RankCall, on_every_rank, play
from conformance.checks.reference import exact_results
from conformance.checks.values import compare_result
from conformance.implementation import Implementation
from conformance.tensors import build

__all__ = [
    "ASSERTED",
    "changed",
    "check_hygiene",
    "context_error",
    "forked",
    "forks_of",
    "poisoned_memory",
    "settings_restored",
    "state",
]

# ---- the state of a process
#
# The state of a process that a call of attention must not change: PyTorch's settings, random numbers, its copies; and
# whether its GPU still answers.
#
# Grad mode and default device belong to a thread, so what looks at them has to be in the thread that made the call.
#
# A device-side assertion, or a launch that reads where nothing is, ends a process's context on its GPU: every later
# call fails with the same error, whoever makes it. So a problem that did that is judged, and its process is not used
# again.


ASSERTED = "device-side assert"  # in the error of what a kernel asserted

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # getter, setter


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _be_deterministic(was: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(was[0], warn_only=was[1])


SETTINGS: dict[str, Setting] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (lambda: str(torch.get_default_device()), torch.set_default_device),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the deterministic algorithms": (_deterministic, _be_deterministic),
    "cuDNN's deterministic flag": (
        lambda: torch.backends.cudnn.deterministic,
        lambda was: setattr(torch.backends.cudnn, "deterministic", was),
    ),
    "the precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "PyTorch's random state": (
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda was: torch.set_rng_state(torch.frombuffer(bytearray(was), dtype=torch.uint8)),
    ),
    "Python's random state": (random.getstate, random.setstate),
    "numpy's random state": (
        lambda: pickle.dumps(np.random.get_state()),
        lambda was: np.random.set_state(pickle.loads(was)),
    ),
}


def state() -> dict[str, Any]:
    """The value of every setting, in this thread."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


def changed(before: dict[str, Any]) -> list[str]:
    """One sentence for every setting that changed; each is restored.

    >>> before = state()
    >>> _ = torch.set_grad_enabled(False)
    >>> changed(before), torch.is_grad_enabled()
    (['a call left grad mode as False; it was True'], True)
    """
    found = []
    for name, (read, write) in SETTINGS.items():
        now, was = read(), before[name]
        if now != was:
            values = "" if "random" in name else f" as {now}; it was {was}"
            found.append(f"a call left {name}{values}" if values else f"a call changed {name}")
            write(was)
    return found


@contextmanager
def settings_restored() -> Iterator[None]:
    """Restore the settings changed inside, so that one problem does not affect the next."""
    before = state()
    try:
        yield
    finally:
        changed(before)


def forked(copies: set[int]) -> str:
    """The finding about copies that a call left."""
    return f"a call forked the process, and left {len(copies)} copies of it behind"


def forks_of(pid: int) -> set[int]:
    """The children of a process that are copies of it, running or ended; none without /proc.

    A running child is a copy if it has its parent's command line. Of an ended child only the name is left to compare.
    """

    def words(of: int | str, file: str) -> str:
        try:
            return Path("/proc", str(of), file).read_text().strip("\0\n ")
        except OSError:  # it is gone
            return ""

    listed = Path("/proc", str(pid), "task").glob("*/children")
    children = {int(child) for file in listed for child in words(pid, str(file.relative_to(f"/proc/{pid}"))).split()}
    return {c for c in children if words(pid, f := "cmdline" if words(c, "cmdline") else "comm") == words(c, f)}


def context_error(device: str) -> str:
    """The error that ended this process's context on the GPU; empty while it works, and on a CPU. Waits for the GPU.

    >>> context_error("cpu")
    ''
    """
    if not device.startswith("cuda"):
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as error:  # torch.AcceleratorError, RuntimeError: by release
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


# ---- the tier


def check_hygiene(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
    """Reads and writes out of place, and results that depend on strides or on what lay in memory.

    Raises:
        UnsupportedCase: the implementation does not have this, and says so on every rank.
    """
    case, tensors = replace(case, strided=True), build(case, device)
    with poisoned_memory():
        settings = state()
        played = play(impl, case, tensors)
        if found := changed(settings) or played.findings:
            return found
        found = on_every_rank(impl, replace(case, strided=False), tensors, _check_rank)
    exact = exact_results(case, tensors)
    return found + [
        f for name, x in played.results.items() for f in compare_result(case, tensors, name, x, exact[name])
    ]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN (the largest value for integers) inside: PyTorch does so in deterministic mode."""
    before = _deterministic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nondeterministic operators are not the question here
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            _be_deterministic(before)


def _check_rank(call: RankCall) -> list[str]:
    leaves, settings = call.leaves(), state()
    watched = {**leaves, "dout": call.dout, "dlse": call.dlse} | {
        name: x
        for name, x in (
            call.problem_arguments | call.score_arguments | call.score_arguments.get("aux_tensors", {})
        ).items()
        if isinstance(x, torch.Tensor)
    }
    before = {name: x.detach().clone() for name, x in watched.items()}
    results = call.both(leaves)
    if found := changed(settings):  # of this thread
        return found
    found = same_bits("(an input) after the call", before, {name: x.detach() for name, x in watched.items()})
    found += _aliases(results, watched)
    again = call.both(call.leaves())
    found += (same_bits if call.case.deterministic else _close_to(call))("of a second call", results, again)
    found += close("with odd strides", call.case, results, _with_odd_strides(call))
    if "out" in call.case.loss and call.dout.numel():
        one = torch.ones((), dtype=call.dout.dtype, device=call.dout.device)
        expanded = call.both(call.leaves(), dout=one.expand(call.dout.shape))
        plain = call.both(call.leaves(), dout=torch.ones_like(call.dout))
        found += close("with a dout of stride 0", call.case, plain, expanded)
    return found


def _close_to(call: RankCall) -> Any:
    return lambda what, one, other: close(what, call.case, one, other)


def _with_odd_strides(call: RankCall) -> Tensors:
    """Both passes with other memory behind the same values: q and v transposed, k and dout every second element."""
    other = {name: x.detach() for name, x in call.inputs.items()}
    other |= {"q": _transposed(other["q"]), "k": _every_other(other["k"]), "v": _transposed(other["v"])}
    leaves = {name: x.requires_grad_(name[0] in call.case.wanted) for name, x in other.items()}
    return call.both(leaves, dout=_every_other(call.dout))


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """The same values, its axes in memory in reverse order."""
    axes = tuple(reversed(range(x.ndim)))
    return x.permute(axes).contiguous().permute(axes).detach()


def _every_other(x: torch.Tensor) -> torch.Tensor:
    """The same values, each second element of a buffer that is NaN between them."""
    buffer = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    buffer[..., ::2] = x
    return buffer[..., ::2].detach()


def _aliases(results: Tensors, inputs: Tensors) -> list[str]:
    """Results with an element in the memory of an input or of an earlier result. Disjoint views of one buffer, such as
    dq, dk and dv that a packed gradient has side by side, share none.
    """
    owners, found = dict(inputs), []
    for name, x in results.items():
        owner = next((n for n, other in owners.items() if x.device == other.device and _overlap(x, other)), None)
        found += [] if owner is None else [f"{name} lies in the memory of {owner}"]
        owners[name] = x
    return found


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one device have a byte in common.

    >>> buffer = torch.zeros(4, 6)
    >>> _overlap(buffer[:, ::2], buffer[:, 1::2]), _overlap(buffer[0], buffer[:, 5]), _overlap(buffer[:2], buffer[2:])
    (False, True, False)
    """
    if not one.numel() or not other.numel():
        return False
    ends = [x.data_ptr() + x.element_size() * (1 + _reach(x)) for x in (one, other)]
    if one.data_ptr() >= ends[1] or other.data_ptr() >= ends[0]:
        return False
    return bool(torch.isin(_bytes(one), _bytes(other)).any())


def _reach(x: torch.Tensor) -> int:
    """How many elements behind the first the last one lies."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The address of every byte [n]."""
    places = torch.tensor([x.data_ptr()])
    for size, stride in zip((*x.shape, x.element_size()), (*x.stride(), None), strict=True):
        step = 1 if stride is None else stride * x.element_size()
        places = (places[:, None] + step * torch.arange(size if step else 1)).flatten()
    return places
