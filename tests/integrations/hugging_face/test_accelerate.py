"""accelerate's own context parallelism, switched to this package, under Trainer, SFTTrainer and a loop of one's own."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel

from conformance.step import compare_step
from cp_fast.integrations import accelerate as ours
from cp_fast.integrations.shared import unnamed_buffers
from tests.dist.workers import Processes, run_program
from tests.integrations.hugging_face.families import tiny
from tests.integrations.hugging_face.image_families import tiny_images

# pyright: reportMissingImports=false, reportPrivateUsage=false

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[test-integrations]'")

HERE = Path(__file__).parent
STEPS = "tests.integrations.hugging_face.accelerate_steps"
CASES = [
    ("hand_written", "dual_chunk", "p2p", 1),
    ("compressed_keys", "dual_chunk", "all_gather", 1),
    ("by_trainer", "contiguous", "all_gather", 2),
    ("by_sft_trainer", "balanced", "p2p", 1),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("build", "layout", "cp_comm_type", "dp_size"), CASES)
def test_a_step_is_that_of_one_process(build: str, layout: str, cp_comm_type: str, dp_size: int) -> None:
    """Two batches of rows with padding are accumulated; then a second step."""
    how: dict[str, Any] = {"layout": layout, "cp_comm_type": cp_comm_type, "dp_size": dp_size, "loss": "sum"}
    report = compare_step(f"{STEPS}:{build}", f"{STEPS}:batches", 2, **how)
    assert report.right, str(report)


def losses(processes: int, *given: str) -> dict[str, list[float]]:
    """Those of `accelerate_losses`, by the case's name."""
    said = run_program(HERE / "accelerate_losses.py", processes, *given)
    return json.loads(re.findall(r"^losses (.*)$", said, re.MULTILINE)[0])


@pytest.mark.thorough
@pytest.mark.parametrize(("alone", "processes"), [(1, 2), (2, 4)], ids=["one context", "two contexts"])
def test_losses_and_metrics_are_those_of_the_trainers_alone(alone: int, processes: int) -> None:
    """Epochs, accumulation, packed rows, checkpointing, adapters, reward models, and evaluations with metrics."""
    more = ["--dp"] if alone > 1 else []
    expected, found = losses(alone, "--alone", *more), losses(processes, *more)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert len(values) > 6
        assert found[name] == pytest.approx(values, abs=1e-4), name


@pytest.mark.thorough
def test_the_lines_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "accelerate.md").read_text()
    [block] = [x for x in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "cp_accelerate" in x]
    program = tmp_path / "program.py"
    program.write_text(
        f"from {STEPS} import over_gloo\nover_gloo()\n{block}\ntorch.distributed.destroy_process_group()\n"
    )
    assert "{'loss': " in run_program(program, 2)


# ---- a stand-in for an Accelerator, over two processes


class Stand:
    """What `use` takes of an Accelerator, over all processes."""

    def __init__(self, **odd: Any) -> None:
        sizes = {"cp_size": 2, "tp_size": 1} | odd
        self.parallelism_config: Any = SimpleNamespace(**sizes)
        self.is_fsdp2, self._models = odd.get("is_fsdp2", True), odd.get("models", [])
        self.state = SimpleNamespace(
            dynamo_plugin=SimpleNamespace(backend=SimpleNamespace(value=odd.get("compiler", "NO")))
        )
        self.torch_device_mesh = {"cp": dist.group.WORLD}
        self.num_processes = 2
        self.gradient_state = SimpleNamespace(end_of_dataloader=False)

    def _prepare_cp(self, *_: Any) -> None:
        """accelerate's."""

    def maybe_context_parallel(self, **_: Any) -> None:
        """accelerate's."""

    def pad_across_processes(self, tensor: Any, dim: int = 0) -> Any:
        return tensor

    def gather(self, tensor: Any) -> Any:
        parts = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object:
            parts: list[Any] = [None] * 2
            dist.all_gather_object(parts, input_data)
            return [x for part in parts for x in part]
        return self.gather(input_data)


IDS = torch.arange(3, 19).view(2, 8)
MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])


def batch(**more: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS.clone(), **more}


def switched(name: str = "LlamaForCausalLM", **how: Any) -> tuple[Any, Any]:
    """A stand-in, and a model that it has prepared."""
    accelerator: Any = Stand()
    ours.use(accelerator, **how)
    model = tiny(name)
    accelerator._prepare_cp(model)
    return accelerator, model


