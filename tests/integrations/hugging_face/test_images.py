"""Models of images and text over ranks as in one process, and what is refused of them."""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import importlib
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cp_fast
from benchmarks.parts import sweep_cases
from benchmarks.parts.tiny_models import tiny_model
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.hugging_face import image_batches, prepared_model
from cp_fast.integrations.hugging_face.image_calls import begin_call
from cp_fast.integrations.hugging_face.image_models import find_images
from cp_fast.integrations.loss import loss_for_backward
from cp_fast.integrations.sequences import token_log_probs
from cp_ref import SimGroup
from cp_ref.schedules.words import LAYOUTS
from tests.dist.workers import Processes, run_program
from tests.integrations.hugging_face.image_families import IMAGES, Batch, batch_of, images_batch, tiny_images
from tests.integrations.hugging_face.test_prepare import Part, check, dist_of_one, grads_of, part_of, part_of_prepared
from tests.meta.step.step_processes import StepProcesses

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")

QWEN, QWEN3, GEMMA, LLAVA = (f"{name}ForConditionalGeneration" for name in ("Qwen2_5_VL", "Qwen3VL", "Gemma3", "Llava"))
KINDS = ("rows", "packed", "text")


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        (QWEN, KINDS[:1]),
        (GEMMA, KINDS[:1]),
        *(pytest.param(name, KINDS, marks=pytest.mark.thorough, id=name) for name in IMAGES),
    ],
)
def test_a_family_of_images_is_the_same_over_ranks(name: str, kinds: tuple[str, ...]) -> None:
    """Rows, packed documents and text alone, under every layout: each rank prepares its model once for all of them."""
    cases = [(kind, layout) for kind in kinds for layout in LAYOUTS]
    batches = {kind: batch_of(name, kind) for kind in kinds}

    def one(member: Any) -> list[Part]:
        contexts = {layout: cp_fast.ContextParallel(member, layout=layout) for layout in LAYOUTS}
        model = ours.prepare(tiny_images(name), contexts["dual_chunk"])
        return [part_of_prepared(model, batches[kind][0], contexts[layout]) for kind, layout in cases]

    found = SimGroup(2).run(one)
    for n, (kind, _) in enumerate(cases):
        check(name, [parts[n] for parts in found], batches[kind][1])


@pytest.mark.parametrize("name", [QWEN, QWEN3, GEMMA, LLAVA])
def test_a_rank_without_image_tokens_has_gradients_of_zero(name: str) -> None:
    """Each rank has a gradient of every weight, or sums over ranks would wait for the others for ever."""
    batch = images_batch(name, [[2]], [40])
    parts = SimGroup(2).run(lambda member: part_of(name, member, batch, layout="contiguous"))
    assert parts[0][1].keys() == parts[1][1].keys()
    seen = [name for name in parts[1][1] if "vision" in name or "visual" in name]
    assert seen
    assert all(parts[0][1][name].any() for name in seen if "merger" in name or "projector" in name)
    assert not any(parts[1][1][name].any() for name in seen)
    check(name, parts, batch)


def planted_order(holder: Any, images: Any, sequences: Any, given: dict[str, Any]) -> None:
    """The first rows of the vision part for a rank's tokens, whichever they are."""
    rows = {one: (torch.arange(len(mine)), count) for one, (mine, count) in sequences.image_rows.items()}
    there, sequences.image_rows = sequences.image_rows, rows
    begin_call(holder, images, sequences, given)
    sequences.image_rows = there


def planted_positions(*_: Any) -> None:
    """Positions of text."""


def planted_masks(*_: Any) -> tuple[()]:
    """Causal masks inside images."""
    return ()


