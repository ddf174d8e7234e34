"""Backend fa2 on both its kernels, without a GPU: stand-ins with the libraries' rules; and which of them is chosen."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cp_fast.kernels.attention import choose_backend as backends
from cp_fast.kernels.attention import fa2
from cp_fast.kernels.attention import fa2 as built_in
from cp_fast.kernels.attention import fa2 as fa2_backend
from cp_fast.kernels.attention import fa2 as flash_attn_adapter
from cp_fast.kernels.attention import fa2 as varlen
from cp_fast.kernels.attention.backend_probe import probe
from cp_fast.kernels.attention.backend_protocol import BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.choose_backend import by_name, missing_in, variants
from cp_fast.kernels.attention.fa2 import BUILT_IN, PACKAGE, Fa2Backend
from cp_fast.kernels.attention.varlen_batch import Cumulative, VarlenBatch
from cp_fast.tools.cli import app
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature, Unsupported
from tests.cp_fast.backends.fa2_stand_ins import Call, fake_aten, fake_package

CPU = by_name("cpu")


def forget() -> None:
    """What was found about the package."""
    flash_attn_adapter._found.cache_clear()
    fa2.installed.cache_clear()
    fa2._wrong_here.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put a package called flash_attn in place; a GPU that runs it is pretended."""

    def do(package: ModuleType | None, interface: ModuleType | None = None) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn", package)  # pyright: ignore[reportArgumentType]  # None: absent
        name = "flash_attn.flash_attn_interface"
        monkeypatch.delitem(sys.modules, name, raising=False)
        if interface is not None:
            monkeypatch.setitem(sys.modules, name, interface)
        forget()

    for module in (flash_attn_adapter, built_in):
        monkeypatch.setattr(module, "ampere_why_not", lambda: None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(fa2, "probe", lambda backend, device: None)  # right, on that GPU
    yield do
    monkeypatch.undo()
    forget()


def package(version: str | None, folder: Path | None = None) -> ModuleType:
    """The package `flash_attn`; its modules are files of the folder."""
    module = ModuleType("flash_attn")
    module.__path__ = [str(folder)] if folder else []
    if version is not None:
        vars(module)["__version__"] = version
    return module


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]) -> tuple[Fa2Backend, list[Call]]:
    """The backend on stand-ins for its kernels, and the list of the backwards' calls."""
    if name == "built in":
        return BUILT_IN, fake_aten(monkeypatch)
    calls: list[Call] = []
    install(package("2.8.3.post2"), fake_package(calls))
    return PACKAGE, calls


BOTH = pytest.mark.parametrize("name", ["built in", "package"])


@BOTH
def test_every_window_is_asked_for_as_the_kernels_take_it(name: str, monkeypatch: Any, install: Any) -> None:
    backend, _ = stand_in(name, monkeypatch, install)
    assert probe(backend, "cpu") is None

    def naive(s: VarlenBatch, options: LaunchOptions) -> varlen.Varlen:
        left, right = (-1 if side is None else side for side in (s.left, s.right))
        return varlen.Varlen(s.device_cu_q, s.device_cu_kv, max(2, s.max_q), s.max_kv, left, right, options.scores)

    monkeypatch.setattr(fa2_backend, "varlen_arguments", naive)
    problem = probe(backend, "cpu")
    assert problem is not None
    assert "window (None, 22)" in problem


@pytest.mark.parametrize(("left", "right"), [(-1, None), (None, -2), (3, -1)])
def test_negative_sides_are_refused(left: int | None, right: int | None) -> None:
    segments = VarlenBatch.pack([4], [9], left, right)
    x = torch.zeros(9, 1, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"'fa2'.*crop"):
        BUILT_IN.forward(x[:4], x, x, segments, LaunchOptions(ScoreSpec(1.0)))