def said(call: Any, *kinds: Any) -> str:
    with pytest.raises(kinds or (ValueError, NotImplementedError, RuntimeError, TypeError)) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def refused_of_accelerators() -> list[str]:
    def twice() -> None:
        ours.use(accelerator)
        ours.use(accelerator)

    accelerator = Stand()
    odd: list[Any] = [{"cp_size": 1}, {"is_fsdp2": False}, {"tp_size": 2}, {"compiler": "INDUCTOR"}, {"models": [1]}]
    given = [lambda odd=odd: ours.use(Stand(**odd)) for odd in odd]
    return [said(call) for call in (*given, twice, lambda: ours.use(3), lambda: ours.use(Stand(), layout="odd"))]


def test_accelerators_that_are_refused(two: Processes) -> None:
    rules = [
        r"ValueError: the accelerator has cp_size = 1; give it",
        r"ValueError: .*cp_size = 2 without FSDP2.*fsdp_version=2",
        r"NotImplementedError: ParallelismConfig has tp_size = 2",
        r"NotImplementedError: dynamo_plugin has backend 'INDUCTOR'",
        r"RuntimeError: .* call use before accelerator\.prepare",
        r"ValueError: use was called with this accelerator before",
        r"TypeError: accelerator is of type int, without maybe_context_parallel",
        r"ValueError: .*layout",
    ]
    for found in two.run(refused_of_accelerators):
        for one, rule in zip(found, rules, strict=True):
            assert re.match(rule, one), one


def refused_of_models() -> list[str]:
    accelerator: Any = Stand()
    ours.use(accelerator)
    empty = tiny("LlamaForCausalLM")
    if dist.get_rank():
        empty.to("meta")
    return [
        said(lambda x=x: accelerator._prepare_cp(x))
        for x in (tiny_images("LlavaForConditionalGeneration"), empty, torch.nn.Linear(2, 2))
    ]


def prompted() -> str:
    """A prompt of adapters, whose tokens one rank's slice would begin with."""
    peft = importlib.import_module("peft")
    accelerator: Any = Stand()
    ours.use(accelerator)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return said(lambda: accelerator._prepare_cp(peft.get_peft_model(tiny("LlamaForCausalLM"), config)))


def of_rows() -> str:
    """An adapter for each row, where a row of a slice has tokens of several rows."""
    peft = importlib.import_module("peft")
    accelerator: Any = Stand()
    ours.use(accelerator, layout="balanced")
    model = peft.get_peft_model(tiny("LlamaForCausalLM"), peft.LoraConfig(target_modules=["q_proj"])).eval()
    accelerator._prepare_cp(model)
    return said(lambda: run(accelerator, lambda **x: model(**x, adapter_names=["default", "__base__"]), batch()))


def test_an_adapter_for_each_row_is_refused(two: Processes) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install '.[test-integrations]'")
    for found in two.run(of_rows):
        assert re.match("NotImplementedError: adapter_names gives .*q_proj an adapter for each row", found), found


def test_adapters_that_add_tokens_are_refused_at_once(two: Processes) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install '.[test-integrations]'")
    for found in two.run(prompted):
        assert re.match(r"NotImplementedError: adapter 'default' of the \w+ has PROMPT_TUNING, which adds", found), (
            found
        )


def test_models_that_are_refused(two: Processes) -> None:
    rules = [
        r"NotImplementedError: LlavaForConditionalGeneration takes images, and accelerate's buffers are of text",
        r"\w+: (global rank 1 refused its arguments: .*)?LlamaForCausalLM has weights on the first rank alone",
        r"TypeError: model is a Linear",
    ]
    for found in two.run(refused_of_models):
        for one, rule in zip(found, rules, strict=True):
            assert re.match(rule, one), one


def refused_of_buffers() -> list[str]:
    accelerator, model = switched()
    empty: Any = Stand()
    ours.use(empty)
    ids = batch()["input_ids"]
    rank = dist.get_rank()

    def enter(*buffers: Any, dims: Any = None, of: Any = accelerator, **how: Any) -> Any:
        return of.maybe_context_parallel(
            buffers=list(buffers), buffer_seq_dims=[1] * len(buffers) if dims is None else dims, **how
        )

    def entered(*given: Any, **how: Any) -> Any:
        def call() -> None:
            with enter(*given, **how):
                pass

        return call

    def nested() -> None:
        with enter(batch()["input_ids"]), enter(batch()["input_ids"]):
            pass

    def theirs() -> None:
        mesh = init_device_mesh("cpu", (2,))
        with context_parallel(mesh, buffers=[torch.zeros(2, 8)], buffer_seq_dims=[1]), enter(ids):
            pass

    calls = [
        entered(),
        entered(ids, dims=[]),
        entered(ids, torch.ones(2, 5)),
        entered(ids, 3),
        entered(ids, torch.ones(2, 8, requires_grad=True)),
        entered(ids, dims=[2]),
        entered(torch.zeros(8, 4), dims=[0]),
        entered(ids, MASK, MASK.flip(0)),
        entered(ids, no_restore_buffers={IDS}),
        entered(ids[:, :7], MASK[:, :7] * torch.arange(7) % 2),
        entered(ids if rank else ids + 1),
        entered(ids, 3 if rank else ids),
        entered(ids, of=empty),
        nested,
        theirs,
    ]
    found = [said(call) for call in calls]
    with enter(ids):
        model(input_ids=ids)  # the group works on
    return found


