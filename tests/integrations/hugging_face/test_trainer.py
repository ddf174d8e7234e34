"""transformers' Trainer and accelerate: what they take, what they refuse and how to get around it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import cp_fast
from cp_fast.api import attention as api
from cp_fast.checkpoint import save_attention
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.loss import loss_for_backward
from cp_fast.integrations.token_batches import shard_tokens
from cp_fast.integrations.trainer import ContextParallelMixin
from cp_ref import SimGroup
from tests.dist.workers import Processes, run_program
from tests.integrations.hugging_face.families import batch_of, tiny

# pyright: reportMissingImports=false


pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[test-integrations]'")


def test_a_fine_tune_has_the_losses_of_one_process() -> None:
    def losses(processes: int) -> list[float]:
        given = ["--steps", "3", "--tokens", "64"]
        said = run_program(ROOT / "examples" / "finetune_transformers.py", processes, *given)
        return [float(word) for word in re.findall(r"^losses (.*)$", said, re.MULTILINE)[0].split()]

    one = losses(1)
    assert len(one) == 4  # three steps and the evaluation
    assert losses(2) == pytest.approx(one, abs=2e-4)


def test_accelerate_prepares_the_model(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    page = (ROOT / "docs" / "how_to" / "accelerate.md").read_text()
    [block] = [x for x in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "mesh =" in x]
    program.write_text(block + "dist.destroy_process_group()\n")
    run_program(program, 2)


def test_loaders_that_give_every_rank_another_batch() -> None:
    def one(member: Any) -> None:
        ids = torch.full((1, 8), member.rank // 2)
        with pytest.raises(ValueError, match=r"differs between rank \d and rank \d in input_ids; all ranks"):
            shard_tokens({"input_ids": ids}, cp=cp_fast.ContextParallel(member))

    SimGroup(4).run(one)


def test_what_trainer_refuses_and_what_is_refused_of_it() -> None:
    parallelism = SimpleNamespace(cp_enabled=True, cp_backend="torch")
    trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=parallelism))
    model: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation="cp_fast"))
    with pytest.raises(ValueError, match="supported only with SDPA attention, you are using cp_fast"):
        transformers.Trainer._prepare_context_parallel_inputs(trainer, model, {})

    class CpTrainer(ContextParallelMixin, transformers.Trainer):
        pass

    def said(member: Any, **odd: Any) -> str:
        how = {name: odd.pop(name) for name in ("compute_loss_func",) if name in odd}
        kind = "Seq2SeqTrainingArguments" if "predict_with_generate" in odd else "TrainingArguments"
        args = getattr(transformers, kind)(output_dir="nowhere", use_cpu=True, report_to=[], **odd)
        with pytest.raises((NotImplementedError, ValueError)) as caught:
            CpTrainer(tiny("LlamaForSequenceClassification"), args, cp=cp_fast.ContextParallel(member), **how)
        return str(caught.value)

    def one(member: Any) -> None:
        assert re.search("neftune_noise_alpha is 5.0.* leave it None", said(member, neftune_noise_alpha=5.0))
        odd = said(member, compute_loss_func=batched)
        assert odd.startswith("compute_loss_func is batched, which")
        assert "Write a compute_loss that calls super" in odd
        assert "train_sampling_strategy is 'batch_rebalance'" in said(member, train_sampling_strategy="batch_rebalance")
        assert "dispatch_batches True" in said(member, accelerator_config={"dispatch_batches": True})
        assert "predict_with_generate is True, and metrics" in said(member, predict_with_generate=True)
        assert "average_tokens_across_devices is False" in said(member, average_tokens_across_devices=False)
        assert "LlamaForSequenceClassification has labels of whole sequences" in said(member)

    SimGroup(1).run(one)


def batched(*_: Any) -> dict[str, float]:
    """A loss of whole rows."""
    return {"rows": 1.0}


def test_a_loss_that_is_no_mean_over_tokens_is_refused_at_once() -> None:
    class CpTrainer(ContextParallelMixin, transformers.Trainer):
        pass

    args = transformers.TrainingArguments(output_dir="nowhere", use_cpu=True, report_to=[])

    def one(member: Any) -> None:
        with pytest.raises(NotImplementedError, match=r"loss.*Leave labels away"):
            CpTrainer(tiny("ElectraForPreTraining"), args, cp=cp_fast.ContextParallel(member))

    SimGroup(1).run(one)


def test_methods_that_take_a_part_for_the_whole_are_refused() -> None:
    """A rank's labels are shifted already, and a mean over its tokens is not the mean."""

    class OwnLoss(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            logits = model(input_ids=inputs["input_ids"]).logits
            return torch.nn.functional.cross_entropy(logits[0, :-1], inputs["labels"][0, 1:])

    class OwnStep(transformers.Trainer):
        def prediction_step(self, *given: Any, **named: Any) -> Any:
            return super().prediction_step(*given, **named)

    class Wrapped(transformers.Trainer):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            return super().compute_loss(*given, **named)

    class Behind(ContextParallelMixin, OwnLoss):
        pass

    class InFront(ContextParallelMixin, transformers.Trainer):
        compute_loss = OwnLoss.compute_loss

    class Hidden(ContextParallelMixin, OwnStep):
        pass

    class Cured(ContextParallelMixin, transformers.Trainer):
        shapes: ClassVar[list[tuple[int, ...]]] = []

        def prediction_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            self.shapes.append(tuple(inputs["input_ids"].shape))  # of the whole batch
            return super().prediction_step(model, inputs, *given, **named)

    class Right(ContextParallelMixin, Wrapped):
        pass

    class InItsPlace(ContextParallelMixin, OwnLoss):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            logits = model(input_ids=inputs["input_ids"]).logits
            return torch.nn.functional.cross_entropy(logits[0], inputs["shift_labels"][0])

    ids = torch.arange(3, 13)
    rows: Any = [{"input_ids": ids, "labels": ids}] * 2
    args = transformers.TrainingArguments(output_dir="nowhere", use_cpu=True, report_to=[])

    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        for kind, said in ((Behind, "OwnLoss.compute_loss"), (InFront, "InFront.compute_loss")):
            with pytest.raises(NotImplementedError, match=f"{said} computes a loss of its own.*shift_labels"):
                kind(tiny("LlamaForCausalLM"), args, cp=cp)
        with pytest.raises(NotImplementedError, match=r"OwnStep\.prediction_step would not .* of CpTrainer is called"):
            Hidden(tiny("LlamaForCausalLM"), args, cp=cp)
        found = Cured(tiny("LlamaForCausalLM"), args, cp=cp).evaluate(rows)
        assert found["eval_loss"] > 0
        assert Cured.shapes == [(2, 10)]
        Right(tiny("LlamaForCausalLM"), args, cp=cp)
        InItsPlace(tiny("LlamaForCausalLM"), args, cp=cp)

    SimGroup(1).run(one)


def test_further_tensors_of_a_batch() -> None:
    """BERT's tokenizer gives token_type_ids; weights of tokens are for a loss of one's own."""

    class Plain(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            weights, labels = inputs.pop("weights"), inputs.pop("labels")
            inputs.pop("shift_labels", None)  # of a decoder
            logits = model(**inputs).logits
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            return (losses * weights.flatten()).sum() / 10

    class CpPlain(ContextParallelMixin, Plain):
        pass

    class CpTrainer(ContextParallelMixin, transformers.Trainer):
        pass

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        batch = {name: torch.stack([torch.tensor(row[name]) for row in rows]) for name in rows[0]}
        return batch | {"weights": batch["input_ids"] / 50}

    def without_weights(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {name: x for name, x in collate(rows).items() if name != "weights"}

    ids = torch.arange(3, 13)
    kinds = {"token_type_ids": [0] * 4 + [1] * 6}
    rows: Any = [{"input_ids": x.tolist(), "labels": x.tolist(), **kinds} for x in (ids, ids + 9)]
    how: dict[str, Any] = {"report_to": [], "max_steps": 2, "save_strategy": "no", "logging_steps": 1}
    args = transformers.TrainingArguments(output_dir="nowhere", use_cpu=True, disable_tqdm=True, **how)

    def trained(kind: Any, collator: Any = collate, **more: Any) -> list[float]:
        model = tiny("BertForMaskedLM", attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
        trainer = kind(model, args, train_dataset=rows, data_collator=collator, **more)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def one(member: Any) -> None:
        cp, fill = cp_fast.ContextParallel(member), {"weights": 0.0, "token_type_ids": 0}
        alone = trained(transformers.Trainer, without_weights)
        assert trained(CpTrainer, without_weights, cp=cp) == pytest.approx(alone, abs=1e-5)
        assert trained(CpPlain, cp=cp, fill=fill) == pytest.approx(trained(Plain), abs=1e-5)
        with pytest.raises(ValueError, match=r"to cut another tensor .* fill=\{'weights': 0\}"):
            trained(CpPlain, cp=cp)
        with pytest.raises(TypeError, match="fill is of type list; it must be a dict"):
            trained(CpPlain, cp=cp, fill=["weights"])

    SimGroup(1).run(one)


def losses(processes: int, *given: str) -> dict[str, list[float]]:
    """Those of `trainer_losses`, by the case's name."""
    said = run_program(ROOT / "tests" / "integrations" / "hugging_face" / "trainer_losses.py", processes, *given)
    return json.loads(re.findall(r"^losses (.*)$", said, re.MULTILINE)[0])


@pytest.mark.parametrize(("alone", "processes"), [(1, 2), (2, 4)], ids=["one context", "two contexts"])
def test_losses_are_those_of_trainer_alone(alone: int, processes: int) -> None:
    """Every epoch in its own order, lengths grouped, workers, streams, packed rows, the last batch dropped or not.

    Norms of gradients and counts of tokens too. Over ranks the program checks dropout as well.
    """
    more = ["--dp"] if alone > 1 else []
    expected, found = losses(alone, "--alone", *more), losses(processes, *more)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, abs=1e-4), name


# pyright: reportMissingImports=false


pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
NAME = "LlamaForCausalLM"
WAYS = ("none", "plain", "saved", "offloaded")


def step(way: str, sharded: bool) -> tuple[int, torch.Tensor, dict[str, torch.Tensor]]:
    """How often attention ran forward on this rank in one step; the loss; the gradients."""
    forwards, inner = [], api.forward_pass

    def counted(*given: Any, **how: Any) -> Any:
        forwards.append(1)
        return inner(*given, **how)

    cp = cp_fast.ContextParallel(dist.group.WORLD)
    model: Any = ours.prepare(tiny(NAME), cp).train()
    if way != "none":
        contexts = {} if way == "plain" else {"context_fn": save_attention(offload=way == "offloaded")}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **contexts})
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    api.forward_pass = counted
    try:
        loss = model(**ours.shard_batch(batch_of(NAME), cp=cp, model=model)).loss
        loss_for_backward(loss, averaged_over=model if sharded else None).backward()
    finally:
        api.forward_pass = inner
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
    return len(forwards), loss.detach(), whole


def layers() -> int:
    """The model's layers."""
    return tiny(NAME).config.num_hidden_layers


def steps(sharded: bool) -> dict[str, tuple[int, torch.Tensor, dict[str, torch.Tensor]]]:
    """A step of each way, in this process."""
    return {way: step(way, sharded) for way in WAYS}


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_model_of_transformers_computes_attention_once_a_layer(two: Processes, sharded: bool) -> None:
    for found in two.run(steps, sharded):
        count, loss, grads = found["none"]
        assert count == layers()
        assert found["plain"][0] == 2 * count
        for way in ("saved", "offloaded"):
            assert found[way][0] == count
            assert torch.equal(found[way][1], loss)
            assert grads.keys() == found[way][2].keys()
            assert all(torch.equal(found[way][2][name], grad) for name, grad in grads.items())
