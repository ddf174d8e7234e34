"""Which implementation is in use: by default, by name, by the environment; never another one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cp_fast.build.builder
from cp_fast.log import log_once
from cp_fast.movers import select_movers as select
from cp_fast.movers.select_movers import chosen, movers_for, use, why_not
from cp_fast.movers.torch_movers import TorchMovers


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test asks anew, with nothing in the environment."""
    monkeypatch.delenv(select.VARIABLE, raising=False)
    for cached in (select._choice, select._loaded, select._reason):
        cached.cache_clear()
    yield
    for cached in (select._choice, select._loaded, select._reason):
        cached.cache_clear()


def test_without_a_compiler_pytorch_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_fast.build.builder, "why_not", lambda device_type: "no C++ compiler")
    assert chosen("cpu") == ("torch", "not native: no C++ compiler; not numba: numba is for 'cuda', not 'cpu'")
    assert isinstance(movers_for("cpu"), TorchMovers)
    with pytest.raises(RuntimeError, match=r"'native' cannot be had: no C\+\+ compiler"):
        movers_for("cpu", "native")
    with use("native"), pytest.raises(RuntimeError, match=r"use\('native'\) asks for .* no C\+\+ compiler"):
        movers_for("cpu")


def test_the_first_use_of_a_slower_one_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cp_fast.build.builder, "why_not", lambda device_type: "no C++ compiler")
    log_once.cache_clear()
    for _ in range(2):
        movers_for("cpu")
        select._choice.cache_clear()
    assert capfd.readouterr().err == (
        "cp-attention: on 'cpu' the kernels 'torch' move and merge, slower than 'native' ones (not native: no C++ "
        "compiler; not numba: numba is for 'cuda', not 'cpu'); CP_FAST_KERNELS=torch takes them without a word\n"
    )
    log_once.cache_clear()
    monkeypatch.setenv("LOCAL_RANK", "1")  # the first process of a node speaks for all
    movers_for("cpu")
    monkeypatch.delenv("LOCAL_RANK")
    log_once.cache_clear()
    monkeypatch.setenv(select.VARIABLE, "torch")
    movers_for("cpu")
    assert capfd.readouterr().err == ""


def test_a_compiler_that_is_not_there_is_no_reason_to_take_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    cp_fast.build.builder.why_not.cache_clear()
    with pytest.raises(ValueError, match="CXX is 'no-such-compiler'; it must name a C"):
        movers_for("cpu")
    with use("torch"):
        movers_for("cpu")


def test_a_build_that_fails_is_no_reason_to_take_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(device: str) -> None:
        raise RuntimeError("the build failed: error on line 3")

    monkeypatch.setattr(cp_fast.build.builder, "why_not", lambda device_type: None)
    monkeypatch.setattr("cp_fast.movers.native_movers.load", load)
    with pytest.raises(RuntimeError, match="the build failed"):
        movers_for("cpu")


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(select.VARIABLE, "torch")
    assert chosen("cpu") == ("torch", "CP_FAST_KERNELS=torch")
    monkeypatch.setenv(select.VARIABLE, "numba")
    with pytest.raises(RuntimeError, match=r"CP_FAST_KERNELS=numba asks for .* numba is for 'cuda'"):
        movers_for("cpu")
    with use("torch"):
        assert movers_for("cpu").name == "torch"
    monkeypatch.setenv(select.VARIABLE, "cutlass")
    with pytest.raises(ValueError, match="CP_FAST_KERNELS is 'cutlass'; it must be one of 'native', 'numba', 'torch'"):
        movers_for("cpu")


def test_names() -> None:
    with pytest.raises(ValueError, match="name is 'cutlass'"), use("cutlass"):
        pass
    with pytest.raises(ValueError, match="name is 'cutlass'"):
        movers_for("cpu", "cutlass")
    assert why_not("torch", "meta") is None
    assert set(select.NAMES) == {"native", "numba", "torch"}


def test_the_helpers_use_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(TorchMovers, "gather", lambda self, xs, rows: seen.append(len(xs)) or list(xs))
    x = torch.arange(8)
    with use("torch"):
        cp_fast.thd.thd_sequence_order_to_cp_rank_order((x, x), torch.tensor([0, 8]), 2)
    assert seen == [2]
