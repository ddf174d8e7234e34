"""Tier `hygiene`: nothing is read that is not an input, and nothing is written that is not a result.

    poison       fresh memory is full of NaN while the implementation runs, and so are padding and tail of every input:
                 what nobody wrote, and what nobody may read, shows
    margins      q, k, v and dout lie inside larger buffers; a write outside them shows
    inputs       every input, lengths included, has the same bytes after both passes
    aliases      no result has an element in the memory of an input, or of another result
    strides      transposed memory, every second element, a dout of stride 0 (what out.sum().backward() gives)
    again        the same inputs a second time give the same results
    state        PyTorch's settings and the random states are as they were (see `conformance.run.global_state`)

The implementation always runs before the oracle: a fresh allocation may hold the right answer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from conformance.case import Case
from conformance.implementation import Implementation
from conformance.judge.reference import exact_results
from conformance.run.case_tensors import build
from conformance.run.global_state import changed, state
from conformance.run.play_case import play
from conformance.tiers import logic
from conformance.tiers.calls.one_rank import Call, Tensors, close, on_every_rank, same_bits

__all__ = ["check", "poisoned_memory"]


def check(impl: Implementation, case: Case, device: str = "cpu") -> list[str]:
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
    return found + [f for name, x in played.results.items() for f in logic.compare(case, tensors, name, x, exact[name])]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN (the largest value for integers) inside: PyTorch does so in deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nondeterministic operators are not the question here
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _check_rank(call: Call) -> list[str]:
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


def _close_to(call: Call) -> Any:
    return lambda what, one, other: close(what, call.case, one, other)


def _with_odd_strides(call: Call) -> Tensors:
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
