"""A small model and its training step over ranks, with a place for every planted mistake; and the mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import cp_fast
from cp_ref import dense_attention
from cp_ref.reference.linear.recurrence import dense_causal_conv1d, dense_linear_attention

__all__ = ["GPT", "IN_ONE_PROCESS_TOO", "LENGTHS", "MUTANTS", "Mutant", "Shape", "batch_of", "build_of"]

LENGTHS = (24, 9, 40, 15, 24, 8)  # of packed documents
WORDS, HEADS, DIM = 31, 4, 8
WIDTH = HEADS * DIM


@dataclass(frozen=True)
class Shape:
    """Features of the model and the batch."""

    layers: int = 2
    packed: bool = True  # documents behind one another, or [b, s] with padding
    dtype: torch.dtype = torch.float64
    sinks: bool = False
    tied: bool = False
    learned: bool = False  # positions that are embedded, instead of rotary ones
    mtp: bool = False  # a second head, for the token after the next
    conv: bool = False  # a causal convolution over tokens, whose halo is exchanged
    linear: bool = False  # a linear layer and its short convolution, whose states and rows are exchanged
    dropout: float = 0.0
    noise: float = 0.0  # of the embeddings, as NEFTune has it
    accumulate: int = 1
    clip: float = 0.0
    causal: bool = True
    optimizer: bool = True
    tracked: bool = False  # a buffer with a mean over tokens
    flagged: bool = False  # the first token of a document has an embedding of its own beside its word's


def batch_of(shape: Shape, dp_size: int = 1) -> dict[str, Tensor]:
    """ids and the tokens that are learnt, packed [t] or padded [b, s], and the documents' lengths."""
    chance = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS * dp_size)
    if shape.packed:
        ids = torch.randint(1, WORDS, (int(lengths.sum()),), generator=chance)
        learnt = torch.rand(ids.shape, generator=chance) < 0.7
        learnt[: int(lengths[:2].sum())] &= torch.rand(int(lengths[:2].sum()), generator=chance) < 0.2
        return {"ids": ids, "learnt": learnt, "lengths": lengths}
    rows = 4 * dp_size
    lengths = torch.tensor([32, 20, 9, 27] * dp_size)
    ids = torch.randint(1, WORDS, (rows, 32), generator=chance)
    real = torch.arange(32) < lengths[:, None]
    return {"ids": ids * real, "learnt": (torch.rand(ids.shape, generator=chance) < 0.7) & real, "lengths": lengths}


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [..., h, d] by positions [...]."""
    frequency = 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
    angle = (positions[..., None] * frequency)[..., None, :].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()), -1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS)) if shape.sinks else None
        self.rotary = not shape.learned

    def forward(self, x: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(-3)
        if self.rotary:
            q, k = rope(q, positions), rope(k, positions)
        return self.proj(attend(q, k, v, self.sinks).flatten(-2))


class Conv(nn.Module):
    """Each token and the one before it in its document."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.now = nn.Parameter(torch.randn(WIDTH) / 3), nn.Parameter(torch.randn(WIDTH) / 3)

    def forward(self, x: Tensor, previous: Callable[[Tensor], Tensor]) -> Tensor:
        return F.silu(x * self.now + previous(x) * self.before)