@pytest.mark.parametrize(
    ("name", "where", "change"),
    [
        (QWEN, (prepared_model, "begin_call"), planted_order),
        (LLAVA, (prepared_model, "begin_call"), planted_order),
        (QWEN, (image_batches.ImageBatch, "_of_axes"), planted_positions),
        (GEMMA, (image_batches, "blocks_of"), planted_masks),
    ],
)
def test_a_planted_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, where: Any, change: Any) -> None:
    batch, whole = batch_of(name, "rows")
    holder, function = where
    monkeypatch.setattr(holder, function, change)
    parts = SimGroup(2).run(lambda member: part_of(name, member, batch))
    with pytest.raises(AssertionError, match="not close"):
        check(name, parts, whole)


def test_images_straddle_the_cuts_of_these_batches() -> None:
    """Both ranks have tokens of one image, and of the rows one is without an image."""
    for name in (QWEN, GEMMA, LLAVA):  # those of the others are as long
        family = IMAGES[name]
        batch, _ = batch_of(name, "rows")

        def one(member: Any, name: str = name, batch: Batch = batch) -> list[int]:
            cp = cp_fast.ContextParallel(member)
            model = ours.prepare(tiny_images(name), cp)
            return ours.shard_batch(batch, cp=cp, model=model)["cp_batch"].image_rows["image"][0].tolist()

        first, second = SimGroup(2).run(one)
        tokens = family.tokens or 4
        assert sorted(first + second) == list(range(len(first) + len(second)))
        assert {n // tokens for n in first} & {n // tokens for n in second}


def test_positions_of_three_axes_are_cut_as_ids_are() -> None:
    batch, _ = batch_of(QWEN, "rows")
    packed, _ = batch_of(QWEN, "packed")
    inner = tiny_images(QWEN).model
    names = ("mm_token_type_ids", "image_grid_thw", "attention_mask")
    expected, _ = inner.get_rope_index(batch["input_ids"], **{name: batch[name] for name in names})
    tokens = batch["attention_mask"].bool()

    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny_images(QWEN), cp)
        for given, positions in ((batch, expected), (packed, expected[:, tokens][:, None])):
            part = ours.shard_batch(given, cp=cp, model=model)
            there = part["position_ids"]
            mine = part["cp_batch"].unshard(there.permute(1, 2, 0)).permute(2, 0, 1)
            assert torch.equal(mine, positions)
            assert part["cp_batch"].longest == int(positions.max()) + 1
            said = torch.cat([given["position_ids"][None], positions]) if given is packed else positions
            again = ours.shard_batch({**given, "position_ids": said}, cp=cp, model=model)
            assert torch.equal(again["position_ids"], there)
            assert torch.equal(again["cp_batch"].documents, part["cp_batch"].documents)
        model(**part)
        assert model.model.rope_deltas is None  # which belongs to generation

    SimGroup(2).run(one)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [QWEN, QWEN3])
def test_images_and_videos_in_one_batch(name: str) -> None:
    ids = torch.randint(3, 40, (2, 40), generator=torch.Generator().manual_seed(1))
    ids[0, 3:11], ids[1, 5:9] = 40, 40
    grids = torch.tensor([[1, 4, 8], [1, 4, 4]])
    clip = torch.tensor([[3, 4, 4]])
    if name == QWEN:
        ids[0, 15:27] = 41
    else:  # Qwen3-VL has text between frames
        for frame in range(3):
            ids[0, 15 + 6 * frame : 19 + 6 * frame] = 41
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids >= 40, -100), "image_grid_thw": grids}
    batch |= {"video_grid_thw": clip, "mm_token_type_ids": (ids == 40).int() + 2 * (ids == 41).int()}
    batch |= {"pixel_values": torch.randn(48, 96), "pixel_values_videos": torch.randn(48, 96)}
    if name == QWEN:
        batch["second_per_grid_ts"] = torch.tensor([0.5])
    check(name, SimGroup(2).run(lambda member: part_of(name, member, batch)), batch)


