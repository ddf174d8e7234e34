"""Recorded launches: what a call of the library did is done again with other tensors, and nothing else is."""

from __future__ import annotations

import threading
import weakref
from types import ModuleType
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from cp_fast.kernels.attention.fa4.fa4_recorded import Launches, RecordedCall, in_little_memory
from cp_fast.passes import switched_off

NAMES = ("x", "bias")


class Kernels(dict[Any, Any]):
    """Compiled kernels by key, and how often each ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def compiled(self, name: str) -> Any:
        def kernel(*arguments: Any) -> None:
            self.ran.append(name)
            with _disable_current_modes():  # a kernel's writes are nobody's operators
                if name == "scaled sum":
                    x, scale, sums, out = arguments
                    sums += x.sum(-1)
                    out.copy_(sums * scale)
                else:
                    arguments[1].copy_(arguments[0] + 1)

        return kernel


def library(kernels: Kernels, calls: list[str], extra: Any = None) -> ModuleType:
    """A function that allocates, fills and launches, as FlashAttention's do."""

    def called(x: torch.Tensor, bias: torch.Tensor | None, *, scale: float) -> tuple[torch.Tensor, torch.Tensor, None]:
        calls.append("called")
        if extra is not None:
            extra(x)
        plus, sums, out = torch.empty_like(x), torch.zeros(x.shape[0]), torch.empty(x.shape[0])
        for key in ("one more", "scaled sum"):
            if key not in function.compile_cache:
                torch.ones(3).sum()  # compiling may do anything
                function.compile_cache[key] = kernels.compiled(key)
        function.compile_cache["one more"](x.detach(), plus)
        function.compile_cache["scaled sum"](plus, scale, sums, out)
        return out, plus, None

    function: Any = called
    function.compile_cache = kernels
    module = ModuleType("stand-in")
    module.__dict__["function"] = function
    return module


def launches_of(module: ModuleType) -> Launches:
    return Launches(module, module.__dict__["function"], NAMES, 2)


def expected(x: torch.Tensor, scale: float) -> list[torch.Tensor]:
    return [(x + 1).sum(-1) * scale, x + 1]


def test_the_third_call_repeats_what_the_second_did() -> None:
    kernels, calls = Kernels(), []
    launches = launches_of(library(kernels, calls))
    for n in range(5):
        x = torch.randn(4, 3)
        out = launches([x, None], {"scale": 2.0})
        torch.testing.assert_close(list(out), expected(x, 2.0))
        assert kernels.ran == ["one more", "scaled sum"] * (n + 1)
    assert len(calls) == 2  # the first compiled


def test_without_the_pass_each_call_goes_through_the_library() -> None:
    kernels, calls = Kernels(), []
    launches = launches_of(library(kernels, calls))
    for n in range(5):
        x = torch.randn(4, 3)
        with switched_off("record_launches"):
            out = launches([x, None], {"scale": 2.0})
        torch.testing.assert_close(list(out), expected(x, 2.0))
        assert len(calls) == n + 1


def test_tensors_that_were_one_may_be_two_in_the_next_call() -> None:
    """Launches whose queries and keys have equal lengths share the table; those of the same shape may not."""
    kernels = Kernels()

    def function(first: torch.Tensor, second: torch.Tensor, *, scale: float) -> tuple[torch.Tensor]:
        sums, out = torch.zeros(first.shape[0]), torch.empty(first.shape[0])
        kernels.compiled("one more")(second, torch.empty_like(second))
        its.compile_cache["scaled sum"](first.detach(), scale, sums, out)
        return (out,)

    its: Any = function
    kernels["scaled sum"] = kernels.compiled("scaled sum")
    its.compile_cache = kernels
    module = ModuleType("stand-in")
    module.__dict__["function"] = its
    launches, one = Launches(module, its, ("first", "second"), 1), torch.randn(4, 3)
    for first, second in ((one, one), (one, one), (torch.randn(4, 3), torch.randn(4, 3))):
        (out,) = launches([first, second], {"scale": 2.0})
        torch.testing.assert_close(out, first.sum(-1) * 2)


def test_what_nobody_else_holds_goes_when_no_kernel_needs_it_any_more() -> None:
    kernels, given, there = Kernels(), list[weakref.ref[torch.UntypedStorage]](), list[bool]()
    launches = launches_of(library(kernels, []))

    def looking(*arguments: Any) -> None:
        there.append(given[-1]() is not None)
        kernels.compiled("scaled sum")(*arguments)

    for _ in range(3):
        tensors: list[torch.Tensor | None] = [torch.randn(4, 3), None]
        given.append(weakref.ref(tensors[0].untyped_storage()))  # pyright: ignore[reportOptionalMemberAccess]
        launches(tensors, {"scale": 2.0})
        if "scaled sum" in kernels:
            kernels["scaled sum"] = looking
    assert there == [True, False]  # recorded, repeated