class Linear(nn.Module):
    """A short convolution and the gated delta rule: keys are values too."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.taps = nn.Linear(WIDTH, 2 * HEADS), nn.Parameter(torch.randn(WIDTH, 3))

    def forward(self, x: Tensor, convolve: Callable[..., Tensor], scan: Callable[..., Tensor]) -> Tensor:
        g, beta = self.gates(x).chunk(2, dim=-1)
        k = F.normalize(convolve(x, self.taps).unflatten(-1, (HEADS, DIM)), dim=-1)
        return scan(k, k, k, F.logsigmoid(g + 2), beta.sigmoid()).flatten(-2)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(shape)
        self.conv = Conv() if shape.conv else None
        self.linear = Linear() if shape.linear else None
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, positions: Tensor, attend: Any, previous: Any, linear: Any) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x), positions, attend))
        if self.conv is not None:
            x = x + self.conv(x, previous)
        if self.linear is not None:
            x = x + self.linear(x, *linear)
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.wpe = nn.Embedding(64, WIDTH) if shape.learned else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.second = nn.Linear(WIDTH, WORDS) if shape.mtp else None
        if shape.tied:
            self.head.weight = self.embed.weight
        self.first = nn.Parameter(torch.randn(WIDTH)) if shape.flagged else None
        if shape.tracked:
            self.register_buffer("size", torch.zeros(()))
        self.noise, self.of_slice = shape.noise, False

    def forward(
        self, ids: Tensor, positions: Tensor, attends: list[Any], previous: Any, linear: Any
    ) -> tuple[Tensor, Tensor | None]:
        x = self.embed(ids)
        if self.wpe is not None:
            x = x + self.wpe(positions)
        if self.first is not None:
            begins = torch.arange(len(x)) == 0 if self.of_slice else positions == 0
            x = x + begins[:, None] * self.first
        if self.noise:
            x = x + self.noise * torch.randn_like(x)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, positions, attend, previous, linear)
        return self.head(x), None if self.second is None else self.second(x)


def shifted(x: Tensor, lengths: Tensor, packed: bool, by: int = 1, fill: int = -100) -> Tensor:
    """Each document shifted inside itself: every token has the value of the one that is `by` behind it."""
    out = torch.full_like(x, fill)
    if not packed:
        for row, n in enumerate(lengths.tolist()):
            out[row, : max(n - by, 0)] = x[row, by:n] if by > 0 else x[row, : n - by]
        return out
    start = 0
    for n in lengths.tolist():
        out[start : start + max(n - by, 0)] = x[start + by : start + n]
        start += n
    return out


def previous_of(lengths: Tensor, packed: bool) -> Callable[[Tensor], Tensor]:
    """The token before, in one process; 0 before a document's first."""
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])

    def previous(x: Tensor) -> Tensor:
        axis = 0 if packed else 1
        moved = x.roll(1, axis)
        first = torch.zeros(x.shape[: axis + 1], dtype=torch.bool)
        first[starts if packed else (slice(None), 0)] = True
        return moved.masked_fill(first[..., None], 0.0)

    return previous


def alone(batch: dict[str, Tensor], shape: Shape, bug: str = "") -> tuple[Any, ...]:
    """A batch in one process: ids, positions, attention, the token before, a convolution with a linear layer, labels,
    labels of the second head.
    """
    lengths, packed = batch["lengths"], shape.packed
    cu = F.pad(lengths.cumsum(0), (1, 0)).int()
    mask = "causal" if shape.causal else "no_mask"
    how: dict[str, Any] = {"qkv_format": "thd" if packed else "bshd", "cu_seqlens_q": cu}
    how["attn_mask_type"] = mask if packed else f"padding_{mask}".removesuffix("_no_mask")

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        sink: dict[str, Any] = {} if sinks is None else {"softmax_type": "learnable", "softmax_offset": sinks}
        return dense_attention(q, k, v, **how, **sink)[0].to(q.dtype)

    inside = [torch.arange(n) for n in lengths.tolist()]
    positions = torch.cat(inside) if packed else torch.arange(32).expand(len(lengths), -1)
    labels = [shifted(batch["ids"].masked_fill(~batch["learnt"], -100), lengths, packed, by) for by in (1, 2)]
    states = cu[[0, -1]] if bug == "states go on in one process" else cu
    documents: dict[str, Any] = {"qkv_format": how["qkv_format"], "cu_seqlens": states}

    def scan(*given: Tensor) -> Tensor:
        return dense_linear_attention(*given, **documents)[0].to(shape.dtype)

    def convolve(x: Tensor, taps: Tensor) -> Tensor:
        return dense_causal_conv1d(x, taps, **documents).to(shape.dtype)

    return batch["ids"], positions, attend, previous_of(lengths, packed), (convolve, scan), *labels