def test_calls_of_a_prepared_model_of_images() -> None:
    """A model alone is as before; what would be taken for something else raises."""
    cp = cp_fast.ContextParallel(dist_of_one())
    batch, _ = batch_of(QWEN, "rows")
    bare = tiny_images(QWEN)
    expected = bare(**batch).logits
    model = ours.prepare(tiny_images(QWEN), cp)
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert model.config.text_config._attn_implementation == "cp_fast"
    real = batch["attention_mask"].bool()
    part: dict[str, Any] = {}
    for _ in range(2):
        part = ours.shard_batch(batch, cp=cp, model=model)
        torch.testing.assert_close(model(**part).logits[:, :34][real], expected[real], rtol=1e-4, atol=1e-4)
        hidden = model.model(**{n: part[n] for n in part if n not in ("labels", "shift_labels", "num_items_in_batch")})
        torch.testing.assert_close(model.lm_head(hidden[0])[:, :34][real], expected[real], rtol=1e-4, atol=1e-4)
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-4)
        model.set_attn_implementation("cp_fast")  # also of the vision part, which goes on with the whole
    text = {name: batch[name] for name in ("input_ids", "attention_mask")}
    images = {name: batch[name] for name in ("pixel_values", "image_grid_thw")}
    for given, said in (
        (part | {"mm_encoder_outputs": {"image": 1}}, "mm_encoder_outputs is .* does not know"),
        (part | {"mm_token_type_ids": batch["mm_token_type_ids"]}, "mm_token_type_ids is .* Give it to shard_batch"),
        (ours.shard_batch(text, cp=cp) | images, r"cp_batch does not say .* shard_batch\(batch, cp=..., model=model\)"),
        (
            {name: x for name, x in part.items() if name != "pixel_values"},
            "is given no pixel_values, and cp_batch says",
        ),
        (part | {"pixel_values": part["pixel_values"][:16], "image_grid_thw": part["image_grid_thw"][:1]}, "4 rows"),
    ):
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=said):
            model(**given)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image_grid_thw": None}, "batch has images and no image_grid_thw"),
        ({"pixel_values": None}, "batch has image_grid_thw and no pixel_values"),
        ({"mm_token_type_ids": None}, "and no mm_token_type_ids, .* processor returns them"),
        (
            {"mm_token_type_ids": torch.zeros(3, 5)},
            r"mm_token_type_ids has shape \[3, 5\]; it must be that of input_ids",
        ),
        ({"image_sizes": torch.ones(3, 2)}, "batch has image_sizes, which Qwen2_5_VLModel does not take"),
        ({"image_grid_thw": torch.ones(3, 3).long()}, "the positions of images cannot be found .* the same images"),
        (
            {"attention_mask": torch.ones(3, 34).long().index_fill(0, torch.tensor([1]), 0)},
            "attention_mask has no token in row 1, .* leave this row out",
        ),
        ({"position_ids": torch.zeros(4, 3, 34).long()}, r"four axes are of a packed row .* \[3, b, s\]"),
        ({"position_ids": torch.zeros(2, 3, 34).long()}, r"position_ids has shape \[2, 3, 34\]"),
        ({"input_ids": torch.zeros(5).long()}, r"input_ids is \[5\]; it must be a tensor \[b, s\]"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.one_in(3)
def test_what_one_rank_refuses_of_images_all_refuse(change: dict[str, Any], said: str, alone: bool) -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny_images(QWEN), cp)
        batch, _ = batch_of(QWEN, "rows")
        wrong = batch | (change if member.rank or not alone else {})
        with pytest.raises((ValueError, TypeError), match=said):
            ours.shard_batch({name: x for name, x in wrong.items() if x is not None}, cp=cp, model=model)
        ours.shard_batch(batch, cp=cp, model=model)

    SimGroup(2).run(one)


def test_images_that_differ_between_ranks_are_refused() -> None:
    def one(member: Any, name: str) -> None:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny_images(QWEN), cp)
        batch, _ = batch_of(QWEN, "rows")
        wrong = batch[name].clone()
        wrong.flatten()[-1] += member.rank
        with pytest.raises(ValueError, match=f"batch differs between rank . and rank . in .*{name}"):
            ours.shard_batch(batch | {name: wrong}, cp=cp, model=model)

    for name in ("pixel_values", "mm_token_type_ids"):
        SimGroup(2).run(lambda member, name=name: one(member, name))