def test_buffers_that_are_refused(two: Processes) -> None:
    rules = [
        r"ValueError: buffers has no tensor \[b, s, \.\.\.\]",
        r"ValueError: buffer_seq_dims has 0 entries for 1 buffers",
        r"ValueError: buffers\[1\] has shape \[2, 5\], with 5 entries in dimension 1; the sequences have",
        r"TypeError: buffers\[1\] is of type int",
        r"ValueError: buffers\[1\] requires a gradient",
        r"ValueError: buffer_seq_dims\[0\] is 2; buffers\[0\] has 2 dimensions",
        r"ValueError: buffers has no tensor",
        r"ValueError: buffers has several masks",
        r"ValueError: no_restore_buffers has a tensor that is none",
        r"ValueError: buffers\[1\] has zeros and ones.*7 tokens .*pad the batch to a multiple of 4 tokens",
        r"ValueError: batch differs between rank . and rank . in buffers\[0\]",
        r"TypeError: buffers\[1\] is of type int|\w+: global rank 1 refused its arguments: TypeError: buffers\[1\]",
        r"RuntimeError: no model was prepared.*call accelerator\.prepare",
        r"RuntimeError: .*contexts do not nest",
        r"RuntimeError: PyTorch's context_parallel is active",
    ]
    for found in two.run(refused_of_buffers):
        for one, rule in zip(found, rules, strict=True):
            assert re.match(rule, one), one


def refused_of_calls() -> list[str]:
    accelerator, model = switched()
    positions = torch.arange(8).expand(2, -1)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [  # buffers, and what else the model is given
        ({}, {"token_type_ids": torch.zeros(2, 8, dtype=torch.long)}),
        ({}, {"input_ids": IDS}),
        ({"mask": MASK.clone()}, {}),
        ({"attention_mask": MASK.flip(1)}, {}),
        ({"attention_mask": MASK.clone()}, {"attention_mask": torch.ones(2, 1, 8, 8)}),
        ({"position_ids": positions + 1}, {}),
        ({"shift_labels": IDS.clone()}, {}),
        ({}, {"cu_seq_lens_q": torch.tensor([0, 3, 16])}),
    ]
    found = []
    for buffers, more in cases:
        given = batch(**buffers)

        def call(given: Any = given, more: Any = more) -> None:
            with accelerator.maybe_context_parallel(buffers=[*given.values()], buffer_seq_dims=[1] * len(given)):
                model(**{name: x for name, x in given.items() if name != "mask"} | more)

        found.append(said(call))
    model.train().get_input_embeddings().neftune_noise_alpha = 5.0
    found.append(said(lambda: run(accelerator, model, batch())))
    del model.get_input_embeddings().neftune_noise_alpha
    model.config.output_router_logits = True
    found.append(said(lambda: run(accelerator, model, batch())))
    del model.config.output_router_logits
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    late = run(accelerator, model, batch(labels=IDS.clone())).loss
    found.append(said(late.backward))
    run(accelerator, model, batch())
    return found


def run(accelerator: Any, model: Any, given: dict[str, torch.Tensor], kept: bool = True) -> Any:
    """The model's outputs in a context of all that it is given."""
    buffers = [*given.values()]
    how = {"no_restore_buffers": set(buffers)} if kept else {}
    with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1] * len(buffers), **how):
        return model(**given)