def spread(batch: dict[str, Tensor], shape: Shape, cp: Any, bug: str) -> tuple[Any, ...]:
    """The same of one rank."""
    lengths, packed, causal = batch["lengths"], shape.packed, shape.causal
    cu = F.pad(lengths.cumsum(0), (1, 0)).int()
    mask = ("causal" if causal else "no_mask") if packed else ("padding_causal" if causal else "padding")
    form: dict[str, Any] = {"cp": cp, "qkv_format": "thd" if packed else "bshd"}
    sizes: dict[str, Any] = {
        "heads_q": HEADS,
        "heads_kv": HEADS,
        "d_qk": DIM,
        "d_v": DIM,
        "dtype": shape.dtype,
        "device": "cpu",
    }
    if not packed:
        sizes |= {"seqlen_q": 32, "batch_size": len(lengths)}
    sinks_too: dict[str, Any] = {"softmax_type": "learnable"} if shape.sinks else {}
    cu_plan = torch.tensor([0, int(lengths.sum())], dtype=torch.int32) if bug == "documents see each other" else cu
    window = (5, 0) if bug == "window over ranks alone" else (-1, -1)
    plan = cp_fast.make_plan(
        **form, **sizes, **sinks_too, attn_mask_type=mask, cu_seqlens_q=cu_plan, window_size=window, linear=shape.linear
    )
    cut: dict[str, Any] = {"cp": cp, "plan": plan}

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        return cp_fast.attention(q, k, v, cp=cp, plan=plan, softmax_offset=sinks)

    def on_slice(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2)

    def previous(x: Tensor) -> Tensor:
        if bug == "convolution of the slice":
            return F.pad(x, (0, 0, 1, -1))
        return cp_fast.roll(x, 1, **cut)

    def convolve(x: Tensor, taps: Tensor) -> Tensor:
        if bug == "linear layer of the slice":
            return dense_causal_conv1d(x[None], taps)[0].to(shape.dtype)
        return cp_fast.causal_conv1d(x, taps, **cut)

    def scan(*given: Tensor) -> Tensor:
        if bug == "linear layer of the slice":
            return dense_linear_attention(*(x[None] for x in given))[0][0].to(shape.dtype)
        return cp_fast.linear_attention(*given, **cut)

    ids = cp_fast.shard(batch["ids"], **cut)
    positions = plan.position_ids
    positions = positions if packed or positions.ndim == 2 else positions.expand(len(lengths), -1)
    if bug in ("positions of the slice", "learned positions of the slice"):
        positions = torch.arange(ids.shape[-1]).expand_as(ids)
    if bug == "positions off by the rank":
        positions = positions + cp.rank
    if bug == "positions of the packed buffer":
        positions = cp_fast.shard(torch.arange(int(lengths.sum())), **cut)
    whole = batch["ids"].masked_fill(~batch["learnt"], -100)
    if bug == "mask not applied":
        whole = batch["ids"]
    labels = [cp_fast.shard(shifted(whole, lengths, packed, by), **cut) for by in (1, 2)]
    if not packed or cp.layout == "balanced" or int(lengths.sum()) % (2 * cp.size):
        real = cp_fast.shard(torch.ones_like(batch["ids"]), **cut).bool()
        labels = [x.masked_fill(~real, -100) for x in labels]
    if bug == "labels shifted after the cut":
        labels[0] = cp_fast.shard(whole, **cut).roll(-1, -1)
    if bug == "second labels shifted after the cut":
        labels[1] = labels[0].roll(-1, -1)
    if bug == "labels not shifted":
        labels[0] = cp_fast.shard(whole, **cut)
    if bug == "mask of the first slice":
        learnt = batch["learnt"][..., : ids.shape[-1]]
        labels[0] = cp_fast.shard(shifted(batch["ids"], lengths, packed), **cut).masked_fill(~learnt, -100)
    if bug == "padding counts":
        labels[0] = labels[0].masked_fill(~cp_fast.shard(torch.ones_like(batch["ids"]), **cut).bool(), 0)
        labels[0] = labels[0].masked_fill(ids == 0, 0)
    if bug == "ids of another layout":
        ids = batch["ids"].chunk(cp.size, -1)[cp.rank]
    attends = [attend] * shape.layers
    if bug == "one layer on its slice":
        attends = [*attends[:-1], on_slice]
    if bug == "all layers on their slices":
        attends = [on_slice] * shape.layers
    return ids, positions, attends, previous, (convolve, scan), *labels


def parts_of(batch: dict[str, Tensor], shape: Shape, which: int, count: int) -> dict[str, Tensor]:
    """Documents of one of `count` parts of a batch: equally many each."""
    documents = len(batch["lengths"]) // count
    first, last = which * documents, (which + 1) * documents
    lengths = batch["lengths"]
    if not shape.packed:
        return {name: x[first:last] for name, x in batch.items()}
    start, stop = int(lengths[:first].sum()), int(lengths[:last].sum())
    return {"ids": batch["ids"][start:stop], "learnt": batch["learnt"][start:stop], "lengths": lengths[first:last]}


