"""Backend fa4's way on the host, on a CPU: which kernel a call takes, and that every way of training ends right."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cp_fast as cp
import cp_ref
from cp_fast.build.cache import own_folder
from cp_fast.checkpoint import save_attention
from cp_fast.kernels.attention.fa4 import fa4_recorded
from cp_fast.kernels.attention.fa4.fa4_recorded import ENABLED, FOLDER, keep_on_disk, kept_where, says_when_it_compiles
from cp_fast.kernels.attention.fa4.scores.launch_program import _traced
from cp_fast.log import log_once
from tests.dist.workers import Processes
from tests.fa4_dry import Kernel, dry

Tensor = torch.Tensor
Step = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]

WAYS: dict[str, Step] = {
    "plain": lambda layer, x: layer(x),
    "checkpointed": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "save_attention": lambda layer, x: checkpoint(layer, x, use_reentrant=False, context_fn=save_attention()),
    "offload": lambda layer, x: checkpoint(layer, x, use_reentrant=False, context_fn=save_attention(offload=True)),
    "saved on the host": lambda layer, x: _with_hooks(layer, x),
    "compiled": lambda layer, x: torch.compile(layer, backend="aot_eager")(x),
}


def _with_hooks(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return layer(x)


def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, table: Tensor) -> Tensor:
    return score + table[h] * ((q_idx - kv_idx) % 5)


SCORES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # Arguments of the problem, and of each call.
    "plain": ({}, {}),
    "softcap": ({"softcap": 3.0}, {}),
    "ALiBi": ({}, {"alibi_slopes": torch.tensor([0.5, 0.1, 0.3, 0.2])}),
    "score_mod": (
        {"score_mod": biased, "softcap": 2.0},
        {"aux_tensors": {"table": torch.tensor([0.5, -1.0, 2.0, 1.0])}},
    ),
    "dropout": ({"dropout_p": 0.3}, {"dropout_seed": 7}),
}
KINDS = [
    pytest.param(name, marks=[] if name in ("plain", "ALiBi") else [pytest.mark.thorough], id=name) for name in SCORES
]
SHAPE = {"batch_size": 2, "seqlen_q": 24, "heads_q": 4, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float64}


def steps(given: tuple[dict[str, Any], dict[str, Any]], planned: bool) -> dict[str, tuple[Tensor, Tensor, set[Kernel]]]:
    """Each way: the layer's result, the gradient of its input, and the kernels that it took. Of one rank of a group."""
    problem, of_call = given
    found: dict[str, tuple[Tensor, Tensor, set[Kernel]]] = {}
    group = torch.distributed.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    weight, x = (torch.randn(n, 32, dtype=torch.float64, generator=generator) for n in (64, 24))
    x = x.view(2, 12, 32)
    with dry() as taken:
        for name, way in WAYS.items():
            taken.clear()
            _traced.cache_clear()
            context = cp.ContextParallel(group)
            plan = cp.make_plan(cp=context, device="cpu", **SHAPE, **problem) if planned else None
            how = of_call if planned else {**problem, **of_call}

            def layer(x: Tensor, context: Any = context, plan: Any = plan, how: Any = how) -> Tensor:
                q, k, v = (x @ weight.T).unflatten(-1, (8, 8)).split([4, 2, 2], -2)
                return cp.attention(q, k, v, cp=context, plan=plan, **how).flatten(-2)

            leaf = x.clone().requires_grad_()
            out = way(layer, leaf)
            out.square().sum().backward()
            assert leaf.grad is not None
            found[name] = out.detach(), leaf.grad, set(taken)
            torch.compiler.reset()
    return found


@pytest.fixture(scope="module")
def done(two: Processes) -> Callable[[str, bool], list[Any]]:
    known: dict[tuple[str, bool], list[Any]] = {}

    def of(scores: str, planned: bool) -> list[Any]:
        if (scores, planned) not in known:
            known[scores, planned] = two.run(steps, SCORES[scores], planned)
            for one in known[scores, planned]:
                if isinstance(one, Exception):
                    raise one
        return known[scores, planned]

    return of


@pytest.mark.parametrize("planned", [False, True], ids=["without a plan", "with a plan"])
@pytest.mark.parametrize("scores", KINDS)
@pytest.mark.one_in(3)
def test_every_way_computes_the_same(done: Any, scores: str, planned: bool) -> None:
    """Bit for bit what the plain step does, on each rank."""
    for found in done(scores, planned):
        out, grad, _ = found["plain"]
        for name, (other, other_grad, _) in found.items():
            assert torch.equal(out, other), name
            assert torch.equal(grad, other_grad), name


