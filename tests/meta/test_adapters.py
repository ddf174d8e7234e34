"""The adapters: this project's are right on every level; those of libraries claim what their tables say, and say in one
sentence when the library is not there.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from conformance.adapters import flash_attn_shim
from conformance.adapters.band_tiles import crop
from conformance.adapters.peers import SupportTable, asked
from conformance.cli import app
from conformance.implementation import LoadError, load
from conformance.problems.capabilities import EVERYTHING
from conformance.record import LEVELS
from conformance.runner.run_tiers import Profile, run_tier
from conformance.runner.tiers import TIERS

pytestmark = pytest.mark.thorough

LOWER = [name for name, tier in TIERS.items() if tier.level != "schedule"]
OWN = ("conformance.adapters.cp_ref", "conformance.adapters.cp_fast:cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", OWN)
def test_own_packages_offer_every_level(name: str) -> None:
    assert load(name).levels == LEVELS


@pytest.mark.parametrize("tier", LOWER)
def test_cp_fast_is_right_on_the_lower_levels(tier: str) -> None:
    """test_problems plays the reference."""
    result = run_tier(load("conformance.adapters.cp_fast:cpu"), tier, EVERYTHING, Profile(10, derandomize=True))
    assert not result.smallest, result.smallest
    assert result.passed >= 10


@pytest.mark.parametrize("backend", ["fa4", "fa2", "cudnn"])
def test_a_backend_that_is_not_here_is_unsupported(backend: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("these backends may be here: there is a GPU")
    result = run_tier(
        load(f"conformance.adapters.cp_fast:{backend}"), "kernel", EVERYTHING, Profile(5, derandomize=True)
    )
    assert result.unsupported == result.run


def test_cropping_keeps_what_is_seen() -> None:
    """Every small tile, pair by pair."""
    sides = (None, *range(-5, 6))
    for n, m, left, right in product(range(1, 5), range(1, 5), sides, sides):
        seen = _seen(n, m, left, right)
        cut = crop(n, m, left, right)
        if cut is None:
            assert not seen
            continue
        rows, columns = range(n)[cut.rows], range(m)[cut.columns]
        inside = _seen(len(rows), len(columns), cut.left, cut.right)
        assert {(rows[i], columns[j]) for i, j in inside} == seen
        assert {i for i, _ in inside} == set(range(len(rows)))


def _seen(n: int, m: int, left: int | None, right: int | None) -> set[tuple[int, int]]:
    def sees(i: int, j: int) -> bool:
        offset = j - i - (m - n)
        return (left is None or offset >= -left) and (right is None or offset <= right)

    return {(i, j) for i in range(n) for j in range(m) if sees(i, j)}


CP = SimpleNamespace(cp_comm_type="p2p", layout="contiguous", size=2)
LENGTHS = torch.tensor([0, 4, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("axis", "word", "arguments"),
    [
        ("attn_mask_type", "causal", {"qkv_format": "thd", "attn_mask_type": "padding_causal"}),
        ("attn_mask_type", "no_mask", {"qkv_format": "thd", "attn_mask_type": "padding"}),
        ("attn_mask_type", "causal_bottom_right", {"attn_mask_type": "causal_bottom_right"}),
        ("window", "none", {"window_size": (-1, 5)}),  # under a causal mask the right side means nothing
        ("window", "both", {"window_size": (2, 5), "attn_mask_type": "no_mask"}),
        ("lengths", "cross", {"seqlen_q": 4, "seqlen_kv": 8}),
        ("sequences", "many", {"qkv_format": "thd", "cu_seqlens_q": LENGTHS}),
        ("padding", "padding", {"qkv_format": "thd", "cu_seqlens_q": LENGTHS, "cu_seqlens_q_padded": LENGTHS * 2}),
        ("areas", "some", {"qkv_format": "thd", "areas": torch.tensor([[0, 4, 0, 4, -1, 0]])}),
        ("return_lse", "yes", {"return_lse": True}),
    ],
)
def test_a_call_in_words(axis: str, word: str, arguments: dict[str, Any]) -> None:
    assert asked(CP, (2, 2, 8, 8), torch.bfloat16, torch.device("cpu"), arguments)[axis] == word


def test_claims_name_what_is_not_claimed_and_why() -> None:
    table = SupportTable(
        "lib 1", {"heads": ("equal", "grouped")}, {"window": "no window"}, (({"heads": "grouped"}, "not yet"),)
    )
    words = asked(CP, (2, 2, 8, 8), torch.bfloat16, torch.device("cpu"), {})
    assert table.why_not(words) == ""
    assert table.why_not(words | {"window": "left"}) == "lib 1: window left: no window"
    assert "not yet" in table.why_not(words | {"heads": "grouped"})


@pytest.mark.parametrize("name", ["ring_flash_attn", "yunchang", "transformer_engine", "magi_attention"])
def test_a_library_that_is_not_there_is_named(name: str) -> None:
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(LoadError, match=r"(?s)this adapter needs .*(pip install|https://github.com/SandAI-org)"):
        load(f"conformance.adapters.{name}")


def test_pytorch_is_refused_on_the_cpu() -> None:
    """By its table, and not by a crash in the middle."""
    impl = load("conformance.adapters.pytorch:flash")
    sizes = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.bfloat16}
    supported, reason = impl.supports(cp=CP, device=torch.device("cpu"), **sizes)
    assert not supported
    assert "sharding strategy" in reason
    assert impl.supports(cp=CP, device=torch.device("cuda"), **sizes) == (True, "")


@pytest.mark.parametrize("causal", [False, True])
def test_what_stands_in_for_flash_attn_computes_attention(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 6, 2, 8, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_shim.flash_attn_func(q, k, v, causal=causal)
    wide = (x.transpose(1, 2) for x in leaves)
    exact = torch.nn.functional.scaled_dot_product_attention(next(wide), next(wide), next(wide), is_causal=causal)
    torch.testing.assert_close(out, exact.transpose(1, 2))
    for got, want in zip(
        torch.autograd.grad(out, leaves, dout),
        torch.autograd.grad(exact.transpose(1, 2), leaves, dout),
        strict=True,
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_nothing_stands_in_for_flash_attn_after_an_adapter_was_loaded() -> None:
    before = {name: sys.modules.get(name) for name in ("flash_attn", "flash_attn.flash_attn_interface")}
    with flash_attn_shim.stood_in():
        interface = import_module("flash_attn.flash_attn_interface")
        assert import_module("flash_attn").flash_attn_func is interface.flash_attn_func
        assert find_spec("flash_attn") is not None  # which is an error where a module has no __spec__
    assert {name: sys.modules.get(name) for name in before} == before
    with pytest.raises(ZeroDivisionError), flash_attn_shim.stood_in():
        _ = 1 / 0
    assert {name: sys.modules.get(name) for name in before} == before


def test_the_command_line_says_that_a_library_is_missing() -> None:
    if find_spec("transformer_engine") is not None:
        pytest.skip("TransformerEngine is installed")
    result = CliRunner().invoke(app, ["--impl", "conformance.adapters.transformer_engine"])
    assert result.exit_code == 3
    assert "transformer_engine" in result.output


def test_the_adapter_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The complete example of docs/conformance/conformance.md: it is 30 lines at most, and right in what it claims."""
    text = (Path(__file__).parents[2] / "docs" / "conformance" / "conformance.md").read_text()
    code = text.partition("```python\n# my_attention.py\n")[2].partition("```")[0]
    assert 0 < len(code.splitlines()) <= 30
    (tmp_path / "my_attention.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)  # which the workers inherit
    arguments = ["--impl", "my_attention", "--cp-size", "2", "--tier", "logic", "--max-examples", "20"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "unsup" in result.output


# ---- MagiAttention's adapter, over gloo on what stands in for the library


IMPL = "tests.meta.zoo.magi_stand_in:sdpa"
NAMED = {
    "a tail behind each rank's rows, and a window": (
        "Problem(cp_size=2, sequences=[(12, 12, 12, 12), (7, 7, 7, 7)], layout='contiguous', qkv_format='thd', "
        "attn_mask_type='padding_causal', heads_q=4, heads_kv=2, window_size=(3, -1), dtype='float64'), "
        "tail_q=4, tail_kv=4, return_lse=True, return_max_logit=True"
    ),
    "a batch, without a causal mask": (
        "Problem(cp_size=2, sequences=[(8, 8, 8, 8), (8, 8, 8, 8)], layout='contiguous', attn_mask_type='no_mask', "
        "window_size=(2, 3), d_qk=24, d_v=24, dtype='float64'), deterministic=True, return_lse=True"
    ),
    "areas, and rows that see nothing": (
        "Problem(cp_size=2, sequences=[(16, 16, 16, 16)], layout='contiguous', qkv_format='thd', "
        "areas=((2, 9, 1, 12, 3, 1), (9, 16, 0, 16, -1, 0)), dtype='float64'), return_lse=True"
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_problems(name: str) -> None:
    play("--tier", "logic", "--repro", f"Case({NAMED[name]})")


def test_drawn_problems() -> None:
    said = play("--tier", "logic", "--tier", "probes", "--max-examples", "25")
    assert "right" in said


def play(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["--impl", IMPL, "--cp-size", "2", *arguments], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output
