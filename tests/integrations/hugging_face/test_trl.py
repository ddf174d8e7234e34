"""TRL's trainers and Trainer's metrics over processes, and TRL's classes that are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import cp_fast
from cp_fast.integrations.trainer import ContextParallelMixin
from cp_ref import SimGroup
from tests.dist.workers import run_program
from tests.integrations.hugging_face.families import tiny

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
trl = pytest.importorskip("trl", reason="needs trl: pip install '.[test-integrations]'")

pytestmark = pytest.mark.extras


def losses(processes: int, *given: str) -> dict[str, list[float]]:
    said = run_program(Path(__file__).with_name("trl_losses.py"), processes, *given)
    return json.loads(re.findall(r"^losses (.*)$", said, re.MULTILINE)[0])


@pytest.mark.thorough
def test_losses_and_metrics_are_those_of_trl_alone() -> None:
    """Padded, packed and padding-free rows, completions, accumulation, adapters, pairs with and without a margin."""
    expected, found = losses(1, "--alone"), losses(2)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert len(values) > 5
        assert found[name] == pytest.approx(values, abs=2e-4), name


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer", "GRPOTrainer", "DistillationTrainer", "RLOOTrainer"])
def test_trainers_of_whole_sequences_are_refused_with_a_pointer(kind: str) -> None:
    theirs: Any = (
        getattr(trl, kind, None)
        or __import__(f"trl.trainer.{kind.removesuffix('Trainer').lower()}_trainer", fromlist=[kind]).__dict__[kind]
    )
    mine: Any = type("Mine", (ContextParallelMixin, theirs), {})
    args = transformers.TrainingArguments(output_dir="nowhere", use_cpu=True, report_to=[])

    def one(member: Any) -> None:
        with pytest.raises(NotImplementedError, match=rf"{kind} has losses of whole sequences.*sequence_sum"):
            mine(None, args, cp=cp_fast.ContextParallel(member))

    SimGroup(1).run(one)


def test_a_loss_of_routers_is_refused(tmp_path: Path) -> None:
    """Which TRL computes of a rank's tokens; that of Trainer is right (`test_trainer`)."""
    from tests.integrations.hugging_face import trl_losses as program

    def one(member: Any) -> None:
        args = trl.SFTConfig(str(tmp_path), **program.QUIET, **program.NO_KERNELS)
        rows = program.Dataset.from_list(program.rows_of(3))
        how = {"processing_class": program.TOKENIZER, "train_dataset": rows, "cp": cp_fast.ContextParallel(member)}
        with pytest.raises(NotImplementedError, match=r"output_router_logits is True .*give it router_aux_loss_coef=0"):
            program.CpSFTTrainer(tiny("MixtralForCausalLM"), args, **how)

    SimGroup(1).run(one)


def test_the_methods_of_trl_that_the_mixin_counts_on() -> None:
    """What the mixin takes the place of, and what it relies on to be called."""
    names = {"compute_loss", "prediction_step", "training_step"}
    assert names <= vars(trl.SFTTrainer).keys()
    assert {"compute_loss", "training_step"} <= vars(trl.RewardTrainer).keys()
    source = Path(str(__import__("inspect").getsourcefile(trl.SFTTrainer))).read_text()
    assert "self.accelerator.gather_for_metrics(outputs.label_mask.sum())" in source
    assert 'inputs["attention_mask"].sum()' in source