def build_of(cp: Any, shape: Shape, bug: str = "") -> Any:
    """The model, its step with the mistake that `bug` names (none with ""), and an optimizer."""
    torch.manual_seed(0)
    if bug == "tied in one process alone":
        shape = replace(shape, tied=cp is None)
    model = GPT(shape).to(shape.dtype)
    if bug == "a frozen parameter" and cp is not None:
        next(model.blocks[0].parameters()).requires_grad_(False)
    model.of_slice = bug == "a flag at the slice's start" and cp is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if shape.optimizer else None
    size, world = (1 if cp is None else cp.size), dist.get_world_size()
    dp_rank, dp_size = dist.get_rank() // size, world // size

    def step(batch: dict[str, Tensor]) -> Tensor:
        micro = [parts_of(batch, shape, n, shape.accumulate) for n in range(shape.accumulate)]
        whole = [alone(part, shape)[-2:] for part in micro]
        count, second_count = (sum(int((labels[n] != -100).sum()) for labels in whole) for n in (0, 1))
        total = torch.zeros((), dtype=shape.dtype)
        for part, (first, _) in zip(micro, whole, strict=True):
            mine = parts_of(part, shape, dp_rank, dp_size) if dp_size > 1 else part
            if cp is None:
                ids, positions, attend, previous, linear, *labels = alone(mine, shape, bug)
                attends = [attend] * shape.layers
            else:
                ids, positions, attends, previous, linear, *labels = spread(mine, shape, cp, bug)
            logits, second = model(ids, positions, attends, previous, linear)
            if bug == "NaN on one rank" and cp is not None and cp.rank == 1:
                logits = logits * float("nan")
            if shape.tracked:
                _track(model, logits, bug if cp is not None else "one process")
            losses = F.cross_entropy(logits.flatten(0, -2), labels[0].flatten(), reduction="none", ignore_index=-100)
            loss = losses.sum() / count
            if bug == "mean of each rank":
                loss = losses.sum() / (labels[0] != -100).sum().clamp(min=1) / world
            if bug == "mean of each micro-batch" and cp is not None:
                loss = losses.sum() / (first != -100).sum() / shape.accumulate
            if second is not None:
                loss = (
                    loss + F.cross_entropy(second.flatten(0, -2), labels[1].flatten(), reduction="sum") / second_count
                )
            loss = _mistaken(loss, bug, world if cp is not None else 1, shape)
            loss.backward()
            total += loss.detach()
            if bug == "reduced for each micro-batch" and cp is not None:
                _reduce(model, "", cp)
        if cp is not None:
            _clip_early(model, shape, bug)
            if bug != "reduced for each micro-batch":
                _reduce(model, bug, cp)
            if bug not in ("loss of the rank", "shares"):
                dist.all_reduce(total)
            if bug == "loss averaged":
                total /= world
        _clip(model, shape, bug, cp)
        return total

    return (model, step) if optimizer is None else (model, step, optimizer)


def _track(model: Any, logits: Tensor, bug: str) -> None:
    """The mean square of the logits, in a buffer."""
    size = torch.stack([logits.detach().square().sum(), torch.tensor(logits.numel(), dtype=logits.dtype)])
    if bug != "a buffer of the rank's tokens":
        dist.all_reduce(size)
    model.size.lerp_(size[0] / size[1], 0.1)


def _mistaken(loss: Tensor, bug: str, world: int, shape: Shape) -> Tensor:
    factors = {"loss times ranks": world, "loss over ranks": 1 / world, "loss over micro-batches": 1 / shape.accumulate}
    return loss * (factors.get(bug, 1) if world > 1 else 1)


def _reduce(model: nn.Module, bug: str, cp: Any) -> None:
    """Sum all gradients over all ranks."""
    for name, weight in model.named_parameters():
        if weight.grad is None or (bug == "one weight not reduced" and name == "blocks.0.mlp.1.weight"):
            continue
        if bug == "gradients not reduced" or (bug == "sinks not reduced" and "sinks" in name):
            continue
        group = cp.group if bug == "reduced over context parallel ranks alone" else None
        dist.all_reduce(weight.grad, group=group)
        if bug == "gradients averaged":
            weight.grad /= dist.get_world_size()
        if (bug == "tied weights reduced twice" and name == "embed.weight") or (
            bug == "sinks reduced twice" and "sinks" in name
        ):
            dist.all_reduce(weight.grad)


