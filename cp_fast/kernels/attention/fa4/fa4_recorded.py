"""Launches of FlashAttention 4 without its Python: recorded the first time, repeated from then on.

Each call of the library runs some hundred microseconds of Python: checks, tile sizes, keys of its compile cache. The
outcome depends on shapes, dtypes and numbers alone. So the first such call is recorded: PyTorch's operators (memory for
results and accumulators, fills) and compiled kernels, in order. Equal calls, of the next layer or the next step, repeat
only these, in the order that needs the least memory (`in_little_memory`).

The recorder watches the library's own calls and knows nothing of its logic. A call that does more with tensors than
allocate, fill and launch is not recorded, and goes through the library each time. Tensors inside a kernel's tuple, such
as those that a score_mod reads, are recorded like its other arguments.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from time import monotonic
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from cp_fast.log import log_once
from cp_fast.passes import is_on

__all__ = [
    "Launches",
    "RecordedCall",
    "in_little_memory",
    "keep_on_disk",
    "kept_where",
    "says_when_it_compiles",
]

# ---- compiled kernels on disk
#
# The disk cache of FlashAttention 4's compiled kernels, so that processes do not each compile a shape class again.
#
# The library has this cache, but uses it only if its environment variables say so. It reads them at import; the user's
# values stay. Inside the folder, each release has a folder named by a checksum of its sources.


ENABLED, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_NAME = "flash_attn_4"
_LONG = 1.0  # Seconds: longer than any launch, shorter than any compilation.


def keep_on_disk() -> None:
    """Set the library's variables, unless the user has, to a folder next to our builds. Call it before the import."""
    if ENABLED in os.environ or FOLDER in os.environ or "flash_attn.cute.cache_utils" in sys.modules:
        return
    from cp_fast.build.cache import own_folder
    from cp_fast.build.recipe import Unavailable  # The build code is not imported with the package.

    with suppress(OSError, Unavailable):  # No home, or a folder that others can write to: no disk cache.
        folder = own_folder(_NAME)
        os.environ[ENABLED], os.environ[FOLDER] = "1", str(folder)


def kept_where() -> str:
    """The folder of compiled kernels, in words.

    >>> import os
    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, {ENABLED: "0"}):
    ...     kept_where()
    'nowhere: every process compiles anew (FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is not 1)'
    """
    if os.environ.get(ENABLED) != "1":
        return f"nowhere: every process compiles anew ({ENABLED} is not 1)"
    return os.environ.get(FOLDER) or "the library's own folder of temporary files"


@contextmanager
def says_when_it_compiles(function: Any) -> Iterator[None]:
    """Run one of the library's functions; if it compiled a kernel, report it once."""
    compiled = getattr(function, "compile_cache", None)
    known = getattr(compiled, "cache", {})
    before, began = len(known), monotonic()
    yield
    if len(known) > before and (took := monotonic() - began) > _LONG:
        log_once(
            f"FlashAttention 4 compiles its kernels on the first call of each shape class (the first one took "
            f"{took:.0f} s); they are kept {'in ' if kept_where()[0] == '/' else ''}{kept_where()}"
        )


# ---- the order of recorded calls
#
# The calls of a recorded launch in an order that needs little memory.
#
# A library allocates all of its memory and then launches. Here memory is allocated before its first use and freed after
# its last. Kernels and fills keep the library's order, because a kernel may start early, while its predecessor ends,
# and relies on that predecessor. Independent kernels at the end are reordered: the one that needs the least new memory
# goes first. FlashAttention 4 rounds dq, dk and dv at the end, each from a separate accumulator. None of the three
# exists while the large kernel runs, and dq, the largest, is allocated once the accumulators of the others are freed.


_ALLOCATES = (torch.empty, torch.empty_like)  # They do nothing on the device.


class RecordedCall(NamedTuple):
    """A call of a launch. At `places` its arguments are tensors of the record, by number."""

    call: Callable[..., Any]
    arguments: list[Any]
    places: tuple[tuple[int, int], ...]
    options: dict[str, Any]
    made: int  # The number of the tensor that it makes, or changes and returns; -1 for none.
    last: tuple[int, ...] = ()  # Tensors without a later use.

    @property
    def tensors(self) -> set[int]:
        """All tensors that it reads, makes or changes."""
        return {number for _, number in self.places} | ({self.made} if self.made >= 0 else set())