def test_calls_that_are_refused(two: Processes) -> None:
    """Some arguments are odd on one rank's slice alone; all ranks raise."""
    other = r"|\w+: global rank \d refused its arguments: \w+: .*"
    rules = [
        r"ValueError: LlamaForCausalLM is given token_type_ids \[2, 8\] in a context whose slices are \[2, 4\]",
        r"ValueError: LlamaForCausalLM is given input_ids \[2, 8\]",
        r"ValueError: a buffer is a mask of padding, but LlamaForCausalLM is given no attention_mask",
        rf"NotImplementedError: .*padding_side='right'.*would drop it{other}padding_side",
        r"NotImplementedError: LlamaForCausalLM is given attention_mask \[2, 1, 8, 8\]",
        r"ValueError: LlamaForCausalLM is given position_ids \[2, 4\] that do not count",
        r"NotImplementedError: LlamaForCausalLM is given shift_labels without labels: label smoothing",
        r"ValueError: cu_seq_lens_q is of 16 tokens",
        r"NotImplementedError: neftune_noise_alpha is 5\.0",
        r"NotImplementedError: output_router_logits is True in model\.config, .*accelerate's contexts have means",
        r"RuntimeError: LlamaAttention runs again.*call accelerator\.backward inside",
    ]
    for found in two.run(refused_of_calls):
        for one, rule in zip(found, rules, strict=True):
            assert re.match(rule, one, re.DOTALL), one


def seen_by_a_loop() -> None:
    """What stays, what comes back, and what a loop's metrics are."""
    torch.manual_seed(0)
    accelerator, model = switched()
    rank = dist.get_rank()
    alone = tiny("LlamaForCausalLM").eval()
    model.eval()
    both = torch.cat([IDS, IDS[:, :1]], 1)
    tokens, targets = both[:, :-1], both[:, 1:]  # views of one storage
    table, weights = torch.arange(16.0).view(8, 2), torch.rand(2, 8, 3)
    expected = alone(tokens).logits.detach()
    buffers = [tokens, targets, table, weights]
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1, 1, 0, 1], no_restore_buffers={weights}
    ):
        mine = [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]
        assert torch.equal(tokens, both[:, mine])
        assert torch.equal(targets, both[:, 1:][:, mine])
        assert torch.equal(table, torch.arange(16.0).view(8, 2)[mine])
        assert model.config._attn_implementation == "cp_fast"
        out = model(input_ids=tokens)
        torch.testing.assert_close(out.logits, expected[:, mine])
        drawn = torch.rand(())
    assert torch.equal(tokens, both[:, :-1])
    assert torch.equal(targets, both[:, 1:])
    assert table.shape == (8, 2)
    assert weights.shape == (2, 4, 3)
    assert len(accelerator.gather(drawn[None]).unique()) == 2  # so dropout is each rank's own
    assert len(accelerator.gather(torch.rand(1)).unique()) == 1
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(tokens).logits, expected)  # whole rows, outside
    given = batch(labels=IDS.clone(), attention_mask=MASK.clone())
    given["labels"][1, 5:] = -100
    whole = alone(**given)
    with torch.no_grad():
        out = run(accelerator, model, given)
    assert given["labels"].shape == (2, 8)  # without gradients all come back
    torch.testing.assert_close(out.loss, whole.loss.detach())
    predicted = out.logits.argmax(-1)
    assert torch.equal(accelerator.gather_for_metrics(predicted)[MASK == 1], whole.logits.argmax(-1)[MASK == 1])
    assert accelerator.gather_for_metrics(given["labels"]).shape == (2, 8)
    assert accelerator.gather_for_metrics(["a"], use_gather_object=True) == ["a"]
    assert accelerator.gather(torch.ones(1)).shape == (2,)
    with pytest.raises(ValueError, match=r"gather_for_metrics .* differ between the ranks .* accelerator\.reduce"):
        accelerator.gather_for_metrics(torch.full((2,), float(dist.get_rank())))


def test_a_loop_of_ones_own(two: Processes) -> None:
    for found in two.run(seen_by_a_loop):
        assert found is None, found