def _clip_early(model: nn.Module, shape: Shape, bug: str) -> None:
    if bug == "clipped before the sum":
        nn.utils.clip_grad_norm_(model.parameters(), shape.clip)


def _clip(model: nn.Module, shape: Shape, bug: str, cp: Any) -> None:
    if bug == "clipped by the rank's norm" and cp is not None:
        local = torch.stack(
            [w.grad.chunk(cp.size)[-1 if cp.rank else 0].norm() for w in model.parameters() if w.grad is not None]
        ).norm()
        local = local * (1 + cp.rank)  # another part of the weights on each rank, as in a sharded optimizer
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad *= (shape.clip / local).clamp(max=1)
    elif shape.clip and bug != "clipped before the sum":
        nn.utils.clip_grad_norm_(model.parameters(), shape.clip)


# ---- the planted mistakes


@dataclass(frozen=True)
class Mutant:
    """A mistake by its name, as the step knows it; `cause` is what the report should name, "" where it has no name."""

    bug: str
    cause: str
    shape: Shape = field(default_factory=Shape)
    how: dict[str, Any] = field(default_factory=lambda: {"cp_size": 2})
    first: str = ""  # a part of the report's first difference


IN_ONE_PROCESS_TOO = ("states go on in one process", "tied in one process alone", "clipped before the sum")
_PADDED = Shape(packed=False)
MUTANTS = (
    Mutant("loss times ranks", "factor"),
    Mutant("loss over ranks", "factor", _PADDED, {"cp_size": 4, "cp_comm_type": "all_gather"}),
    Mutant("gradients averaged", "factor", Shape(), {"cp_size": 2, "dp_size": 2}),
    Mutant("loss averaged", "factor"),
    Mutant("loss of the rank", "factor"),
    Mutant("mean of each rank", "mean-per-rank", Shape(), {"cp_size": 2, "layout": "contiguous"}),
    Mutant("labels shifted after the cut", "labels"),
    Mutant("second labels shifted after the cut", "labels", Shape(mtp=True)),
    Mutant("labels not shifted", ""),
    Mutant("positions of the slice", "positions"),
    Mutant("positions off by the rank", "positions", Shape(), {"cp_size": 2, "layout": "balanced"}),
    Mutant("learned positions of the slice", "positions", Shape(packed=False, learned=True)),
    Mutant("sinks reduced twice", "sinks", Shape(sinks=True)),
    Mutant("sinks not reduced", "reduction", Shape(sinks=True)),
    Mutant("gradients not reduced", "reduction"),
    Mutant("one weight not reduced", "reduction"),
    Mutant("reduced over context parallel ranks alone", "reduction", Shape(), {"cp_size": 2, "dp_size": 2}),
    Mutant("tied weights reduced twice", "reduction", Shape(tied=True)),
    Mutant("a frozen parameter", "reduction"),
    Mutant("padding counts", "padding", _PADDED),
    Mutant("mask not applied", "padding"),
    Mutant("mask of the first slice", "padding", _PADDED),
    Mutant("one layer on its slice", "slice", Shape(layers=3, packed=False)),
    Mutant("all layers on their slices", "slice", _PADDED),
    Mutant("convolution of the slice", "slice", Shape(conv=True)),
    Mutant("linear layer of the slice", "slice", Shape(linear=True)),
    Mutant("states go on in one process", "leak", Shape(linear=True), first="blocks.0"),
    Mutant("", "random", Shape(dropout=0.2)),
    Mutant("", "random", Shape(noise=0.5)),
    Mutant("reduced for each micro-batch", "micro-batches", Shape(accumulate=2)),
    Mutant("mean of each micro-batch", "micro-batches", Shape(accumulate=2)),
    Mutant("loss over micro-batches", "micro-batches", Shape(accumulate=3)),
    Mutant("clipped before the sum", "clipping", Shape(clip=0.1)),
    Mutant("clipped by the rank's norm", "clipping", Shape(clip=0.1)),
    Mutant("NaN on one rank", "not-finite"),
    Mutant("tied in one process alone", "tied"),
    Mutant("a buffer of the rank's tokens", "buffers", Shape(tracked=True)),
    Mutant("ids of another layout", ""),
    Mutant(
        "a flag at the slice's start", "", Shape(flagged=True), first="what comes before blocks.0 (Block) in the model"
    ),
    Mutant("documents see each other", "", first="attention"),
    Mutant("window over ranks alone", "", first="attention"),
)