def test_a_fill_never_comes_between_two_kernels() -> None:
    """FlashAttention's large kernel starts early, while the one before it ends, and expects that one there."""
    recorded = [
        RecordedCall(torch.empty, [], (), {}, 1),
        RecordedCall(torch.zeros, [], (), {}, 2),
        *(RecordedCall(ran, [], tuple(enumerate(its)), {}, -1) for ran, its in ((print, (0, 1)), (repr, (1, 2)))),
    ]
    assert [one.call for one in in_little_memory(recorded, [0, 9, 9], 1, [2])] == [
        torch.zeros,
        torch.empty,
        print,
        repr,
    ]


def test_results_are_new_memory_each_time() -> None:
    launches = launches_of(library(Kernels(), []))
    outs = [launches([torch.randn(4, 3), None], {"scale": 1.0})[0] for _ in range(4)]
    assert len({out.data_ptr() for out in outs}) == 4


@pytest.mark.parametrize(
    ("other", "scale"),
    [
        (torch.randn(5, 3), 2.0),
        (torch.randn(4, 3).double(), 2.0),
        (torch.randn(3, 4).t(), 2.0),
        (torch.randn(13)[1:].view(4, 3), 2.0),
        (torch.randn(4, 3), 3.0),
    ],
    ids=["shape", "dtype", "strides", "alignment", "number"],
)
def test_what_a_launch_hangs_on_is_looked_at(other: torch.Tensor, scale: float) -> None:
    calls: list[str] = []
    launches = launches_of(library(Kernels(), calls))
    for _ in range(3):
        launches([torch.randn(4, 3), None], {"scale": 2.0})
    before = len(calls)
    out = launches([other, None], {"scale": scale})
    assert len(calls) == before + 1
    torch.testing.assert_close(list(out), expected(other, scale), check_dtype=False)


@pytest.mark.parametrize(
    "extra", [lambda x: x.sum(), lambda x: x.max().item(), lambda x: torch.randn(3)], ids=["sum", "value", "random"]
)
def test_a_call_that_does_anything_else_goes_through_the_library(extra: Any) -> None:
    calls: list[str] = []
    launches = launches_of(library(Kernels(), calls, extra))
    for n in range(4):
        x = torch.randn(4, 3)
        torch.testing.assert_close(list(launches([x, None], {"scale": 2.0})), expected(x, 2.0))
        assert len(calls) == n + 1


def test_another_thread_that_uses_the_library_is_not_recorded() -> None:
    kernels, calls = Kernels(), []

    def meanwhile(x: torch.Tensor) -> None:
        if kernels and threading.current_thread() is threading.main_thread():
            theirs = threading.Thread(target=lambda: module.__dict__["function"](torch.randn(2, 2), None, scale=7.0))
            theirs.start()
            theirs.join()

    module = library(kernels, calls, meanwhile)
    launches = launches_of(module)
    for _ in range(4):
        x = torch.randn(4, 3)
        torch.testing.assert_close(list(launches([x, None], {"scale": 2.0})), expected(x, 2.0))
    assert kernels.ran[-2:] == ["one more", "scaled sum"]
    assert len(calls) == 3  # ours that compiled; ours that was recorded, and theirs


def test_the_library_has_its_own_cache_again_when_it_raises() -> None:
    kernels = Kernels()

    def refuse(x: torch.Tensor) -> None:
        raise ValueError("no")

    module = library(kernels, [], refuse)
    with pytest.raises(ValueError, match="no"):
        launches_of(module)([torch.randn(2, 2), None], {"scale": 2.0})
    assert module.__dict__["function"].compile_cache is kernels


def test_tensors_inside_a_tuple_are_recorded_too() -> None:
    """As those that a score_mod reads: the library passes them to its kernel in a record with numbers."""

    class Aux(NamedTuple):
        tensors: list[torch.Tensor]
        scalars: tuple[int, ...]

    def function(x: torch.Tensor, bias: torch.Tensor, *, scale: float) -> tuple[torch.Tensor]:
        def kernel(x: torch.Tensor, aux: Aux, out: torch.Tensor) -> None:
            with _disable_current_modes():
                out.copy_(x * aux.tensors[0] + aux.scalars[0])

        out = torch.empty_like(x)
        if "kernel" not in its.compile_cache:
            its.compile_cache["kernel"] = kernel
        its.compile_cache["kernel"](x, Aux([bias], (3,)), out)
        calls.append("called")
        return (out,)

    its, calls = cast(Any, function), list[str]()
    its.compile_cache = {}
    module = ModuleType("stand-in")
    module.__dict__["function"] = its
    launches = Launches(module, its, NAMES, 1)
    for _ in range(4):
        x, bias = torch.randn(4), torch.randn(4)
        (out,) = launches([x, bias], {"scale": 2.0})
        torch.testing.assert_close(out, x * bias + 3)
    assert calls == ["called"] * 2
