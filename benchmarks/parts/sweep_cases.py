"""One class of transformers over two ranks against one process: `play` is a case of `benchmarks.sweep`.

The batches can show what a model reads by id, by row or by a long position. A padding id stands inside documents whose
mask says token. Where the padding id is the end token, documents end with it. Rows differ in all. Positions go beyond
the windows, chunks and thresholds of `benchmarks.parts.tiny_models`. Ranks are threads (`SimGroup`); one process runs
the model with transformers' own attention: a padded batch in one call, as users do, and packed documents one by one.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import importlib
import inspect
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F

import cp_fast
from benchmarks.parts.sweep_images import Pictures, kinds_of_pictures, pictures_of
from benchmarks.parts.tiny_models import ORDINARY, TooLarge, shrunk, tiny_model
from cp_fast.integrations import transformers as ours
from cp_fast.integrations.hugging_face.image_models import ImageModel
from cp_fast.integrations.hugging_face.prepared_model import prepared_model
from cp_fast.integrations.hugging_face.task_head import Head
from cp_ref import SimGroup
from cp_ref.groups.group import PaperGroup

__all__ = ["LAYOUTS", "TASKS", "classes", "play", "switches"]

TASKS = {  # and the mapping of transformers that lists their classes
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "sequences": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "questions": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
LAYOUTS = ("dual_chunk", "contiguous", "balanced")
ROWS = (38, 23)  # tokens of the documents; positions go beyond the thresholds of `tiny_models`
PACKED = (21, 1, 17)
SHIFTS = ("causal", "images")  # tasks whose labels are the next tokens'
ALLOWED = {"logits": 2e-4, "loss": 2e-4, "gradients": 2e-3}  # relative to the largest; gradients to each weight's norm
FLOOR = 1e-3  # of the largest gradient's norm, below which a weight's own does not count
OURS = ("cp_fast", "cp_ref")
_FOREIGN = "does not run with cp_fast's attention"  # a refusal that hands on an error of another origin

Batch = dict[str, torch.Tensor]


def classes() -> dict[str, str]:
    """The names of all classes that are played, and the task of each: the first that lists it."""
    theirs, found = importlib.import_module("transformers.models.auto.modeling_auto"), dict[str, str]()
    for task, mapping in TASKS.items():
        for names in getattr(theirs, mapping).values():
            for name in names if isinstance(names, list | tuple) else [names]:
                found.setdefault(name, task)
    return found


_UNSWITCHED = {"return_dict", "use_cache", "is_encoder_decoder", "output_hidden_states", "output_attentions"}
_UNSWITCHED |= {"add_cross_attention", "cross_attention_hidden_size", "output_router_logits"}
_FROM_16 = {"original_max_position_embeddings": 16}
_ANGLES: dict[str, dict[str, Any]] = {  # of rotary embeddings that a threshold of positions changes
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0, **_FROM_16},
    "yarn": {"factor": 4.0, **_FROM_16},
    "longrope": {"factor": 4.0, **_FROM_16},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_FROM_16},
}


def switches(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configurations of a class with one switch set another way: a name for each, and the entries."""
    kind: Any = getattr(importlib.import_module("transformers"), name)
    try:
        config = shrunk(kind)
    except Exception:  # which `play` tells
        return
    if config.get_text_config() is not config:
        return
    entries = {entry: value for entry, value in vars(config).items() if entry[0] != "_"}
    for entry, value in sorted(entries.items()):
        if isinstance(value, bool) and entry not in _UNSWITCHED:
            yield f"{entry}={not value}", {entry: not value}
    windows = [entry for entry in ("sliding_window", "attention_window") if entries.get(entry, 0) in (None, False)]
    for entry in windows:
        more = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": "as it is"}
        yield f"{entry}=6", {entry: 6} | {n: x for n, x in more.items() if n in entries}
    if entries.get("use_bidirectional_attention", 0) is None:
        yield "use_bidirectional_attention=all", {"use_bidirectional_attention": "all"}
    angles = entries.get("rope_parameters")
    if isinstance(angles, dict) and "rope_theta" in angles:
        half = int(getattr(config, "head_dim", None) or 8) // 2
        for rope_type, more in _ANGLES.items():
            factors = {"short_factor": [1.0] * half, "long_factor": [1.0 + i for i in range(half)]}
            lists = factors if rope_type == "longrope" else {}
            yield f"rope_type={rope_type}", {"rope_parameters": angles | more | lists | {"rope_type": rope_type}}


