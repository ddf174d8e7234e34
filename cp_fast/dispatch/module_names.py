"""The name of the module being called, relative to the outermost one, such as Model.layers.3.attn."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["named_modules"]


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