@pytest.mark.parametrize("planned", [False, True], ids=["without a plan", "with a plan"])
@pytest.mark.parametrize("scores", KINDS)
@pytest.mark.one_in(3)
def test_kernels(done: Any, scores: str, planned: bool) -> None:
    """A plain call takes plain kernels in every way, and other calls take those with a program. All ways take the same
    ones; compiled, the same.
    """
    for found in done(scores, planned):
        for name, (_, _, kernels) in found.items():
            assert kernels == found["plain"][2], name
            assert {one.name for one in kernels} == {"forward", "backward"}
            assert {bool(one.program) for one in kernels} == {scores not in ("plain", "softcap")}, name


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_numbers_are_those_of_the_oracle(scores: str, qkv_format: str) -> None:
    """All the arguments of launches are right: PyTorch computes the oracle's numbers from them."""
    problem, of_call = SCORES[scores]
    torch.manual_seed(0)
    packed = {
        "qkv_format": "thd",
        "cu_seqlens_q": torch.tensor([0, 20, 28, 48], dtype=torch.int32),
        "window_size": (9, 0),
    }
    how: dict[str, Any] = packed if qkv_format == "thd" else {}
    shape = (48,) if how else (2, 24)
    q, k, v, dout = (torch.randn(*shape, h, d, dtype=torch.float64) for h, d in ((4, 12), (2, 12), (2, 10), (4, 10)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, _, _ = cp_ref.dense_attention(*leaves, **how, **problem, **of_call)
    expected.backward(dout)

    def rank(member: Any) -> list[Tensor]:
        context = cp.ContextParallel(member)
        cut = {"cu_seqlens_padded": how["cu_seqlens_q"]} if how else {}
        mine = [cp.shard(x, cp=context, uneven=True, **cut) if False else x for x in (q, k, v, dout)]
        mine = [cp.shard(x, cp=context, qkv_format=qkv_format, **cut) for x in mine]
        local = [x.clone().requires_grad_() for x in mine[:3]]
        out = cp.attention(*local, cp=context, **how, **problem, **of_call)
        out.backward(mine[3])
        grads = [x.grad for x in local]
        return [
            cp.unshard(x.detach(), cp=context, qkv_format=qkv_format, **cut) for x in (out, *grads) if x is not None
        ]

    with dry(), torch.autograd.set_multithreading_enabled(False):
        for results in cp_ref.SimGroup(2).run(rank):
            for got, want in zip(results, (expected, *(x.grad for x in leaves)), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CP_ATTENTION_CACHE", str(tmp_path / "builds"))
    for name in (ENABLED, FOLDER):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)
    return tmp_path / "builds" / "flash_attn_4"


def test_they_are_kept_beside_our_own_builds(folder: Path) -> None:
    keep_on_disk()
    assert (os.environ[ENABLED], os.environ[FOLDER], kept_where()) == ("1", str(folder), str(folder))
    assert folder.is_dir()


def test_what_the_user_set_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLED, "0")
    keep_on_disk()
    assert FOLDER not in os.environ
    assert "every process compiles anew" in kept_where()


def test_a_library_that_is_imported_already_has_read_its_variables(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute.cache_utils", ModuleType("cache_utils"))
    keep_on_disk()
    assert ENABLED not in os.environ


def open_to_all(path: Path) -> None:
    path.mkdir(exist_ok=True)
    path.chmod(0o777)


def a_link(path: Path) -> None:
    path.rmdir()
    path.symlink_to(path.parent.parent)


@pytest.mark.parametrize("harm", [lambda x: open_to_all(x.parent), open_to_all, a_link])
def test_a_folder_that_others_could_write_to_is_not_used(folder: Path, harm: Callable[[Path], None]) -> None:
    own_folder(folder.name)
    harm(folder)
    keep_on_disk()
    assert ENABLED not in os.environ


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o777])
def test_its_folder_is_this_users_alone_whatever_the_umask(folder: Path, mask: int) -> None:
    """The one that `doctor` makes first too: builds find the folder of all as they need it."""
    before = os.umask(mask)
    try:
        keep_on_disk()
    finally:
        os.umask(before)
    assert os.environ[FOLDER] == str(folder)
    assert [stat.S_IMODE(x.stat().st_mode) for x in (folder, folder.parent)] == [0o700, 0o700]
    assert own_folder() == folder.parent


def test_a_compilation_is_said_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    keep_on_disk()
    monkeypatch.setattr(fa4_recorded, "_LONG", 0.0)
    log_once.cache_clear()
    launch = SimpleNamespace(compile_cache=SimpleNamespace(cache={}))
    for key in (1, 1, 2):
        with says_when_it_compiles(launch):
            launch.compile_cache.cache[key] = "kernel"
    said = capsys.readouterr().err
    assert said.count("compiles its kernels") == 1
    assert str(folder) in said
