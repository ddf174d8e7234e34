"""Task heads over ranks as on one: classifiers that read one token of a row, spans, and arguments that are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cp_fast
from cp_fast.integrations import transformers as ours
from cp_ref import SimGroup
from tests.integrations.hugging_face.families import tiny
from tests.integrations.hugging_face.test_transformers import SIZES

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

# ---- classifiers


@pytest.mark.parametrize("layout", ["dual_chunk", "balanced"])
@pytest.mark.parametrize(
    ("kind", "sizes"), [("LlamaConfig", {}), ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4})]
)
def test_a_classifier_reads_each_rows_last_token(kind: str, sizes: dict[str, Any], layout: Any) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES | sizes, num_labels=3, bos_token_id=1, eos_token_id=1)
    whole = transformers.AutoModelForSequenceClassification.from_config(config).double().eval()
    lengths, targets = torch.tensor([13, 7, 4]), torch.tensor([0, 2, 1])
    mask = (torch.arange(13) < lengths[:, None]).long()
    ids = torch.randint(1, 50, (3, 13)) * mask
    alone = copy.deepcopy(whole)
    expected = alone(input_ids=ids, attention_mask=mask).logits
    F.cross_entropy(expected, targets).backward()

    def one(member: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        context = cp_fast.ContextParallel(member, layout=layout)
        model = ours.prepare(copy.deepcopy(whole), context)
        part = ours.shard_batch({"input_ids": ids, "attention_mask": mask}, cp=context, model=model)
        logits = model(**part).logits
        (F.cross_entropy(logits, targets) / context.size).backward()
        with pytest.raises(NotImplementedError, match=r"labels are one for each sequence.*Leave labels away"):
            ours.shard_batch({"input_ids": ids, "labels": ids}, cp=context, model=model)
        return logits.detach(), {n: w.grad for n, w in model.named_parameters() if w.grad is not None}

    found = SimGroup(3).run(one)
    for logits, _ in found:
        torch.testing.assert_close(logits, expected.detach())
    for n, weight in alone.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(sum(grads[n] for _, grads in found), weight.grad)


def ending_with_padding() -> dict[str, torch.Tensor]:
    """Three rows whose end token is the padding id, 2, also inside a document; the last row has nothing else."""
    lengths = torch.tensor([[13], [7], [2]])
    mask = (torch.arange(13) < lengths).long()
    ids = torch.randint(3, 50, (3, 13), generator=torch.Generator().manual_seed(2)).masked_fill(mask == 0, 2)
    ids[0, [5, 12]], ids[1, 5:], ids[2] = 2, 2, 2
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("layout", ["dual_chunk", "balanced", "contiguous"])
@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "GPT2ForSequenceClassification"])
@pytest.mark.one_in(2)
def test_a_row_is_read_where_transformers_reads_it(name: str, layout: Any) -> None:
    """The rightmost token whose id is not the padding id; a row without one is read at its first."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    whole = kind(kind.config_class(**SIZES | {"pad_token_id": 2}, num_labels=1, n_embd=32, n_layer=2, n_head=4))
    whole, batch = whole.double().eval(), ending_with_padding()
    expected = copy.deepcopy(whole)(**batch).logits
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = [row[:length] for row, length in zip(batch["input_ids"], lengths, strict=True)]
    packed = {"input_ids": torch.cat(rows)[None], "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}

    def one(member: Any) -> list[Any]:
        context = cp_fast.ContextParallel(member, layout=layout)
        model = ours.prepare(copy.deepcopy(whole), context)
        found = []
        for given in (batch, packed):
            logits = model(**ours.shard_batch(given, cp=context)).logits
            found.append(logits.detach())
        (logits * torch.tensor([[1.0], [-2.0], [3.0]])).sum().div(context.size).backward()
        assert not model.score._forward_hooks
        return [*found, model.score.weight.grad]

    alone = copy.deepcopy(whole)
    (alone(**batch).logits * torch.tensor([[1.0], [-2.0], [3.0]])).sum().backward()
    for size in (1, 3):
        everyone = SimGroup(size).run(one)
        for padded, together, _ in everyone:
            torch.testing.assert_close(padded, expected.detach())
            torch.testing.assert_close(together, expected.detach())
        torch.testing.assert_close(sum(grad for *_, grad in everyone), alone.score.weight.grad)


def test_a_classifier_would_read_padding() -> None:
    """Padding of another id than the configuration's, as the model alone reads it; and embeddings, which have none."""
    batch = ending_with_padding()

    def one(member: Any) -> None:
        context = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny("LlamaForSequenceClassification", pad_token_id=7), context)
        part = ours.shard_batch(batch, cp=context)
        with pytest.raises(ValueError, match=r"row 1 at padding: it has an id that is not .*pad_token_id \(7\)"):
            model(**part)
        model.config.pad_token_id = 2  # which is asked at each call
        assert model(**part).logits.shape == (3, 2)
        embeddings = model.get_input_embeddings()(part.pop("input_ids"))
        with pytest.raises(ValueError, match=r"is given inputs_embeds, .* padding in row 1; give it input_ids"):
            model(inputs_embeds=embeddings, **part)

    SimGroup(2).run(one)