def test_images_without_a_model_of_images_are_refused() -> None:
    cp = cp_fast.ContextParallel(dist_of_one())
    batch, _ = batch_of(LLAVA, "rows")
    with pytest.raises(ValueError, match=r"batch has pixel_values, .* give shard_batch the prepared model"):
        ours.shard_batch(batch, cp=cp)
    text = ours.prepare(tiny_images(LLAVA).model.language_model, cp)
    with pytest.raises(ValueError, match=r"batch has pixel_values, .* its model takes text alone"):
        ours.shard_batch(batch, cp=cp, model=text)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("GotOcr2ForConditionalGeneration", "causal"),  # whose own configuration keeps its attention
        *(
            pytest.param(name, task, marks=pytest.mark.thorough)
            for name, task in (
                ("MossTranscribeDiarizeForConditionalGeneration", "causal"),  # whose sounds have one length
                ("Qwen3ASRForTokenClassification", "tokens"),
                ("DeepseekOcr2ForConditionalGeneration", "images"),
                ("EvollaForProteinText2Text", "images"),  # which hands position_ids on as a keyword
            )
        ),
    ],
)
def test_a_class_is_right_over_ranks(name: str, task: str) -> None:
    found = sweep_cases.play(name, task)
    assert (found["verdict"], found.get("refused in", {})) == ("right", {}), found


def test_other_models_of_images_are_refused_by_name() -> None:
    cp = cp_fast.ContextParallel(dist_of_one())
    with pytest.raises(NotImplementedError, match=r"IdeficsForVisionText2Text reads images, in a way .* text alone"):
        ours.prepare(tiny_model("IdeficsForVisionText2Text"), cp)
    with pytest.raises(ValueError, match="images is 'ranks', and LlamaForCausalLM takes text alone"):
        ours.prepare(tiny_model("LlamaForCausalLM"), cp, images="ranks")
    with pytest.raises(ValueError, match="images is 'all'; it must be 'whole' or 'ranks'"):
        ours.prepare(tiny_images(LLAVA), cp, images=cast(Any, "all"))


class AddsMean(torch.nn.Module):
    """A projector that adds the mean of all rows of a batch to each."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 9 * x.mean()


def test_what_prepare_cannot_prove_of_images_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that sees all images, a mask between images that no rule has, and pictures that see each other."""
    cp = cp_fast.ContextParallel(dist_of_one())
    model = tiny_images(LLAVA)
    kind = type(model.model)
    mask = kind.get_placeholder_mask

    def with_sum(self: Any, input_ids: Any, inputs_embeds: torch.Tensor, image_features: torch.Tensor) -> Any:
        inputs_embeds.add_(0.1 * image_features.sum(0))
        return mask(self, input_ids, inputs_embeds, image_features)

    monkeypatch.setattr(kind, "get_placeholder_mask", with_sum)
    with pytest.raises(
        NotImplementedError, match=r"could not prove right over ranks: images: a slice .* has other logits"
    ):
        ours.prepare(model, cp)
    monkeypatch.undo()
    gemma = tiny_images(GEMMA)
    module = importlib.import_module(type(gemma).__module__)

    def every_other(types: torch.Tensor, device: Any = None) -> torch.Tensor:
        return torch.where(types == 1, torch.arange(types.shape[1]) % 2, -1)

    monkeypatch.setattr(module, "get_block_sequence_ids_for_mask", every_other)
    with pytest.raises(NotImplementedError, match="tokens of images see each other by a mask that cp_fast does not"):
        ours.prepare(gemma, cp)
    monkeypatch.undo()
    llava = tiny_images(LLAVA)
    llava.model.multi_modal_projector = AddsMean(llava.model.multi_modal_projector)
    ours.prepare(copy.deepcopy(llava), cp)
    with pytest.raises(NotImplementedError, match='images="ranks" cannot share them out: a picture alone has other'):
        ours.prepare(llava, cp, images="ranks")


