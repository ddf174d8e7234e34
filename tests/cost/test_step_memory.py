"""The memory of a whole training step, predicted and measured, and `plan --predict --model`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cp_fast.tools.cli import app
from cp_fast.tools.cost import predict, read_machine
from cp_fast.tools.cost.predict import SAVED, ModelShape, step_memory
from cp_ref.schedules.problem import Problem, Sequence

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TOLERANCE = 0.05
QWEN3_4B = {"heads_q": 32, "heads_kv": 8, "d_qk": 128, "d_v": 128, "dtype": "bfloat16", "attn_mask_type": "causal"}


def gib(tokens: int, layers: int, saved: str, ranks: int = 2) -> float:
    problem = Problem(ranks, (Sequence(tokens, tokens, tokens, tokens),), layout="dual_chunk", **QWEN3_4B)
    attention = predict(problem, read_machine("h200-nvlink")).peak_bytes
    model = ModelShape(layers, 2560, 9728, 151936)
    return step_memory(problem, attention, model, saved=saved, sharded_over=ranks).total / 2**30


def test_the_record_is_predicted_within_five_per_cent() -> None:
    runs = json.loads((RESULTS / "long_context_2x_h200.json").read_text())["runs"]
    for run in runs:
        if "peak_gib" in run and run["documents"] == 1:
            predicted = gib(run["tokens"], 8, "offload" if run["offload"] else "attention")
            assert predicted == pytest.approx(run["peak_gib"], rel=TOLERANCE)


def test_saving_less_takes_less_and_more_ranks_too() -> None:
    sizes = {saved: gib(131072, 36, saved) for saved in SAVED}
    assert sizes["layers"] <= sizes["offload"] < sizes["attention"] < sizes["all"]
    results = 34 * 65536 * 32 * (128 * 2 + 4) / 2**30  # of all layers but the two whose results are on the GPU
    assert sizes["attention"] - sizes["offload"] == pytest.approx(results)
    assert gib(131072, 36, "offload", 4) < 0.6 * sizes["offload"]


def test_the_page_has_the_prediction() -> None:
    page = (RESULTS.parents[1] / "docs" / "how_to" / "long_context.md").read_text()
    for tokens in (65536, 131072, 262144, 524288):
        assert f"| {tokens:,} | {' | '.join(f'{gib(tokens, 36, saved):.0f}' for saved in SAVED)} |" in page


@pytest.mark.parametrize("text", ["36,2560,9728", "36,2560,9728,x", "0,1,1,1", "", "1,1,1,1,1"])
def test_a_model_is_four_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="layers,hidden,ffn,vocabulary"):
        ModelShape.read(text)


def test_the_command_adds_up() -> None:
    words = ["plan", "--predict", "--cp-size", "2", "--seqlen", "65536", "--heads-q", "32", "--heads-kv", "8"]
    words += ["--d-qk", "128", "--dtype", "bfloat16", "--layout", "dual_chunk"]
    said = CliRunner().invoke(app, [*words, "--model", "8,2560,9728,151936", "--saved", "attention"])
    assert said.exit_code == 0, said.output
    sizes = [
        float(size) for size in re.findall(r" (\d+\.\d\d) │$", said.output.split("GiB of a rank")[1], re.MULTILINE)
    ]
    assert sizes[-1] == pytest.approx(sum(sizes[:-1]), abs=0.04)
    for more, error in (
        (["--model", "8,2560"], "layers,hidden,ffn,vocabulary"),
        (["--saved", "all"], "--saved is all, which --predict without --model does not look at"),
        (["--model", "8,2560,9728,151936", "--saved", "some"], "--saved"),
    ):
        refused = CliRunner().invoke(app, [*words, *more])
        assert refused.exit_code == 2
        assert error in refused.stderr
