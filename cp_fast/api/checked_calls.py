"""`checked`: the ranks compare notes before every call, not only when a plan is made.

With a plan the ranks do not agree before a call: if they use plans of different batches, or call their layers in
different orders, they exchange the wrong tensors. Under `checked` each call, forward and backward, first gathers a
fingerprint from all ranks; if one differs, all ranks raise. Off, a call reads one flag.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan
from cp_ref.groups.agreement import agreed
from cp_ref.problems.room import Agreement

__all__ = [
    "VARIABLE",
    "agree_on_call",
    "checked",
    "checking",
    "describe",
    "named_modules",
]

# ---- names of modules
#
# The name of the module being called, relative to the outermost one, such as Model.layers.3.attn.


class _Called(threading.local):
    def __init__(self) -> None:
        self.modules: list[nn.Module] = []  # The outermost first.


_called = _Called()
_lock = threading.Lock()


class named_modules:
    """A context that follows the calls of modules in all threads, by hooks on all modules."""

    _depth = 0
    _hooks: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        with _lock:
            if named_modules._depth == 0:
                before = register_module_forward_pre_hook(_enter)
                after = register_module_forward_hook(_leave, always_call=True)
                named_modules._hooks = before, after
            named_modules._depth += 1

    def __exit__(self, *error: object) -> None:
        with _lock:
            named_modules._depth -= 1
            if named_modules._depth == 0:
                for hook in named_modules._hooks:
                    hook.remove()

    @staticmethod
    def current() -> str:
        """The innermost module being called in this thread; empty outside of modules."""
        if not _called.modules:
            return ""
        outer, inner = _called.modules[0], _called.modules[-1]
        names = [type(outer).__name__, *(name for name, module in outer.named_modules() if module is inner and name)]
        return ".".join(names)


def _enter(module: nn.Module, inputs: Any) -> None:
    if not torch.compiler.is_compiling():  # A graph's calls have the name of the compiled module.
        _called.modules.append(module)


def _leave(module: nn.Module, inputs: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if module in _called.modules:  # Not one entered before the hooks existed.
        while _called.modules.pop() is not module:
            pass


# ---- agreements on calls


VARIABLE = "CP_FAST_CHECK"


class _Here(threading.local):
    depth = 0  # Of `checked` in this thread.


_here = _Here()
_everywhere = 0  # Of `checked` in the main thread, for all threads.


@contextmanager
def checked() -> Iterator[None]:
    """Agree on every call with all ranks of its group before anything is sent.

    The calls are those of `attention`, forward and backward, and of linear and sparse layers: `linear_attention`,
    `causal_conv1d`, `select_keys`, `sparse_attention` and `index_loss`.

    It finds ranks that use plans of different batches, or call layers in different orders or with different shapes.
    Without it such ranks compute wrong results or hang. Every rank must be inside it for the same calls. It holds for
    the calling thread, and for all threads if that is the main one; CP_FAST_CHECK=1 in the environment of every process
    has the same effect everywhere. Layers are distinguished by the names of their modules; outside of modules,
    identical calls in another order are not noticed. Cannot be captured in a CUDA graph.

    Raises:
        ValueError: inside, from a call that is not the same on all ranks, on all of them, with the first difference.
            An argument error on one rank is raised on all ranks.

    >>> from cp_ref import SimGroup
    >>> def fn(member):
    ...     cp = ContextParallel(member)
    ...     q = torch.zeros(1, 4, 1, 8)
    ...     sizes = dict(heads_q=1, heads_kv=1, d_qk=8, d_v=8, dtype=q.dtype, device="cpu")
    ...     plans = [make_plan(cp=cp, batch_size=1, seqlen_q=8, window_size=(w, 0), **sizes) for w in (2, 3)]
    ...     attention(q, q, q, cp=cp, plan=plans[member.rank])
    >>> from cp_fast import attention, make_plan
    >>> with checked():  # doctest: +ELLIPSIS
    ...     SimGroup(2).run(fn)
    Traceback (most recent call last):
    ...
    ValueError: checked, forward, call 1: the ranks have different problems: rank 0 has window_size=(2, 0) where ...
    """
    global _everywhere
    in_main = threading.current_thread() is threading.main_thread()
    _here.depth += 1
    _everywhere += in_main
    try:
        with named_modules():
            yield
    finally:
        _here.depth -= 1
        _everywhere -= in_main


def checking() -> bool:
    """Whether calls of this thread are checked."""
    return bool(_everywhere or _here.depth)


Found = TypeVar("Found")
Details = Iterable[tuple[str, object]]


def agree_on_call(
    cp: ContextParallel, plan: Plan, what: str, read: Callable[[], tuple[Found, Details]]
) -> tuple[Found, int]:
    """Read a call on this rank, and agree with all others on what it is.

    Args:
        what: "forward", "backward", with the function where it is not `attention`.
        read: checks the arguments here, and sends nothing. Returns any result, and values that must be the same on all
            ranks, by name.

    Returns:
        The result, and the number of the checked call, of its group.
    """
    number, module = cp.next_number(), named_modules.current()
    result, details = agreed(cp, what, read)
    call = Agreement(plan.problem, plan.room, (("call", number), ("what", what), ("module", module), *details))
    try:
        agreed(cp, what, lambda: call, lambda found: found)
    except ValueError as refused:
        where = f"{what}, call {number}{f' in {module}' if module else ''}"
        raise ValueError(f"checked, {where}: {refused}") from None
    return result, number


def describe(name: str, x: Any) -> tuple[str, object]:
    """A tensor as a detail of a call."""
    if not isinstance(x, torch.Tensor):
        return name, type(x).__name__
    return name, f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _of_the_environment() -> None:
    """CP_FAST_CHECK=1 is a `checked` that never ends."""
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} is {text!r}; it must be 0 or 1")
    if text == "1":
        global _everywhere
        _everywhere += 1
        named_modules().__enter__()


_of_the_environment()