def test_the_text_model_of_other_models_takes_embeddings() -> None:
    """What the refusal of other models says."""
    name = LLAVA
    batch, _ = batch_of(name, "rows")
    alone = tiny_images(name)
    embeddings: list[torch.Tensor] = []
    hook = alone.model.language_model.register_forward_pre_hook(
        lambda _, __, given: embeddings.append(given["inputs_embeds"]), with_kwargs=True
    )
    expected = alone.model(**{n: x for n, x in batch.items() if n != "labels"})[0]
    hook.remove()

    def one(member: Any) -> torch.Tensor:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(tiny_images(name).model.language_model, cp)
        part = ours.shard_batch({n: batch[n] for n in ("input_ids", "attention_mask")}, cp=cp)
        sequences = part["cp_batch"]
        given = {"inputs_embeds": sequences.shard(embeddings[0].detach()), "position_ids": part["position_ids"]}
        return sequences.unshard(model(**given, cp_batch=sequences)[0])

    real = batch["attention_mask"].bool()
    for found in SimGroup(2).run(one):
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_windows_and_images_of_every_length() -> None:
    """Gemma 3's window hides keys of an image too, where the image is longer."""
    name = GEMMA
    places = [[3, 9, 20], [0, 26]]
    batch = images_batch(name, places, [30, 30])
    for layout in LAYOUTS:
        parts = SimGroup(3).run(lambda member, layout=layout: part_of(name, member, batch, layout=layout))
        check(name, parts, batch)


def step_of(cp: Any, name: str) -> Any:
    """A model of images and its step over two batches, for `compare_step`."""
    model = tiny_images(name)
    model.set_attn_implementation("eager")
    if cp is not None:
        ours.prepare(model, cp)

    def step(batches: list[Batch]) -> torch.Tensor:
        total = torch.zeros(())
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        for batch in batches:
            part: Any = batch if cp is None else ours.shard_batch(batch, cp=cp, model=model)
            loss = model(**part | {"num_items_in_batch": count}).loss
            loss.backward()
            total += loss.detach()
        for weight in model.parameters() if cp is not None else []:
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
        return total

    return model, step, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [QWEN, GEMMA, "Qwen3_5MoeForConditionalGeneration"])
def test_a_step_with_images_is_that_of_one_process(steps: StepProcesses, name: str) -> None:
    """Two batches with images straddling cuts, rows without any, and other lengths; the second of text alone."""
    batches = [batch_of(name, "rows")[0], batch_of(name, "text")[0]]
    report = steps.compare(partial(step_of, name=name), batches, 2, loss="sum")
    assert report.right, str(report)


@pytest.mark.thorough
def test_the_example_of_images(steps: StepProcesses) -> None:
    example = Path(__file__).parents[3] / "examples" / "vision_language.py"
    one, two = (run_program(example, processes) for processes in (1, 2))
    losses = [[float(word) for word in said.split("losses")[1].split()] for said in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    report = steps.compare("examples.vision_language:build", "examples.vision_language:batch", 2, loss="sum")
    assert report.right, str(report)


def wrapped(name: str, kind: str) -> Part:
    """This rank's part in a wrapper: of the loss, and of the gradients, which wrappers have added up."""
    cp = cp_fast.ContextParallel(dist.group.WORLD)
    model: Any = ours.prepare(tiny_images(name), cp)
    outer: Any = model
    if kind == "DDP":
        outer = DistributedDataParallel(model, find_unused_parameters=True)
    elif kind == "FSDP":
        mesh = init_device_mesh("cpu", (2,))
        part = model.model if name == QWEN else model.model.vision_tower  # Gemma 3's head is tied
        for layer in (*model.model.language_model.layers, part):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "checkpointing":
        model.train().gradient_checkpointing_enable()
    else:
        # of one rank: graphs of gradients, and both ranks in graphs, are those of text alone
        outer = torch.compile(model, backend="eager") if dist.get_rank() == 0 else model
    loss = outer(**ours.shard_batch(batch_of(name, "rows")[0], cp=cp, model=outer)).loss
    summed = kind in ("DDP", "FSDP")
    loss_for_backward(loss, averaged_over=outer if summed else None).backward()
    grads = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads_of(model).items()}
    return loss.detach(), {n: g / 2 if summed else g for n, g in grads.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, kind) for name in (QWEN, GEMMA) for kind in ("DDP", "FSDP", "checkpointing")), (LLAVA, "compile")],
)
def test_wrappers_of_a_prepared_model_of_images(two: Processes, name: str, kind: str) -> None:
    check(name, two.run(wrapped, name, kind), batch_of(name, "rows")[0])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["rows", "packed"])