def test_what_the_features_exclude_is_refused() -> None:
    segments = VarlenBatch.pack([4], [4], None, 0)
    x = torch.zeros(4, 1, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="softcap"):
        BUILT_IN.forward(x, x, x, segments, LaunchOptions(ScoreSpec(1.0, softcap=2.0)))
    operands = BackwardOperands(x, x, x, x, x, torch.zeros(1, 4), None)
    with pytest.raises(ValueError, match="softcap"):
        BUILT_IN.backward([operands], segments, LaunchOptions(ScoreSpec(1.0, softcap=2.0)))
    wide = torch.zeros(4, 1, 264, dtype=torch.float16)
    for backend in (BUILT_IN, PACKAGE):
        with pytest.raises(ValueError, match="up to 256, got d_qk=264"):
            backend.forward(wide, wide, x, segments, LaunchOptions(ScoreSpec(1.0)))


def test_more_segments_than_a_grid_has_are_refused() -> None:
    with pytest.raises(ValueError, match="up to 65535 segments a launch, got 65536"):
        varlen.varlen_arguments(VarlenBatch.pack([1] * 65536, [1] * 65536, None, 0), LaunchOptions(ScoreSpec(1.0)))


@pytest.mark.parametrize(("d_qk", "d_v"), [(24, 24), (13, 13), (24, 8), (8, 24)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("name", "softcap"), [("built in", 0.0), ("package", 0.0), ("package", 0.7)])
def test_both_passes(
    name: str, softcap: float, d_qk: int, d_v: int, deterministic: bool, monkeypatch: Any, install: Any
) -> None:
    """Padded head dims, the gradient of lse, softcap, and one launch a segment where it is deterministic."""
    backend, calls = stand_in(name, monkeypatch, install)
    segments = VarlenBatch.pack([11, 3], [15, 3], 6, 0)
    q, k, v, dout = (
        torch.randn(rows, heads, d) for rows, heads, d in ((14, 4, d_qk), (18, 1, d_qk), (18, 1, d_v), (14, 4, d_v))
    )
    numbers = LaunchOptions(ScoreSpec(0.4, softcap))
    want, got = (b.forward(q, k, v, segments, numbers) for b in (CPU, backend))
    torch.testing.assert_close((got.out, got.lse), (want.out, want.lse), rtol=1e-5, atol=1e-5)
    args, options = (dout, q, k, v, want.out, want.lse), numbers._replace(deterministic=deterministic)
    for dlse in (None, torch.randn(4, 14)):
        right, computed = (b.backward([BackwardOperands(*args, dlse)], segments, options) for b in (CPU, backend))
        torch.testing.assert_close(computed, right, rtol=1e-5, atol=1e-5)
        assert all(x.is_contiguous() for x in computed)
    assert [c.deterministic for c in calls] == ([True] * 6 if deterministic else [False] * 3)
    assert [c.segments for c in calls] == ([1] * 6 if deterministic else [2] * 3)


@BOTH
def test_segments_of_one_row(name: str, monkeypatch: Any, install: Any) -> None:
    """A launch of nothing else would take another path where heads are grouped, and is not said to be one."""
    backend, calls = stand_in(name, monkeypatch, install)
    segments = VarlenBatch.pack([1, 1], [3, 5], None, None)
    q, k, v, dout = (torch.randn(rows, heads, 8) for rows, heads in ((2, 4), (8, 2), (8, 2), (2, 4)))
    numbers = LaunchOptions(ScoreSpec(0.4))
    want, got = (b.forward(q, k, v, segments, numbers) for b in (CPU, backend))
    torch.testing.assert_close((got.out, got.lse), (want.out, want.lse), rtol=1e-5, atol=1e-5)
    right, computed = (
        b.backward([BackwardOperands(dout, q, k, v, want.out, want.lse, None)], segments, numbers)
        for b in (CPU, backend)
    )
    torch.testing.assert_close(computed, right, rtol=1e-5, atol=1e-5)
    assert calls[0].max_q == 2


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_determinism_of_the_built_in_kernels_is_a_flag_that_is_put_back(
    before: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_aten(monkeypatch)
    segments = VarlenBatch.pack([4], [4], None, 0)
    x = torch.zeros(4, 1, 8, dtype=torch.float32)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        args = BackwardOperands(x, x, x, x, x, torch.zeros(1, 4), None)
        BUILT_IN.backward([args], segments, LaunchOptions(ScoreSpec(1.0), deterministic=True))
        assert [c.deterministic for c in calls] == [True]
        flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        assert flags == before
    finally:
        torch.use_deterministic_algorithms(False)


def bounded(lengths_q: list[int], lengths_kv: list[int], left: int | None, right: int | None) -> VarlenBatch:
    """Segments of a plan with room for 4 of them, of 40 rows and 50 columns in all."""
    cu_q, cu_kv = (
        np.cumsum([0, *lengths, *[0] * (4 - len(lengths))]).astype(np.int32) for lengths in (lengths_q, lengths_kv)
    )
    tables = torch.from_numpy(cu_q), torch.from_numpy(cu_kv)
    return VarlenBatch(Cumulative(cu_q, 40), Cumulative(cu_kv, 50), left, right, tables[0], tables[1])


WINDOWS = pytest.mark.parametrize(
    ("left", "right"), [(None, None), (None, 0), (3, 0), (None, 22), (45, 22), (60, None)]
)


@WINDOWS
def test_an_updated_plan_changes_no_number_that_a_graph_has_baked_in(left: int | None, right: int | None) -> None:
    """Only the tables on the device differ from batch to batch."""
    arguments = [
        varlen.varlen_arguments(bounded(*lengths, left, right), LaunchOptions(ScoreSpec(0.4)))
        for lengths in (([30], [10]), ([5, 9, 2], [5, 20, 2]), ([], []), ([40], [50]))
    ]
    assert len({numbers[2:] for numbers in arguments}) == 1
    assert arguments[0].max_q >= 40
    assert arguments[0].max_k >= 50


@WINDOWS
@BOTH
def test_segments_of_length_zero_and_rows_behind_the_last(
    name: str, left: int | None, right: int | None, monkeypatch: Any, install: Any
) -> None:
    """What a plan in place launches: the real rows are those of a plan for this batch alone."""
    backend, calls = stand_in(name, monkeypatch, install)
    lengths_q, lengths_kv = [5, 30], [9, 30] if right == 0 else [9, 20]
    short, long = VarlenBatch.pack(lengths_q, lengths_kv, left, right), bounded(lengths_q, lengths_kv, left, right)
    q, k, v, dout = (torch.randn(rows, heads, 8) for rows, heads in ((40, 2), (50, 1), (50, 1), (40, 2)))
    n, m = short.cu_q[-1], short.cu_kv[-1]
    numbers = LaunchOptions(ScoreSpec(0.4))
    want = CPU.forward(q[:n], k[:m], v[:m], short, numbers)
    got = backend.forward(q, k, v, long, numbers)
    torch.testing.assert_close((got.out[:n], got.lse[:, :n]), (want.out, want.lse), rtol=1e-5, atol=1e-5)
    out, lse = torch.randn(40, 2, 8), torch.randn(2, 40)
    out[:n], lse[:, :n] = want.out, want.lse
    dlse = torch.randn(2, 40)
    for d in (None, dlse):
        some = BackwardOperands(dout[:n], q[:n], k[:m], v[:m], want.out, want.lse, None if d is None else d[:, :n])
        right_ones = CPU.backward([some], short, numbers)
        all_of_it = backend.backward([BackwardOperands(dout, q, k, v, out, lse, d)], long, numbers)
        for x, y, rows in zip(all_of_it, right_ones, (n, m, m), strict=True):
            torch.testing.assert_close(x[:rows], y, rtol=1e-5, atol=1e-5)
    assert {c.segments for c in calls} == {4}
    with pytest.raises(Unsupported, match=r"max_sequences.*\n.*lacks deterministic"):
        backend.backward([BackwardOperands(dout, q, k, v, out, lse, None)], long, numbers._replace(deterministic=True))


def test_plans_in_place_have_no_determinism() -> None:
    for backend in (BUILT_IN, PACKAGE):
        served = variants(backend)[1]
        assert served.features == backend.features - {Feature.DETERMINISTIC} | {Feature.IN_PLACE}
        assert missing_in(backend, IN_PLACE | {Feature.MAX_LOGIT}) == frozenset()
        assert len(missing_in(backend, IN_PLACE | {Feature.DETERMINISTIC})) == 1


@pytest.mark.parametrize(("there", "extra", "name"), [
    ("fa4 cudnn fa2 torch", set(), "fa4"),
    ("fa4 cudnn fa2 torch", {Feature.DETERMINISTIC}, "fa4"),
    ("cudnn fa2 torch", set(), "fa2"),  # cudnn comes first, and cannot
    ("cudnn fa2 torch", {Feature.MAX_LOGIT}, "fa2"),
    ("cudnn fa2 torch", {Feature.DETERMINISTIC}, "torch"),
    ("fa4 cudnn fa2 torch", {Feature.FLOAT32}, "torch"),
])  # fmt: skip
def test_auto_takes_a_library_that_serves_plans_in_place(
    there: str, extra: set[Feature], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only(there, monkeypatch)
    chosen = backends.choose(IN_PLACE | extra, "auto")
    assert chosen.name == name
    assert IN_PLACE | extra <= chosen.features
    assert chosen is backends.choose(IN_PLACE | extra, name)


@pytest.mark.parametrize(("backend", "extra"), [("cudnn", set()), ("fa2", {Feature.DETERMINISTIC})])
def test_what_plans_in_place_do_not_have(backend: str, extra: set[Feature], monkeypatch: pytest.MonkeyPatch) -> None:
    _only("fa4 cudnn fa2 torch", monkeypatch)
    assert backends.choose((IN_PLACE | extra) - {Feature.IN_PLACE}, backend)
    with pytest.raises(Unsupported, match=r"(?s)lacks .*make a plan for each batch") as refusal:
        backends.choose(IN_PLACE | extra, backend)
    assert all(refusal.value.missing.values())


def _only(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only these libraries work."""
    monkeypatch.setattr(backends, "installed", lambda backend: backend)
    for backend in backends.BACKENDS:
        reason = None if backend.name in there.split() else "it is not here"
        monkeypatch.setattr(backend, "why_not", lambda reason=reason: reason)


IN_PLACE = frozenset({Feature.CUDA, Feature.GQA, Feature.IN_PLACE})
SOFTCAP = frozenset({Feature.CUDA, Feature.BFLOAT16, Feature.SOFTCAP})
PLAIN = SOFTCAP - {Feature.SOFTCAP}


def test_the_package_is_taken_where_it_works(install: Any) -> None:
    install(package("2.8.3.post2"), fake_package([]))
    assert by_name("fa2") is PACKAGE
    assert backends.choose(PLAIN, "fa2") is PACKAGE
    assert backends.choose(SOFTCAP, "fa2") is PACKAGE
    assert backends.remark_on(PACKAGE) == "the flash-attn package, 2.8.3.post2"


@pytest.mark.parametrize("there", ["nothing", "flash-attn-4 alone"])
def test_without_the_package_its_absence_is_no_fault(there: str, install: Any, tmp_path: Path) -> None:
    (tmp_path / "cute").mkdir()
    (tmp_path / "cute" / "interface.py").touch()
    install(None if there == "nothing" else package(None, tmp_path))
    with warnings.catch_warnings(action="error"):
        assert backends.choose(PLAIN, "fa2") is BUILT_IN
    assert PACKAGE.why_not() == "it is not installed"
    assert backends.remark_on(BUILT_IN) == (
        f"PyTorch's built-in kernels, {torch.__version__}; no softcap: the flash-attn package is not installed"
    )
    with pytest.raises(Unsupported, match="fa2 lacks softcap"):
        backends.choose(SOFTCAP, "fa2")


UNDEFINED = "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEab')"
BROKEN = pytest.mark.parametrize(
    ("version", "source", "reason"),
    [
        ("2.8.3", UNDEFINED, "ImportError: flash_attn_2_cuda.so: undefined symbol"),
        ("2.8.3", "import flash_attn_2_cuda_that_is_not_there", "ModuleNotFoundError: No module named"),
        ("2.7.4.post1", "", "it is release 2.7.4.post1, and this backend is written for 2.8.3 and later, below 2.9"),
        ("2.9.0", "", "it is release 2.9.0"),
        (None, "", "it is release unknown"),
    ],
)


@BROKEN
def test_a_broken_package_is_named(version: str | None, source: str, reason: str, install: Any, tmp_path: Path) -> None:
    (tmp_path / "flash_attn_interface.py").write_text(source)
    install(package(version, tmp_path))
    with pytest.warns(RuntimeWarning, match=f"is installed, but .*{reason}"):
        assert backends.choose(PLAIN, "fa2") is BUILT_IN
    with warnings.catch_warnings(action="error"):
        assert backends.choose(PLAIN, "fa2") is BUILT_IN  # said once
    assert reason in str(PACKAGE.why_not())
    assert f"no softcap: the flash-attn package does not work: {reason[:20]}" in backends.remark_on(BUILT_IN).replace(
        "importing flash_attn.flash_attn_interface failed: ", ""
    )


def fails(backend: Any, device: str) -> str:
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (lambda backend, device: f"backend {backend.name!r}, row 3 sees 5.00 columns instead of 4", "row 3 sees 5.00"),
        (fails, "launching it failed: RuntimeError: no kernel image"),
    ],
)
def test_a_package_that_is_wrong_here_is_not_taken(check: Any, reason: str, install: Any, monkeypatch: Any) -> None:
    install(package("2.8.3"), fake_package([]))
    monkeypatch.setattr(fa2, "probe", check)
    with pytest.warns(RuntimeWarning, match=f"is installed, but .*{reason}"):
        assert backends.choose(PLAIN, "fa2") is BUILT_IN
    assert reason in backends.remark_on(BUILT_IN)
    with pytest.raises(Unsupported, match=f"(?s)fa2 lacks softcap.*{reason}"):
        backends.choose(SOFTCAP, "fa2")


def test_a_refused_softcap_says_why_the_package_does_not_work(install: Any, tmp_path: Path) -> None:
    (tmp_path / "flash_attn_interface.py").write_text(UNDEFINED)
    install(package("2.8.3", tmp_path))
    with pytest.warns(RuntimeWarning), pytest.raises(Unsupported, match=r"(?s)fa2 lacks softcap.*undefined symbol"):
        backends.choose(SOFTCAP, "fa2")


def test_doctor_says_whose_kernels(monkeypatch: Any, install: Any) -> None:
    calls: list[Call] = []
    install(package("2.8.3.post2"), fake_package(calls))
    from cp_fast.tools.cli.doctor import doctor

    monkeypatch.setattr(sys.modules[doctor.__module__], "probe", lambda backend, device: None)
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    said = " ".join(runner.invoke(app, ["doctor"]).output.split())
    assert "the flash-attn package, 2.8.3.post2" in said


def test_without_a_gpu_the_package_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flash_attn_adapter, built_in):
        monkeypatch.setattr(module, "ampere_why_not", lambda: "PyTorch sees no CUDA device")
    monkeypatch.setattr(flash_attn_adapter.importlib, "import_module", lambda name: pytest.fail(f"imports {name}"))
    forget()
    assert by_name("fa2") is BUILT_IN
    assert by_name("fa2").why_not() == "PyTorch sees no CUDA device"
    forget()


def test_the_stand_ins_find_a_wrong_backward(monkeypatch: Any, install: Any) -> None:
    """The checks above can fail: without its slope a softcap's gradients are others."""
    backend, _ = stand_in("package", monkeypatch, install)
    segments = VarlenBatch.pack([6], [6], None, 0)
    q, k, v, dout = torch.randn(4, 6, 1, 8).unbind()
    part = CPU.forward(q, k, v, segments, LaunchOptions(ScoreSpec(1.0, softcap=0.7)))
    operands = BackwardOperands(dout, q, k, v, part.out, part.lse, None)
    right = CPU.backward([operands], segments, LaunchOptions(ScoreSpec(1.0, softcap=0.7)))
    wrong = backend.backward([operands], segments, LaunchOptions(ScoreSpec(1.0)))
    assert not torch.allclose(right.dq, wrong.dq, atol=1e-3)
    assert [b - a for a, b in pairwise(segments.cu_q)] == [6]