class ByMask(transformers.LlamaForSequenceClassification):
    """A reward model of the user's own, that reads each row at the last token of its mask."""

    def forward(self, input_ids: Any, attention_mask: Any = None, **named: Any) -> Any:
        logits = self.score(self.model(input_ids, attention_mask=attention_mask, **named).last_hidden_state)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        last = attention_mask.sum(1) - 1
        found = logits[torch.arange(len(logits)), last]
        return transformers.modeling_outputs.SequenceClassifierOutputWithPast(logits=found)


def test_a_rule_of_ones_own() -> None:
    torch.manual_seed(0)
    whole = ByMask(transformers.LlamaConfig(**SIZES | {"pad_token_id": 2})).double().eval()
    batch = ending_with_padding()
    expected = copy.deepcopy(whole)(**batch).logits.detach()

    def one(member: Any) -> torch.Tensor:
        context = cp_fast.ContextParallel(member)
        model = ours.prepare(copy.deepcopy(whole), context)
        return model(**ours.shard_batch(batch, cp=context)).logits.detach()

    for found in SimGroup(2).run(one):
        torch.testing.assert_close(found, expected)


def test_a_score_that_adapters_replace() -> None:
    """PEFT copies the module `score` for sequence classification: adapters after `prepare`, merged, taken away."""
    peft: Any = pytest.importorskip("peft", reason="needs peft: pip install '.[test-integrations]'")
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], init_lora_weights=False)
    batch = ending_with_padding()
    whole = tiny("LlamaForSequenceClassification", pad_token_id=2)

    def logits_of(model: Any, part: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            found = [model(**part).logits]
            model.base_model.model.score.modules_to_save["default"].weight.data.mul_(3)
            found.append(model(**part).logits)
            model = copy.deepcopy(model)
            merged = copy.deepcopy(model).merge_and_unload()
            bare = model.unload()
            found += [merged(**part).logits, bare(**part).logits]
            bare.score = torch.nn.Linear(32, 2, bias=False)
            torch.nn.init.constant_(bare.score.weight, 0.5)
            return [*found, bare(**part).logits]

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    expected = logits_of(adapted(copy.deepcopy(whole)), batch)

    def one(member: Any) -> None:
        context = cp_fast.ContextParallel(member)
        model = adapted(ours.prepare(copy.deepcopy(whole), context))
        part = ours.shard_batch(batch, cp=context, model=model)
        torch.testing.assert_close(logits_of(model, part), expected, rtol=1e-4, atol=1e-5)
        model.get_base_model().score = None
        with pytest.raises(RuntimeError, match=r"has no module score, where prepare saw .* another prepare"):
            model(**part)

    SimGroup(2).run(one)


# ---- spans


@pytest.mark.parametrize("layout", ["dual_chunk", "balanced"])
@pytest.mark.parametrize("name", ["LlamaForQuestionAnswering", "BertForQuestionAnswering"])
def test_losses_of_spans_are_those_of_one_process(name: str, layout: Any) -> None:
    """With a span that ends behind its row, which does not count; rows need not divide by the ranks."""
    whole = tiny(name).double()
    ids = torch.randint(3, 50, (3, 13), generator=torch.Generator().manual_seed(4))
    batch = {"input_ids": ids, "start_positions": torch.tensor([5, 0, 11])}
    batch["end_positions"] = torch.tensor([[8], [3], [40]])
    alone = copy.deepcopy(whole)
    expected = alone(**batch).loss
    expected.backward()

    def one(member: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        context = cp_fast.ContextParallel(member, layout=layout)
        model = ours.prepare(copy.deepcopy(whole), context)
        out = model(**ours.shard_batch(batch, cp=context, model=model))
        out.loss.backward()
        return out.loss.detach(), {n: w.grad for n, w in model.named_parameters() if w.grad is not None}

    found = SimGroup(3).run(one)
    torch.testing.assert_close(sum(loss for loss, _ in found), expected.detach())
    for n, weight in alone.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(sum(grads[n] for _, grads in found), weight.grad, rtol=1e-5, atol=1e-8)


def test_spans_that_are_refused() -> None:
    batch = {"input_ids": torch.randint(3, 50, (2, 12))}
    mask = (torch.arange(12) < torch.tensor([[12], [7]])).long()

    def one(member: Any) -> None:
        context = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny("LlamaForQuestionAnswering"), context)
        part = ours.shard_batch(batch, cp=context, model=model)
        good = torch.tensor([1, 2])
        for given, said in (
            ({"start_positions": good}, "end_positions is None"),
            ({"start_positions": good, "end_positions": good[:1]}, r"end_positions is torch.int64 \[1\]; it must be"),
            ({"start_positions": good, "end_positions": good.float()}, "end_positions is torch.float32"),
            ({"start_positions": good, "end_positions": good + member.rank}, "end_positions is not the same on all"),
        ):
            with pytest.raises((TypeError, ValueError), match=said):
                model(**part, **given)
        padded = ours.shard_batch({**batch, "attention_mask": mask}, cp=context, model=model)
        with pytest.raises(NotImplementedError, match="rows with padding, whose logits enter the loss"):
            model(**padded, start_positions=good, end_positions=good)

    SimGroup(2).run(one)


# ---- arguments and switches


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("LlamaForCausalLM", {"start_positions": torch.tensor([1, 2])}),
        ("LlamaForCausalLM", {"decoder_input_ids": torch.ones(2, 12, dtype=torch.long)}),
        ("BertForMaskedLM", {"encoder_hidden_states": torch.ones(2, 12, 32)}),
        ("BertForMaskedLM", {"next_sentence_label": torch.tensor([0, 1])}),
        ("GPT2LMHeadModel", {"bbox": torch.ones(2, 12, 4)}),
        ("LlamaForCausalLM", {"return_loss": True}),
        ("LlamaForCausalLM", {"output_attentions": True}),
    ],
)
def test_arguments_that_are_not_known_are_refused_by_name(name: str, given: dict[str, Any]) -> None:
    def one(member: Any) -> None:
        context = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny(name), context)
        part = ours.shard_batch({"input_ids": torch.ones(2, 12, dtype=torch.long)}, cp=context, model=model)
        model(**part, **dict.fromkeys(given))  # None is no value
        [argument] = given
        with pytest.raises(NotImplementedError, match=rf"{argument} is .* which cp_fast does not"):
            model(**part, **given)

    SimGroup(1).run(one)


def test_a_switch_of_the_configuration_is_looked_at_in_each_call() -> None:
    switch = "output_attentions"

    def one(member: Any) -> None:
        context = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny("MixtralForCausalLM"), context)
        part = ours.shard_batch({"input_ids": torch.ones(2, 12, dtype=torch.long)}, cp=context, model=model)
        object.__setattr__(model.config, "_attn_implementation_internal", "eager")  # to set output_attentions
        setattr(model.config, switch, True)
        object.__setattr__(model.config, "_attn_implementation_internal", ours.NAME)
        with pytest.raises(NotImplementedError, match=rf"{switch} is True in model.config, .* Set it to False"):
            model(**part)
        model(**part, **{switch: False})  # a call may say otherwise

    SimGroup(1).run(one)