def test_log_probabilities_and_adapters_of_a_model_of_images(kind: str) -> None:
    """`token_log_probs`, of a model whose vision part is frozen and has adapters, as the text has."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install '.[test-integrations]'")

    def adapted() -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "qkv"], init_lora_weights=False)
        return peft.get_peft_model(tiny_images(QWEN), config)

    given, whole = batch_of(QWEN, kind)
    alone = adapted()
    labels = torch.nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=-100)
    losses = torch.nn.functional.cross_entropy(alone(**whole).logits.mT, labels, reduction="none")
    losses.sum().backward()

    def one(member: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        cp = cp_fast.ContextParallel(member)
        model = ours.prepare(adapted(), cp)
        found = token_log_probs(model, part := ours.shard_batch(given, cp=cp, model=model))
        found.sum().neg().backward()
        return part["cp_batch"].unshard(found.detach()), grads_of(model)

    parts = SimGroup(2).run(one)
    real = whole["attention_mask"].bool()
    expected = -losses.detach()[real] if kind == "packed" else -losses.detach()
    torch.testing.assert_close(parts[0][0].view_as(expected), expected, rtol=1e-4, atol=1e-4)
    grads = grads_of(alone)
    assert any("visual" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(sum(part[name] for _, part in parts), grad, rtol=1e-3, atol=1e-5)


@pytest.mark.thorough
def test_places_of_images_are_found_on_the_cpu() -> None:
    """A default device of PyTorch is for the user's tensors."""
    for name, kind in ((QWEN, "packed"), (GEMMA, "rows"), (GEMMA, "packed")):
        batch, _ = batch_of(name, kind)

        def one(member: Any, name: str = name, batch: Batch = batch) -> None:
            for layout in LAYOUTS:
                cp = cp_fast.ContextParallel(member, layout=layout)
                model = ours.prepare(tiny_images(name), cp)
                with torch.device("meta"):
                    part = ours.shard_batch(batch, cp=cp, model=model)
                assert all(x.device.type == "cpu" for x in part.values() if isinstance(x, torch.Tensor))
                model(**part)

        SimGroup(2).run(one)


@pytest.mark.parametrize("name", IMAGES)
def test_functions_of_images_are_found(name: str) -> None:
    images = find_images(tiny_images(name))
    assert images is not None
    qwen = name.startswith("Qwen")
    assert [one.name for one in images.modalities] == ["image", "video"] if qwen else ["image"]
    assert images.modalities[0].entries[0] == "pixel_values"
    assert (images.where, images.axes, images.types) == ("model", 3 * qwen, IMAGES[name].types)
    assert images.refused == {}


# ---- the vision part shared out over the ranks