def rounded_count() -> list[float]:
    """The number of labels that the loss is divided by, behind FSDP's casts."""
    accelerator, model = switched()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    counts: list[float] = []

    def loss(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Any:
        counts.append(float(num_items_in_batch))
        return logits.sum() / num_items_in_batch

    model.loss_function = loss
    for count in ({"num_items_in_batch": torch.tensor(4001.0)}, {}):
        given = batch(labels=IDS.clone())
        with accelerator.maybe_context_parallel(buffers=[*given.values()], buffer_seq_dims=[1, 1]):
            model(**given, **count).loss.backward()
    return counts


def test_the_number_of_labels_is_not_rounded_to_bfloat16(two: Processes) -> None:
    for found in two.run(rounded_count):
        assert found == [4001.0, 7.0]  # the second: 14 labels of two ranks


def of_other_heads() -> list[float]:
    """Masked language models, one with positions by ids and an id of padding inside; packed rows with own labels."""
    found: list[float] = []
    for name in ("BertForMaskedLM", "RobertaForMaskedLM", "LlamaForCausalLM"):
        accelerator, model = switched(name)
        alone = tiny(name).eval()
        labels = IDS.clone() if name != "LlamaForCausalLM" else IDS[:1].clone()
        given = {"input_ids": labels.clone(), "labels": labels}
        if name == "RobertaForMaskedLM":
            given["input_ids"][0, 3] = 0
        if len(labels) == 1:
            given["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
            parts = [{"input_ids": x, "labels": x} for x in labels.split([3, 5], 1)]
            sums = [alone(**part).loss.detach() * (part["labels"].shape[1] - 1) for part in parts]
            expected = sum(sums) / 6
        else:
            expected = alone(**given).loss.detach()
        model.eval()
        with torch.no_grad():
            out = run(accelerator, model, given)
        found.append(float(out.loss - expected))
    return found


def test_labels_of_other_heads_and_of_documents(two: Processes) -> None:
    for found in two.run(of_other_heads):
        assert found == pytest.approx([0.0, 0.0, 0.0], abs=1e-5), found


def of_whole_rows() -> list[float]:
    """Losses of spans, and logits of sequences whose end token is the padding id; in training and without gradients."""
    found: list[float] = []
    accelerator, model = switched("LlamaForQuestionAnswering")
    spans = {"start_positions": torch.tensor([1, 5]), "end_positions": torch.tensor([4, 9])}
    expected = tiny("LlamaForQuestionAnswering").eval()(IDS, **spans).loss
    model.eval()
    for graded in (True, False):
        with torch.set_grad_enabled(graded):
            ids = {"input_ids": IDS.clone()}
            with accelerator.maybe_context_parallel(buffers=[*ids.values()], buffer_seq_dims=[1]):
                found.append(float((model(**ids, **spans).loss - expected).detach()))
    accelerator, model = switched("LlamaForSequenceClassification")
    alone = tiny("LlamaForSequenceClassification").eval()
    given = {"input_ids": IDS.clone(), "attention_mask": MASK.clone()}
    given["input_ids"][0, -1] = 0  # the padding id, which the mask calls a token
    given["input_ids"][MASK == 0] = 0
    expected = alone(**given).logits
    model.eval()
    with torch.no_grad():
        found.append(float((run(accelerator, model, given).logits - expected).abs().max()))
    return found


def test_heads_of_whole_rows(two: Processes) -> None:
    for found in two.run(of_whole_rows):
        assert found == pytest.approx([0.0] * 3, abs=1e-5), found


# ---- what they may change


def test_the_signatures_that_the_switch_counts_on() -> None:
    theirs = accelerate.Accelerator
    for name in ("maybe_context_parallel", "gather_for_metrics", "gather"):
        assert [*inspect.signature(getattr(theirs, name)).parameters] == [
            *inspect.signature(getattr(ours._Switch, name)).parameters
        ], name
    source = inspect.getsource(theirs)
    assert "args = self._prepare_cp(*args)" in source
    assert "result = self._prepare_fsdp2(*args)" in source
    assert "data = self.gather(input_data)" in inspect.getsource(theirs.gather_for_metrics)
    assert "self._cp_context = " in inspect.getsource(theirs._prepare_cp)


def test_the_calls_of_trainer_that_the_switch_counts_on() -> None:
    trainer = transformers.Trainer
    source = inspect.getsource(trainer._prepare_context_parallel_inputs)
    assert 'model.config._attn_implementation != "sdpa"' in source
    assert "no_restore_buffers=set(buffers)" in source
    assert "self.accelerator.maybe_context_parallel" in source
    assert "self.get_tp_size() * self.get_cp_size() * self.get_sp_size()" in inspect.getsource(
        trainer._get_num_items_in_batch
    )
    evaluation = inspect.getsource(trainer.evaluation_loop)
    assert "logits = self.accelerator.pad_across_processes(logits" in evaluation
    assert evaluation.index("pad_across_processes(logits") < evaluation.index("self.preprocess_logits_for_metrics(")


def test_what_buffers_say() -> None:
    ids = torch.tensor([[7, 8, 9, 4]])
    assert unnamed_buffers.said_by([ids, torch.tensor([[0, 1, 0, 1]])], [1, 1], (1, 4)).keys() == {"position_ids"}
    for x in ([[0, 1, 2, 3]], [[0, 0, 0, 0]], [[1, 1, 1, 1]], [[0, 1, 1, 0]], [[0, 0, 1, 1]]):
        assert not unnamed_buffers.said_by([ids, torch.tensor(x)], [1, 1], (1, 4)), x
    assert not unnamed_buffers.said_by([ids, torch.tensor([[1.0, 1, 0, 0]])], [1, 1], (1, 4))
    with pytest.raises(ValueError, match="several tensors of positions"):
        unnamed_buffers.said_by([torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 0, 1, 0]])], [1, 1], (1, 4))
