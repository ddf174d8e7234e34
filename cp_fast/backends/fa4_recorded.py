"""Launches of FlashAttention 4 without its Python: recorded the first time, repeated from then on.

Between a call of the library and its kernels lie some hundred microseconds of Python: checks, tile sizes, keys of its
compile cache. What comes out depends on shapes, dtypes and numbers alone. So the first call with these is watched, and
what it did is kept: PyTorch's operators (memory for results and accumulators, fills) and compiled kernels, in order.
Equal calls, of the next layer or the next step, repeat just that, in the order that needs the least memory
(`recorded_order`).

Watched are the library's own calls, and nothing of its logic is known here: a call that does anything else with
tensors than allocate, fill and launch is not kept, and goes through the library each time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cp_fast.backends.fa4_cache import says_when_it_compiles
from cp_fast.backends.recorded_order import Step, in_little_memory

__all__ = ["Launches"]

_MOST = 1024  # recorded calls that are kept

# operators whose results hang on shapes alone, or that write tensors which are on the record
_ALLOWED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
}
_DETACH = torch.ops.aten.detach.default


class _Record(NamedTuple):
    """What a call did: its arguments' tensors have the numbers from 0."""

    steps: tuple[Step, ...]
    size: int
    results: tuple[int, ...]

    def repeat(self, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The same with other tensors."""
        tensors: list[Any] = [*given, *[None] * (self.size - len(given))]
        for call, template, places, options, made, last in self.steps:
            arguments = template.copy()
            for place, number in places:
                arguments[place] = tensors[number]
            result = call(*arguments, **options)
            if made >= 0:
                tensors[made] = result
            for number in last:
                tensors[number] = None
        return tuple(tensors[number] for number in self.results)


class Launches:
    """One of the library's functions: recorded calls of it. For one thread at a time."""

    def __init__(self, library: ModuleType, name: str) -> None:
        self._library, self._function = library, getattr(library, name)
        self._records: OrderedDict[Any, _Record | None] = OrderedDict()

    def __call__(
        self, tensors: Mapping[str, torch.Tensor | None], numbers: dict[str, Any], results: int
    ) -> tuple[torch.Tensor, ...]:
        """`function(**tensors, **numbers)`, the first so many of its results.

        Args:
            tensors: by argument; None where there is none.
            numbers: all other arguments; hashable.
        """
        given = [x for x in tensors.values() if x is not None]
        if given[0].is_cuda and torch.cuda.is_current_stream_capturing():  # the host launches nothing at a replay
            return self._function(**tensors, **numbers)[:results]
        key = (*numbers.values(), *(None if x is None else _form(x) for x in tensors.values()))
        record = self._records.get(key)
        if record is not None:
            self._records.move_to_end(key)
            return record.repeat(given)
        if key in self._records:  # it was seen that it cannot be kept
            return self._function(**tensors, **numbers)[:results]
        # a tensor that is given twice would have one number: the next call may give two
        tensors = {name: None if x is None else x.detach() for name, x in tensors.items()}
        watch = _Watch([x for x in tensors.values() if x is not None])
        with says_when_it_compiles(self._function), watch, _watched(self._library, watch):
            made = self._function(**tensors, **numbers)[:results]
        if not watch.compiled:
            self._records[key] = watch.record(made)
            if len(self._records) > _MOST:
                self._records.popitem(last=False)
        return made


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    """What a launch hangs on, of a tensor: the library copies what is not aligned."""
    return x.shape, x.stride(), x.dtype, x.device.index, x.data_ptr() % 16


class _Watch(TorchDispatchMode):
    """Writes down what happens to tensors in this thread."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {id(x): number for number, x in enumerate(given)}
        self._alive: list[Any] = [*given]  # no id is used again while they live
        self._steps: list[Step] = []
        self._bytes = [0] * len(given)  # by number; what is given is there anyway
        self._given = self._size = len(given)
        self._thread = threading.get_ident()
        self._can_be_kept = True
        self.compiled = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and write it down."""
        result = func(*args, **(kwargs or {}))
        if func is _DETACH and id(args[0]) in self._known:  # the same memory: the kernels do not look at gradients
            self._known[id(result)] = self._known[id(args[0])]
            self._alive.append(result)
        elif func in _ALLOWED and isinstance(result, torch.Tensor):
            self._write(func, args, kwargs or {}, result)
        else:
            self._can_be_kept = False
        return result

    def launched(self, kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """A compiled kernel ran."""
        if threading.get_ident() == self._thread:
            self._write(kernel, arguments, {}, None)

    def _write(self, call: Any, arguments: Sequence[Any], options: dict[str, Any], made: torch.Tensor | None) -> None:
        places = []
        for place, x in enumerate(arguments):
            if isinstance(x, torch.Tensor):
                if id(x) not in self._known:
                    self._can_be_kept = False
                    return
                places.append((place, self._known[id(x)]))
            elif _has_tensors(x):
                self._can_be_kept = False
                return
        number = -1
        if made is not None:
            number = self._known.get(id(made), -1)  # an operator in place
            if number < 0:
                number, self._size = self._size, self._size + 1
                self._bytes.append(made.untyped_storage().nbytes())
                self._known[id(made)] = number
                self._alive.append(made)
        template = [None if isinstance(x, torch.Tensor) else x for x in arguments]
        self._steps.append(Step(call, template, tuple(places), options, number))

    def record(self, results: Sequence[torch.Tensor]) -> _Record | None:
        """What was written down; None where it cannot be repeated."""
        if not self._can_be_kept or any(id(x) not in self._known for x in results):
            return None
        numbers = tuple(self._known[id(x)] for x in results)
        return _Record(in_little_memory(self._steps, self._bytes, self._given, numbers), self._size, numbers)


def _has_tensors(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or (isinstance(x, tuple | list) and any(map(_has_tensors, x)))


class _WatchedCache:
    """The library's cache of compiled kernels, while a call is watched."""

    def __init__(self, cache: Any, watch: _Watch) -> None:
        self._cache, self._watch = cache, watch

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self._watch.compiled = True  # what compiling did to tensors is no part of a launch
        self._cache[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        kernel = self._cache[key]

        def launch(*arguments: Any) -> Any:
            result = kernel(*arguments)
            self._watch.launched(kernel, arguments)
            return result

        return launch


@contextmanager
def _watched(library: ModuleType, watch: _Watch) -> Iterator[None]:
    """Every function of the library that has compiled kernels looks them up through the watch."""
    functions = [f for f in vars(library).values() if hasattr(f, "compile_cache")]
    caches = [f.compile_cache for f in functions]
    try:
        for function, cache in zip(functions, caches, strict=True):
            function.compile_cache = _WatchedCache(cache, watch)
        yield
    finally:
        for function, cache in zip(functions, caches, strict=True):
            function.compile_cache = cache