def shared_part(name: str, group: Any, batch: Batch, **how: Any) -> tuple[Part, int]:
    """A rank's part, where the ranks share the pictures out; and how many patches its vision part has run on."""
    cp = cp_fast.ContextParallel(group, **how)
    model = ours.prepare(tiny_images(name), cp, images="ranks")
    tower = model.model.visual if hasattr(model.model, "visual") else model.model.vision_tower
    seen: list[int] = []

    def count(_: Any, by_place: Any, named: dict[str, Any]) -> None:
        x = by_place[0] if by_place else named["pixel_values"]
        seen.append(len(x))

    tower.register_forward_pre_hook(count, with_kwargs=True)
    loss = model(**ours.shard_batch(batch, cp=cp, model=model)).loss
    loss.backward()
    return (loss.detach(), grads_of(model)), sum(seen)


@pytest.mark.parametrize(
    ("name", "kind", "layout", "size"),
    [
        pytest.param(n, *how, marks=() if n in (QWEN3, LLAVA) else pytest.mark.thorough)
        for n in IMAGES
        for how in (("rows", "dual_chunk", 3), ("packed", "balanced", 2))
    ],
)
def test_ranks_share_the_images_of_a_batch(name: str, kind: str, layout: str, size: int) -> None:
    """Losses and gradients are those of one process, each rank has fewer pictures, and gradients of all weights."""
    batch, whole = batch_of(name, kind)
    found = SimGroup(size).run(lambda member: shared_part(name, member, batch, layout=layout))
    check(name, [part for part, _ in found], whole)
    pictures = len(batch["pixel_values"])
    assert sum(seen for _, seen in found) == pictures
    assert max(seen for _, seen in found) < pictures
    names = [set(grads) for (_, grads), _ in found]
    assert all(one == names[0] for one in names)


@pytest.mark.parametrize("name", [QWEN3, LLAVA])
def test_a_rank_without_a_picture_has_gradients_of_zero(name: str) -> None:
    batch = images_batch(name, [[2]], [40])
    found = SimGroup(2).run(lambda member: shared_part(name, member, batch))
    parts = [part for part, _ in found]
    seen = [name for name in parts[0][1] if "vision" in name or "visual" in name]
    assert seen
    assert any(parts[0][1][name].any() for name in seen)
    assert not any(parts[1][1][name].any() for name in seen)
    check(name, parts, batch)


@pytest.mark.thorough
def test_frames_of_videos_are_shared_out() -> None:
    ids = torch.randint(3, 40, (2, 40), generator=torch.Generator().manual_seed(1))
    ids[0, 15:27] = 41
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids >= 40, -100), "video_grid_thw": torch.tensor([[3, 4, 4]])}
    batch |= {"mm_token_type_ids": 2 * (ids == 41).int(), "pixel_values_videos": torch.randn(48, 96)}
    found = SimGroup(3).run(lambda member: shared_part(QWEN, member, batch))
    check(QWEN, [part for part, _ in found], batch)
    assert [seen for _, seen in found] == [16, 16, 16]


def averaged(name: str) -> Part:
    """FSDP's sums of gradients, of a model whose pictures the ranks share."""
    cp = cp_fast.ContextParallel(dist.group.WORLD)
    model: Any = ours.prepare(tiny_images(name), cp, images="ranks")
    mesh = init_device_mesh("cpu", (2,))
    part = model.model.visual if name == QWEN3 else model.model.vision_tower
    for layer in (*model.model.language_model.layers, part):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = model(**ours.shard_batch(batch_of(name, "rows")[0], cp=cp, model=model)).loss
    loss_for_backward(loss, averaged_over=model).backward()
    grads = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads_of(model).items()}
    return loss.detach(), {n: g / 2 for n, g in grads.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [QWEN3, GEMMA])
def test_fsdp_averages_gradients_of_shared_images(two: Processes, name: str) -> None:
    check(name, two.run(averaged, name), batch_of(name, "rows")[0])


@pytest.mark.thorough
def test_shared_images_over_a_ring_of_groups() -> None:
    batch, whole = batch_of(QWEN3, "rows")

    def one(member: Any) -> Part:
        return shared_part(QWEN3, member.split(2), batch, cp_comm_type="a2a+p2p")[0]

    check(QWEN3, SimGroup(4).run(one), whole)
