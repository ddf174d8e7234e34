"""The classes of transformers that are used most, by the program that plays all of them, and that program itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parts import sweep_cases
from benchmarks.parts.architecture_tables import RECORD
from benchmarks.parts.performance_tables import RESULTS
from benchmarks.sweep import Player, read_record, write_record

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
from benchmarks.parts.tiny_models import shrunk, tiny_model  # noqa: E402

USED = {  # hybrids have a file of their own
    "causal": "Llama Mistral Mixtral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Gemma Gemma2 GptOss DeepseekV3 Glm4Moe "
    "Phi3 Olmo2 Cohere2 Granite OPT GPTNeoX SmolLM3",
    "masked": "Bert Roberta XLMRoberta ModernBert DistilBert Electra",
    "tokens": "Bert Llama Qwen2 Roberta",
    "sequences": "Llama Qwen2 Mistral",
    "questions": "Llama Bert",
    "images": "Qwen2_5_VL Qwen3VL Llava Idefics3 Molmo2 PaliGemma",
}
ENDS = {
    "causal": "ForCausalLM",
    "masked": "ForMaskedLM",
    "tokens": "ForTokenClassification",
    "sequences": "ForSequenceClassification",
    "questions": "ForQuestionAnswering",
    "images": "ForConditionalGeneration",
}
FORTY = [(f"{name}{ENDS[task]}", task) for task, names in USED.items() for name in names.split()]
QUICK = ("LlamaForCausalLM", "RobertaForMaskedLM", "LlamaForSequenceClassification", "LlamaForQuestionAnswering")


@pytest.mark.parametrize(
    ("name", "task"),
    [pytest.param(name, task, marks=() if name in QUICK else pytest.mark.thorough) for name, task in FORTY],
)
def test_a_class_is_right_over_ranks(name: str, task: str) -> None:
    found = sweep_cases.play(name, task)
    assert found["verdict"] == "right", found
    assert found.get("refused in", {}) == {}


def test_the_record_has_all_classes_and_none_is_wrong() -> None:
    head, record = read_record(RESULTS / RECORD)
    assert set(record) == set(sweep_cases.classes())
    assert head["versions"]["transformers"] == transformers.__version__
    assert [name for name, one in record.items() if one["verdict"] in ("wrong", "raised")] == []
    assert [name for name, _ in FORTY if record[name]["verdict"] != "right"] == []


def test_a_small_configuration_has_each_kind_of_layer_and_thresholds_that_a_batch_reaches() -> None:
    for name in ("Gemma3", "Qwen3Next", "Llama4", "Lfm3", "NemotronH", "Cohere2", "DeepseekV3"):
        kind = getattr(transformers, f"{name}ForCausalLM")
        small, default = (x.get_text_config() for x in (shrunk(kind), kind.config_class()))
        assert set(getattr(small, "layer_types", ())) == set(getattr(default, "layer_types", ()))
        assert set(getattr(small, "mlp_layer_types", None) or ()) == set(
            getattr(default, "mlp_layer_types", None) or ()
        )
        assert (getattr(small, "sliding_window", None) or 0) < min(sweep_cases.ROWS)
    assert shrunk(transformers.Llama4ForCausalLM).floor_scale < sweep_cases.ROWS[1]
    assert sum(w.numel() for w in tiny_model("LlamaForCausalLM").parameters()) < 50_000


class Shifted(torch.nn.Module):
    """A layer that adds a little of the token before."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.01 * x.cumsum(1)


def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is twice too large on one rank, positions of a slice, and an error that is no refusal."""
    made = sweep_cases.rank_of

    def doubled(model: Any, task: str, rows: Any, context: Any, learns: bool) -> Any:
        found = made(model, task, rows, context, learns)
        if context.rank == 0 and rows.kind == "packed" and context.layout == "balanced":
            found.grads["model.norm.weight"] *= 2
        return found

    monkeypatch.setattr(sweep_cases, "rank_of", doubled)
    found = sweep_cases.play("LlamaForCausalLM", "causal")
    assert found["verdict"] == "wrong"
    assert "gradients in packed, balanced, model.norm.weight" in found["message"]

    def raising(*_: Any) -> Any:
        raise KeyError("_no_such_entry")

    monkeypatch.setattr(sweep_cases, "rank_of", raising)
    found = sweep_cases.play("LlamaForCausalLM", "causal")
    assert found["verdict"] == "raised"
    assert "_no_such_entry" in found["message"]


def test_refusals_are_told_from_classes_that_cannot_run() -> None:
    found = sweep_cases.play("T5ForQuestionAnswering", "questions")
    assert (found["verdict"], "has an encoder and a decoder" in found["message"]) == ("refused", True)
    found = sweep_cases.play("LlamaForCausalLM", "causal", hidden_size=33)
    assert found["verdict"] == "not built"


@pytest.mark.thorough
def test_a_class_that_hangs_is_told_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player()
    try:
        assert player.play("LlamaForCausalLM", "causal", {}, 120)["verdict"] == "right"
        found = player.play("LlamaForCausalLM", "causal", {"num_hidden_layers": 4000}, 1)
        assert (found["verdict"], found["message"]) == ("not built", "did not end in 1 s")
        assert player.play("T5ForQuestionAnswering", "questions", {}, 120)["verdict"] == "refused"
    finally:
        player.close()


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = {"B": {"task": "causal", "verdict": "right"}, "A": {"task": "causal", "verdict": "refused", "message": "x"}}
    write_record(tmp_path / "a.json", {"commit": "c"}, found)
    head, record = read_record(tmp_path / "a.json")
    assert (head["commit"], head["counts"], record) == ("c", {"causal": {"refused": 1, "right": 1}}, found)
    assert read_record(tmp_path / "none.json") == ({}, {})