def in_little_memory(
    calls: Sequence[RecordedCall], sizes: Sequence[int], given: int, results: Sequence[int]
) -> tuple[RecordedCall, ...]:
    """The same calls.

    Args:
        sizes: bytes of every tensor, by its number.
        given: how many there are before the first call, with the numbers from 0; they are only read.
        results: those that stay to the end.

    >>> def recorded(call, *tensors, made=-1):
    ...     return RecordedCall(call, [], tuple(enumerate(tensors)), {}, made)
    >>> made = [*(recorded(torch.empty, made=n) for n in (1, 2, 3)), recorded("zeros", made=4)]
    >>> ran = [recorded("add", 0, 3, 4), recorded("round 3", 3, 1), recorded("round 4", 4, 2)]
    >>> ordered = in_little_memory([*made, *ran], [0, 40, 10, 80, 20], 1, [1, 2])
    >>> [one.made if one.call is torch.empty else (one.call, one.last) for one in ordered]
    [('zeros', ()), 3, ('add', (0,)), 2, ('round 4', (4,)), 1, ('round 3', (3,))]
    """
    allocated = {one.made: one for one in calls if one.call in _ALLOCATES and one.made >= given}
    ran = [one for one in calls if one is not allocated.get(one.made)]
    end, used = len(ran), set[int]()
    while end and used.isdisjoint(its := {number for number in ran[end - 1].tensors if number >= given}):
        end, used = end - 1, used | its
    ran[end:] = sorted(ran[end:], key=lambda one: sum(sizes[number] for number in one.tensors & allocated.keys()))
    ordered: list[RecordedCall] = []
    for one in ran:
        ordered += [allocated.pop(number) for number in sorted(one.tensors & allocated.keys())]
        ordered.append(one)
    ordered += [allocated[number] for number in dict.fromkeys(results) if number in allocated]
    needed = set(results)
    for n in reversed(range(len(ordered))):
        last = ordered[n].tensors - needed
        needed |= last
        ordered[n] = ordered[n]._replace(last=tuple(sorted(last)))
    return tuple(ordered)


# ---- recorded launches


_MOST = 1024  # The most calls that are recorded.

# Operators whose results depend on shapes alone, or that write recorded tensors. Each maps to the same function in
# PyTorch's own bindings, which take a third of the host time.
_ALLOWED = {
    torch.ops.aten.empty.memory_format: torch.empty,
    torch.ops.aten.empty_like.default: torch.empty_like,
    torch.ops.aten.zeros.default: torch.zeros,
    torch.ops.aten.zeros_like.default: torch.zeros_like,
    torch.ops.aten.zero_.default: torch.Tensor.zero_,
    torch.ops.aten.fill_.Scalar: torch.Tensor.fill_,
    torch.ops.aten.clone.default: torch.clone,
    torch.ops.aten.detach.default: torch.Tensor.detach,
}
_KINDS = {"dtype", "device", "pin_memory"}  # The options that an empty tensor passes on; not that of pinned memory.
_UNKNOWN = object()  # There is no record yet.
_DETACH = torch.ops.aten.detach.default


class _Repeated(NamedTuple):
    """A repeatable call: all of its arguments are values of the record."""

    call: Callable[..., Any]
    take: Callable[[Sequence[Any]], Sequence[Any]]  # Selects its arguments from the values.
    made: int
    last: tuple[int, ...]