# ---- batches


@dataclass(frozen=True)
class Rows:
    """A batch as a collator makes it, and what is learnt from it.

    Args:
        kind: "padded", "packed", or "spans": rows of one length, with a span for each.
        given: input_ids, attention_mask or position_ids.
        labels: [b, s] of tokens; or one for each document.
        targets: [b, s], the labels where the logits have them: those of the next tokens, or their own.
        alone: of a packed batch with pictures, the arguments of each document for one process.
    """

    kind: str
    given: Batch
    labels: torch.Tensor
    targets: torch.Tensor
    spans: Batch = field(default_factory=dict[str, torch.Tensor])
    alone: list[Batch] | None = None

    @property
    def mask(self) -> torch.Tensor | None:
        """bool [b, s]: which are tokens; None of a packed batch."""
        return self.given["attention_mask"].bool() if "attention_mask" in self.given else None

    def documents(self) -> Iterator[tuple[int, slice]]:
        """The row and the tokens of each document of a packed batch."""
        start = 0
        lengths = PACKED if self.alone is None else [one["input_ids"].shape[1] for one in self.alone]
        for n in lengths:
            yield 0, slice(start, start + n)
            start += n


def rows_of(task: str, kind: str, config: Any) -> Rows:
    """A batch of a task. config: the model's, which says what padding is."""
    generator = torch.Generator().manual_seed(3)
    text = config.get_text_config()
    padding = getattr(text, "pad_token_id", None)
    padding = padding if isinstance(padding, int) else 0
    lengths = {"packed": PACKED, "padded": ROWS, "spans": (ROWS[0],) * 2}[kind]
    pieces = [torch.randint(ORDINARY.start, ORDINARY.stop, (n,), generator=generator) for n in lengths]
    for n, piece in enumerate(pieces):
        if len(piece) > 9:
            piece[6 + n] = padding  # the mask says token
        piece[-1] = padding if task == "sequences" else piece[-1]  # which is the end token too
    labels = [piece % 3 if task == "tokens" else piece.clone() for piece in pieces]
    for one in labels:
        one[9 : 9 + 2] = -100
    if kind != "packed":
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=padding)
        given = {"input_ids": ids, "attention_mask": mask}
        learnt = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    else:
        given = {"input_ids": torch.cat(pieces)[None]}
        given["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
        learnt = torch.cat(labels)[None]
        if task in SHIFTS:
            learnt = learnt.masked_fill(given["position_ids"] == 0, -100)
    targets = F.pad(learnt[:, 1:], (0, 1), value=-100) if task in SHIFTS else learnt
    if task == "sequences":
        return Rows(kind, given, torch.arange(len(lengths)) % 3, targets)
    spans = {"start_positions": torch.tensor([17, 4]), "end_positions": torch.tensor([30, 9])}
    return Rows(kind, given, learnt, targets, spans if kind == "spans" else {})


def rows_of_pictures(task: str, packed: bool, pictures: Pictures, config: Any) -> Rows:
    """A batch with pictures. config: the model's, which says what padding is."""
    padding = getattr(config.get_text_config(), "pad_token_id", None)
    padding = padding if isinstance(padding, int) else 0
    documents = [
        (ids, types) for ids, types in zip(pictures.ids, pictures.types, strict=True) if packed or len(ids) > 1
    ]
    lengths = torch.tensor([len(ids) for ids, _ in documents])
    learnt = [ids % 3 if task == "tokens" else ids.clone() for ids, _ in documents]
    for one in learnt:
        one[9 : 9 + 2] = -100
    if packed:
        ids, types = (torch.cat(x)[None] for x in zip(*documents, strict=True))
        labels = torch.cat(learnt)[None]
        given = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths.tolist()])[None]}
        labels = labels.masked_fill(given["position_ids"] == 0, -100) if task in SHIFTS else labels
    else:
        pad = torch.nn.utils.rnn.pad_sequence
        every, kinds = (list(x) for x in zip(*documents, strict=True))
        ids, types = pad(every, batch_first=True, padding_value=padding), pad(kinds, batch_first=True)
        labels = pad(learnt, batch_first=True, padding_value=-100)
        given = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
    targets = F.pad(labels[:, 1:], (0, 1), value=-100) if task in SHIFTS else labels
    labels = torch.arange(len(documents)) % 3 if task == "sequences" else labels
    alone = [
        {"input_ids": row[None], "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
        | more
        | dict.fromkeys(pictures.types_named, kinds[None])
        for row, kinds, more in zip(pictures.ids, pictures.types, pictures.alone, strict=True)
    ]
    named = dict.fromkeys(pictures.types_named, types)
    return Rows(
        "packed" if packed else "padded", given | pictures.whole | named, labels, targets, {}, alone if packed else None
    )


# ---- what a model computes


@dataclass
class Result:
    """Logits of the tokens or of the documents, a loss, and its gradients by weight."""

    logits: torch.Tensor
    loss: torch.Tensor
    grads: dict[str, torch.Tensor]


@dataclass
class Found:
    """What came of a class: the worst errors, with the case of each; refusals and faults by case."""

    errors: dict[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    raised: dict[str, str] = field(default_factory=dict[str, str])

    def compare(self, case: str, mine: Result, alone: Result) -> None:
        """Add the errors of a case."""
        largest = max((x.norm() for x in alone.grads.values()), default=torch.tensor(0.0))
        errors = {"logits": _relative(mine.logits, alone.logits), "loss": _relative(mine.loss, alone.loss)}
        for name, error in errors.items():
            self._add(name, error, case)
        for name in mine.grads.keys() | alone.grads.keys():
            one, other = (x.get(name, torch.zeros(())) for x in (mine.grads, alone.grads))
            bound = torch.maximum(other.norm(), FLOOR * largest).clamp(min=1e-12)
            self._add("gradients", float((one - other).norm() / bound), f"{case}, {name}")

    def _add(self, name: str, error: float, case: str) -> None:
        if name not in self.errors or not error <= self.errors[name][0]:
            self.errors[name] = error, case


def _relative(mine: torch.Tensor, alone: torch.Tensor) -> float:
    if mine.shape != alone.shape:
        return float("inf")
    return float((mine - alone).abs().max() / alone.abs().max().clamp(min=1e-9))


def logits_of(out: Any) -> torch.Tensor:
    """[b, s, n] or [b, n]; the two of a question-answering head side by side."""
    if out.get("start_logits") is not None:
        return torch.stack([out["start_logits"], out["end_logits"]], dim=-1)
    return out["logits"]


def objective(task: str, logits: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
    """A sum over tokens or documents, over `count`: cross entropy, or of spans a weighted sum."""
    if task == "questions":
        weights = torch.where(targets == -100, 0.0, torch.sin(targets.float()))[..., None]
        return (logits * weights * torch.tensor([1.0, -0.5])).sum() / count
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=-100, reduction="sum") / count


def _counted(rows: Rows, task: str) -> int:
    return len(rows.labels) if task == "sequences" else int((rows.targets != -100).sum())


def alone_of(model: Any, task: str, rows: Rows, own_loss: bool, first: int = 0) -> Result:
    """One process.

    Args:
        own_loss: of a padded batch the loss is the model's own.
        first: the number of the first position, of packed documents.
    """
    model.zero_grad()
    numbered = "position_ids" in _parameters(model)
    more = {"use_cache": False} if "use_cache" in _parameters(model) else {}
    count = _counted(rows, task)
    if rows.mask is not None:
        given = dict(rows.spans) or ({"labels": rows.labels} if own_loss and task != "questions" else {})
        out = model(**rows.given, **given, **more)
        logits = logits_of(out)
        found = logits if task == "sequences" else logits[rows.mask]
        loss = out["loss"] if given else None
        if loss is None:
            loss = objective(task, logits, rows.labels if task == "sequences" else rows.targets, count)
    else:
        ids, each = rows.given["input_ids"], list(rows.documents())
        parts: list[torch.Tensor] = []
        for number, (row, tokens) in enumerate(each):
            if rows.alone:
                parts.append(logits_of(model(**rows.alone[number], **more)))
                continue
            places = first + rows.given["position_ids"][:, tokens]
            more |= {"position_ids": places} if numbered else {}
            parts.append(logits_of(model(input_ids=ids[row : row + 1, tokens], **more)))
        found = torch.cat([x if task == "sequences" else x[0] for x in parts])
        loss = objective(task, found, rows.labels if task == "sequences" else rows.targets[0], count)
    loss.backward()
    return Result(found.detach(), loss.detach(), _grads(model))


def _parameters(model: Any) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters


def _first_position(model: Any) -> int:
    """The number that a prepared model gives to the first position of a sequence."""
    return prepared_model(model).numbering.first


def _grads(model: Any) -> dict[str, torch.Tensor]:
    return {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None and w.grad.any()}


def rank_of(model: Any, task: str, rows: Rows, context: Any, learns: bool) -> Result:
    """A rank's part of the loss and of the gradients, with the logits of all."""
    model.zero_grad()
    batch, count = dict(rows.given), _counted(rows, task)
    if rows.kind == "packed":  # as the model numbers them
        batch["position_ids"] = batch["position_ids"] + _first_position(model)
    if learns:
        batch["labels"] = rows.labels
    fill = {} if task == "sequences" else {"targets": -100}
    part = ours.shard_batch(batch | ({"targets": rows.targets} if fill else {}), cp=context, model=model, fill=fill)
    targets = part.pop("targets", None)
    out = model(**part, **rows.spans)
    logits = logits_of(out)
    if task == "sequences":
        whole, loss = logits, objective(task, logits, rows.labels, count) / context.size
    else:
        whole = part["cp_batch"].unshard(logits.detach())
        whole = whole[0] if rows.mask is None else whole[rows.mask]
        loss = out["loss"] if learns or rows.spans else objective(task, logits, targets, count)
    loss.backward()
    return Result(whole.detach(), loss.detach(), _grads(model))


# ---- a class


def play(name: str, task: str, *, ranks: int = 2, **more: Any) -> dict[str, Any]:
    """What comes of a class: a verdict, a message, errors.

    Args:
        ranks: of the batches of text.
        more: entries of the configuration.

    Returns:
        verdict: "right"; "refused", by a message of cp_fast; "not built", where the class or its tiny model cannot run
            alone; "wrong"; "raised", by something else than cp_fast. message: why. Of errors the worst of each kind.
    """
    began = time.perf_counter()
    found = _play(name, task, ranks, more)
    return found | {"task": task, "seconds": round(time.perf_counter() - began, 1)}


def _play(name: str, task: str, count: int, more: dict[str, Any]) -> dict[str, Any]:
    try:
        model = tiny_model(name, **more)
    except TooLarge as error:
        return {"verdict": "not built", "message": str(error)}
    except Exception as error:
        return {"verdict": "not built", "message": said(error)}
    found, seen = Found(), dict[str, Any]()
    kinds = ("padded", "packed", "spans") if task == "questions" else ("padded", "packed")
    rows = {kind: rows_of(task, kind, model.config) for kind in kinds}

    def one(
        member: Any, rows: Mapping[str, Rows] = rows, layouts: Sequence[str] = LAYOUTS, images: Any = "whole"
    ) -> dict[str, Any]:
        contexts: dict[str, Any] = {
            layout: cp_fast.ContextParallel(member, "all_gather", layout=cast(Any, layout)) for layout in layouts
        }
        mine = ours.prepare(copy.deepcopy(model), contexts[layouts[0]], images=images)
        head = prepared_model(mine).task.head
        learns = head is not None and not isinstance(head, str)
        results: dict[str, Any] = {"learns": learns, "head": head, "first": _first_position(mine)}
        results["images"] = prepared_model(mine).images
        for kind, batch in rows.items():
            for layout, context in contexts.items():
                try:
                    results[f"{kind}, {layout}"] = rank_of(mine, task, batch, context, learns)
                except Exception as error:
                    results[f"{kind}, {layout}"] = error
        return results

    try:
        ranks = SimGroup(count).run(one)
    except Exception as error:
        if _FOREIGN in str(error) and (why := _not_alone(model, task, rows["padded"])):
            return {"verdict": "not built", "message": f"does not run alone: {why}"}
        return {"verdict": "refused" if is_ours(error) else "raised", "message": said(error)}
    learns, first = ranks[0]["learns"], ranks[0]["first"]
    if isinstance(ranks[0]["head"], str):
        seen["labels"] = ranks[0]["head"]
    images: ImageModel | None = ranks[0]["images"]
    pictures = {
        f"{' and '.join(f'{name}s' for name in names)}, {kind}": rows_of_pictures(
            task, kind == "packed", some, model.config
        )
        for names in kinds_of_pictures(images)
        for some in ([] if images is None else [pictures_of(model, images, names)])
        for kind in ("padded", "packed")
    }
    if images is not None:
        seen["with"] = [one.name for one in images.modalities]
        seen |= {"without": images.refused} if images.refused else {}
        seen |= {"shared": shared} if (shared := _shared(model, len(images.modalities))) else {}
    plays: list[tuple[int, Sequence[str], dict[str, Rows], list[dict[str, Any]]]] = [(count, LAYOUTS, rows, ranks)]
    for size, layouts in ((2, LAYOUTS), (3, LAYOUTS[-1:])) if pictures else ():
        how = "ranks" if size > 2 and seen.get("shared") else "whole"
        play = SimGroup(size).run(lambda member, layouts=layouts, how=how: one(member, pictures, layouts, how))
        plays.append((size, layouts, pictures, play))
    model.set_attn_implementation("eager") if _has_eager(model) else None
    learnt, head = rows | pictures, ranks[0]["head"]
    if isinstance(head, Head) and task in SHIFTS and not head.shifts:  # BART's kind: a token learns its own label
        learnt = {kind: replace(batch, targets=batch.labels) for kind, batch in learnt.items()}
    try:
        alone = {kind: alone_of(model, task, batch, learns, first) for kind, batch in learnt.items()}
    except Exception as error:
        return {"verdict": "not built", "message": f"does not run alone: {said(error)}"}
    for size, layouts, some, results in plays:
        for case in (f"{kind}, {layout}" for kind in some for layout in layouts):
            parts = [rank[case] for rank in results]
            named = case if size == 2 else f"{case}, {size} ranks"
            odd = next((x for x in parts if isinstance(x, Exception)), None)
            if odd is not None:
                (found.refused if is_ours(odd) else found.raised)[named] = said(odd)
                continue
            loss = torch.stack([part.loss for part in parts]).sum()
            names = {n for part in parts for n in part.grads}
            zero = torch.zeros(())
            grads = {n: sum((part.grads.get(n, zero) for part in parts), zero) for n in names}
            found.compare(named, Result(parts[0].logits, loss, grads), alone[case.rpartition(",")[0]])
    return seen | _verdict(found)


def _shared(model: Any, modalities: int) -> bool:
    """Whether ranks can share out the pictures of all of a model's modalities."""
    try:
        mine = ours.prepare(copy.deepcopy(model), cp_fast.ContextParallel(PaperGroup(1)), images="ranks")
    except NotImplementedError:
        return False
    found = prepared_model(mine).images
    return found is not None and len(found.modalities) == modalities


def _not_alone(model: Any, task: str, rows: Rows) -> str:
    """Why one process cannot run a model, or ""."""
    try:
        alone_of(model, task, rows, own_loss=False)
    except Exception as error:
        return said(error)
    return ""


def _has_eager(model: Any) -> bool:
    try:
        copy.deepcopy(model).set_attn_implementation("eager")
    except Exception:
        return False
    return True


def _verdict(found: Found) -> dict[str, Any]:
    figures: dict[str, Any] = {name: float(f"{error:.2g}") for name, (error, _) in sorted(found.errors.items())}
    wrong = {n: at for n, (error, at) in found.errors.items() if not error <= ALLOWED[n]}
    some = {"refused in": found.refused} if found.refused and found.errors else {}
    if wrong:
        return {"verdict": "wrong", "message": "; ".join(f"{n} in {at}" for n, at in wrong.items()), **figures, **some}
    if found.raised:
        case, message = next(iter(found.raised.items()))
        return {"verdict": "raised", "message": f"{case}: {message}", **figures, **some}
    if found.refused and not found.errors:
        return {"verdict": "refused", "message": next(iter(found.refused.values()))}
    return {"verdict": "right", **figures, **some}


def is_ours(error: BaseException) -> bool:
    """Whether an error is a refusal: raised in this package, and of a kind that users may expect."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and any(f"/{package}/" in frames[-1].filename for package in OURS)
    return inside and isinstance(error, NotImplementedError | ValueError | TypeError)


def said(error: BaseException) -> str:
    """An error's kind, where it is no refusal, and what it says, in one line."""
    text = " ".join(str(error).split())[:400]
    if is_ours(error):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"