class _Record(NamedTuple):
    """The steps of a call. Its values are the tensors that it is given, and `others`: numbers, and places for tensors
    that it makes.
    """

    steps: tuple[_Repeated, ...]
    others: list[Any]
    results: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]

    def repeat(self, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the steps on other tensors. Empties their list: each tensor is freed after its last step."""
        values: list[Any] = given + self.others
        given.clear()
        for call, take, made, last in self.steps:
            result = call(*take(values))
            if made >= 0:
                values[made] = result
            for number in last:
                values[number] = None
        return self.results(values)


class Launches:
    """One of the library's functions: recorded calls of it. For one thread at a time.

    Args:
        function: one of the library's, or one that calls it.
        arguments: the names of those that are tensors.
        results: how many of its first results are wanted.
    """

    def __init__(
        self, library: ModuleType, function: Callable[..., Any], arguments: Sequence[str], results: int
    ) -> None:
        self._library, self._function = library, function
        self._arguments, self._results = arguments, results
        self._records: dict[Any, _Record | None] = {}  # None: it cannot be recorded.

    def __call__(self, tensors: list[torch.Tensor | None], numbers: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """The function's first results.

        Args:
            tensors: by argument, None for an absent one. The list is emptied, so that a tensor without another
                reference is freed once the kernels have read it.
            numbers: all other arguments; hashable.
        """
        given = [x for x in tensors if x is not None]
        if not is_on("record_launches"):
            return self._call(tensors, numbers)
        if given[0].is_cuda and torch.cuda.is_current_stream_capturing():  # A replay does not run the host's code.
            return self._call(tensors, numbers)
        key = (*numbers.values(), *[None if x is None else _form(x) for x in tensors])
        record = self._records.get(key, _UNKNOWN)
        if isinstance(record, _Record):
            tensors.clear()
            return record.repeat(given)
        if record is None:
            return self._call(tensors, numbers)
        # A tensor passed twice would have one number: the next call may pass two.
        tensors = [None if x is None else x.detach() for x in tensors]
        watch = _Watch([x for x in tensors if x is not None])
        with says_when_it_compiles(self._function), watch, _watched(self._library, watch):
            made = self._call(tensors, numbers)
        if not watch.compiled:
            self._records[key] = watch.record(made)
            if len(self._records) > _MOST:
                del self._records[next(iter(self._records))]
        return made

    def _call(self, tensors: Sequence[torch.Tensor | None], numbers: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        return self._function(**dict(zip(self._arguments, tensors, strict=True)), **numbers)[: self._results]


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that a launch depends on. Alignment is one: the library copies unaligned tensors."""
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16


class _Watch(TorchDispatchMode):
    """Writes down what happens to tensors in this thread."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {id(x): number for number, x in enumerate(given)}
        self._alive: list[Any] = [*given]  # No id is used again while they live.
        self._calls: list[RecordedCall] = []
        self._bytes = [0] * len(given)  # By number; 0 for the given tensors, which exist already.
        self._given = self._size = len(given)
        self._thread = threading.get_ident()
        self._can_be_kept = True
        self.compiled = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and write it down."""
        result = func(*args, **(kwargs or {}))
        if func is _DETACH and id(args[0]) in self._known:  # The same memory: the kernels ignore gradients.
            self._known[id(result)] = self._known[id(args[0])]
            self._alive.append(result)
        elif func in _ALLOWED and isinstance(result, torch.Tensor):
            self._write(_ALLOWED[func], args, kwargs or {}, result)
        else:
            self._can_be_kept = False
        return result

    def launched(self, kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """A compiled kernel ran."""
        if threading.get_ident() != self._thread:
            return
        if any(_has_tensors(x) for x in arguments if not isinstance(x, torch.Tensor)):
            flat, form = tree_flatten(arguments)
            self._write(lambda *given: kernel(*tree_unflatten(given, form)), flat, {}, None)
        else:
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
            number = self._known.get(id(made), -1)  # An operator in place.
            if number < 0:
                number, self._size = self._size, self._size + 1
                self._bytes.append(made.untyped_storage().nbytes())
                self._known[id(made)] = number
                self._alive.append(made)
        template = [None if isinstance(x, torch.Tensor) else x for x in arguments]
        self._calls.append(RecordedCall(call, template, tuple(places), options, number))

    def record(self, results: Sequence[torch.Tensor]) -> _Record | None:
        """The record; None if it cannot be repeated."""
        if not self._can_be_kept or any(id(x) not in self._known for x in results):
            return None
        numbers = [self._known[id(x)] for x in results]
        others: list[Any] = [None] * (self._size - self._given)
        steps = list[_Repeated]()
        for step in in_little_memory(self._calls, self._bytes, self._given, numbers):
            its = [self._given + len(others) + n for n in range(len(step.arguments))]
            others += step.arguments
            for place, number in step.places:
                its[place] = number
            steps.append(_Repeated(_bound(step.call, step.options), _taker(its), step.made, step.last))
        return _Record(tuple(steps), others, _taker(numbers))


def _bound(call: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A call with its options. An empty tensor allocates memory of its dtype and device: to read these from arguments
    takes as long as the allocation.

    >>> _bound(torch.zeros, {"dtype": torch.float16})([2])
    tensor([0., 0.], dtype=torch.float16)
    """
    if call not in (torch.empty, torch.zeros) or options.get("pin_memory") or not options.keys() <= _KINDS:
        return partial(call, **options) if options else call
    like = torch.empty(0, **options)
    return like.new_empty if call is torch.empty else like.new_zeros


def _taker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """A function that selects the values with these numbers from a list.

    >>> _taker([2, 0])("abc"), _taker([1])(list("abc")), _taker([])(list("abc"))
    (('c', 'a'), ['b'], [])
    """
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return itemgetter(slice(numbers[0], numbers[0] + 1) if numbers else slice(0))


def _has_tensors(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or (isinstance(x, tuple | list) and any(map(_has_tensors, x)))


class _WatchedCache:
    """The library's cache of compiled kernels, while a call is watched."""

    def __init__(self, cache: Any, watch: _Watch) -> None:
        self._cache, self._watch = cache, watch

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self._watch.compiled = True  # Tensor operations of the compilation do not belong to the launch.
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
