"""Calls to attack: every public function with arguments that are right, and what it gives of others that are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import cp_fast
import cp_ref
from conformance.problems.helpers import HELPERS, Helper
from cp_fast.integrations import (
    flash_attn,
    loss,
    ring_flash_attn,
    sampler,
    sdpa,
    sequences,
    token_batches,
    transformer_engine,
)

__all__ = ["NOT_ATTACKED", "TARGETS", "Target", "public_functions"]

CU = torch.tensor([0, 8, 16], dtype=torch.int32)
SIZES: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "d_qk": 8, "d_v": 8, "dtype": torch.float32, "device": "cpu"}
WHOLE = [torch.randn(1, 16, 2, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A function to attack.

    Attributes:
        arguments: makes right arguments, by name, of a context.
        package: whose context that is.
        collective: whether the function begins with an agreement: what one rank refuses, all do.
        oracle: the global result, as [b, s, h, d] or packed, of changed arguments that are right; None: nothing says.
        also: names by which an error may call an argument.
    """

    function: Callable[..., Any]
    arguments: Callable[[Any], Arguments]
    package: Any = cp_fast
    collective: bool = True
    oracle: Callable[[Arguments], torch.Tensor] | None = None
    layout: str = "dual_chunk"
    also: tuple[str, ...] = ()

    @property
    def parameters(self) -> dict[str, str]:
        """The annotation of each parameter, by name."""
        found = inspect.signature(self.function).parameters.values()
        return {p.name: str(p.annotation) for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def local(cp: Any) -> list[torch.Tensor]:
    """This rank's q, k and v."""
    return [cp_fast.shard(x, cp=cp) for x in WHOLE]


def packed(cp: Any) -> list[torch.Tensor]:
    """The same as rows of two sequences."""
    return [cp_fast.shard(x[0], cp=cp, qkv_format="thd", cu_seqlens_padded=CU) for x in WHOLE]


def qkv(tensors: list[torch.Tensor]) -> Arguments:
    return dict(zip("qkv", tensors, strict=True))


def of_attention(given: Arguments) -> torch.Tensor:
    names = set(inspect.signature(cp_ref.dense_attention).parameters) - {"q", "k", "v"}
    thd = given.get("qkv_format") == "thd"
    tensors = [x[0] if thd else x for x in WHOLE]
    return cp_ref.dense_attention(*tensors, **{n: x for n, x in given.items() if n in names})[0]


def of_flash_attn(given: Arguments) -> torch.Tensor:
    """Of equal lengths: what is aligned to the end is aligned to the beginning."""
    thd = {"qkv_format": "thd", "cu_seqlens_q": CU} if given["q"].ndim == 3 else {}
    how = {name: given[name] for name in ("softmax_scale", "softcap", "window_size") if name in given}
    return of_attention({"attn_mask_type": "causal" if given.get("causal") else "no_mask", **how, **thd})


def of_sdpa(given: Arguments) -> torch.Tensor:
    mask = "causal" if given.get("is_causal") else "no_mask"
    return of_attention({"attn_mask_type": mask, "softmax_scale": given.get("scale")})


def planned(cp: Any) -> Arguments:
    return {"cp": cp, "batch_size": 1, "seqlen_q": 16, **SIZES}


def of_linear_attention(package: Any) -> Callable[[Any], Arguments]:
    """The gated delta rule, with the plan."""

    def arguments(cp: Any) -> Arguments:
        q, k, v = local(cp)
        gates = {"g": -torch.ones(1, 8, 2), "beta": torch.full((1, 8, 2), 0.5)}
        return {"q": q, "k": k / 8, "v": v, **gates, "cp": cp, "plan": package.make_plan(**planned(cp), linear=True)}

    return arguments


def of_causal_conv1d(package: Any) -> Callable[[Any], Arguments]:
    def arguments(cp: Any) -> Arguments:
        plan, x = package.make_plan(**planned(cp), linear=True), local(cp)[0].flatten(2)
        return {"x": x, "weight": torch.ones(16, 4), "bias": torch.ones(16), "cp": cp, "plan": plan}

    return arguments


def of_chosen_keys(package: Any, name: str) -> Callable[[Any], Arguments]:
    """The calls of sparse layers, in a context whose schedule they take."""

    def arguments(cp: Any) -> Arguments:
        cp = package.ContextParallel(cp.group, "all_gather", layout=cp.layout)
        both, (q, k, v) = {"cp": cp, "plan": package.make_plan(**planned(cp))}, local(cp)
        indexer = {"q_index": q, "k_index": k[:, :, 0], "weights": torch.ones(1, 8, 2)}
        chosen = {"indices": torch.arange(4, dtype=torch.int32).expand(1, 8, 4).contiguous()}
        entries = {"k_entries": torch.ones(2, 2, 8), "v_entries": torch.ones(2, 2, 8)}  # of 4 tokens each
        gated = {"values": q.flatten(2), "gates": k.flatten(2), "bias": torch.zeros(4, 16)}
        return {
            "select_keys": {**indexer, "top_k": 4, **both},
            "sparse_attention": {**qkv([q, k, v]), **chosen, **both},
            "compressed_attention": {**qkv([q, k, v]), **entries, **chosen, "rate": 4, **both},
            "compress_keys": {**gated, "rate": 4, **both},
            "index_loss": {**indexer, "lse": torch.zeros(1, 2, 8), "q": q, "k": k, **chosen, **both},
        }[name]

    return arguments


def helper(name: str) -> Callable[[Any], Arguments]:
    """Right arguments of a helper for packed batches."""
    case = Helper(
        name=name, slots=(2, 1), real=(1, 2), repeat=1, tail=0, cp_size=2, rank=0, index_dtype="int32", dtype="float32",
        wide=False, dims=(2, 4), packed=True, choices=(0, 1), spare=0, seed=0,
    )  # fmt: skip

    def arguments(cp: Any) -> Arguments:
        given = HELPERS[name].build(case, "cpu").arguments
        return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()}

    return arguments


def updated(plan: Any, **given: Any) -> str:
    plan.update(**given)
    return str(plan)


def update_of(package: Any) -> Target:
    def update(*, cp: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any = None, cu_seqlens_q_padded: Any = None,
               cu_seqlens_kv_padded: Any = None) -> str:  # fmt: skip
        plan = package.make_plan(cp=cp, qkv_format="thd", cu_seqlens_q=CU, max_sequences=4, **SIZES)
        given = {"cu_seqlens_kv": cu_seqlens_kv, "cu_seqlens_q_padded": cu_seqlens_q_padded}
        return updated(
            plan, cp=cp, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv_padded=cu_seqlens_kv_padded, **given
        )  # fmt: skip

    update.__annotations__ = dict.fromkeys(update.__annotations__, "torch.Tensor | None")
    return Target(update, lambda cp: {"cp": cp, "cu_seqlens_q": CU}, package, also=("plan",))


FLASH: Any = flash_attn
RING: Any = ring_flash_attn
ENGINE: Any = transformer_engine
_LEFT_OUT = [
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "max_seqlen_q",
    "max_seqlen_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
]
_NOTHING = dict.fromkeys((*_LEFT_OUT, "cp_global_ranks", "cp_stream"))
_LENGTHS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 8, "max_seqlen_k": 8}
_IDS = torch.arange(16)
_NAMES = ("query", "key", "value")
TARGETS: dict[str, Target] = {
    "update": update_of(cp_fast),
    "update of cp_ref": update_of(cp_ref),
    "flash_attn_func": Target(FLASH.flash_attn_func, lambda cp: {**qkv(local(cp)), "cp": cp}, oracle=of_flash_attn),
    "flash_attn_varlen_func": Target(
        FLASH.flash_attn_varlen_func, lambda cp: {**qkv(packed(cp)), **_LENGTHS, "cp": cp}, oracle=of_flash_attn,
        layout="contiguous", also=("cu_seqlens_kv", "max_seqlen_q", "max_seqlen_k"),
    ),
    "zigzag_ring_flash_attn_func": Target(
        RING.zigzag_ring_flash_attn_func, lambda cp: {**qkv(local(cp)), "cp": cp}, oracle=of_flash_attn
    ),
    "zigzag_ring_flash_attn_varlen_func": Target(
        RING.zigzag_ring_flash_attn_varlen_func,
        lambda cp: {**qkv(packed(cp)), "cu_seqlens": CU // 2, "max_seqlen": 4, "cp": cp}, oracle=of_flash_attn,
        also=("max_seqlen",),
    ),
    "llama3_flash_attn_varlen_func": Target(
        RING.llama3_flash_attn_varlen_func,
        lambda cp: {**qkv(packed(cp)), **_LENGTHS, "heads_k_stride": 1, "local_k_slice": slice(0, 16), "cp": cp},
        oracle=of_flash_attn, layout="contiguous", also=("max_seqlen_q", "max_seqlen_k", "cu_seqlens_q"),
    ),
    "ring_flash_attn_func": Target(
        RING.ring_flash_attn_func, lambda cp: {**qkv(local(cp)), "cp": cp}, oracle=of_flash_attn, layout="contiguous"
    ),
    "ring_flash_attn_varlen_func": Target(
        RING.ring_flash_attn_varlen_func,
        lambda cp: {**qkv(packed(cp)), "cu_seqlens": CU // 2, "max_seqlen": 4, "cp": cp}, layout="contiguous",
        also=("max_seqlen",),
    ),
    "llama3_flash_attn_prepare_cu_seqlens": Target(
        RING.llama3_flash_attn_prepare_cu_seqlens,
        lambda cp: {"cu_seqlens": CU, "causal": True, "rank": 0, "world_size": 2}, collective=False,
    ),
    "scaled_dot_product_attention": Target(
        sdpa.scaled_dot_product_attention,
        lambda cp: {**{n: x.transpose(1, 2) for n, x in zip(_NAMES, local(cp), strict=True)}, "cp": cp},
        oracle=of_sdpa, also=("q", "k", "v", "softmax_scale"),
    ),
    "attn_forward_func_with_cp": Target(
        ENGINE.attn_forward_func_with_cp,
        lambda cp: {
            "is_training": True, **qkv(local(cp)), **_NOTHING, "dropout_p": 0.0, "cp_group": cp.group,
            "cp_comm_type": "p2p",
        },
        oracle=of_attention, also=("group", "ContextParallel"),
    ),
    "token_mean": Target(
        loss.token_mean, lambda cp: {"losses": torch.ones(4), "counted": torch.ones(4, dtype=torch.bool), "over": cp}
    ),
    "count_tokens": Target(loss.count_tokens, lambda cp: {"counted": torch.ones(4, dtype=torch.bool), "over": cp}),
    "shard_tokens": Target(
        token_batches.shard_tokens, lambda cp: {"batch": {"input_ids": _IDS[None], "labels": _IDS[None]}, "cp": cp},
        also=("input_ids",),
    ),
    "sequence_sum": Target(
        sequences.sequence_sum,
        lambda cp: {"values": torch.ones(1, 8), "part": token_batches.shard_tokens({"input_ids": _IDS[None]}, cp=cp)},
    ),
    "share_out": Target(
        sampler.share_out, lambda cp: {"lengths": [3, 4], "ranks": 2, "tokens": 8}, collective=False
    ),
    "pack": Target(sampler.pack, lambda cp: {"documents": [{"input_ids": [1, 2]}]}, collective=False),
    "compare_layouts": Target(cp_fast.compare_layouts, lambda cp: {"lengths": [8, 8], "cp_size": 2}, collective=False),
}  # fmt: skip
for _package in (cp_fast, cp_ref):
    _of = "" if _package is cp_fast else " of cp_ref"
    TARGETS |= {
        f"attention{_of}": Target(
            _package.attention, lambda cp: {**qkv(local(cp)), "cp": cp}, _package, oracle=of_attention
        ),
        f"attention{_of}, packed": Target(
            _package.attention, lambda cp: {**qkv(packed(cp)), "cp": cp, "qkv_format": "thd", "cu_seqlens_q": CU},
            _package, oracle=of_attention, layout="contiguous",
        ),
        f"make_plan{_of}": Target(_package.make_plan, planned, _package),
        f"supports{_of}": Target(_package.supports, planned, _package, collective=False),
    }  # fmt: skip
    TARGETS |= {
        f"{name}{_of}": Target(getattr(_package.thd, name), helper(name), _package, collective=False)
        for name in _package.thd.__all__
        if name != "get_batch_on_this_cp_rank"
    }
TARGETS |= {
    "get_batch_on_this_cp_rank": Target(
        cp_fast.thd.get_batch_on_this_cp_rank, lambda cp: {"batch": {"tokens": _IDS[None]}, "cp": cp}, collective=False,
        also=("tokens",),
    ),
    "shard": Target(cp_fast.shard, lambda cp: {"x": _IDS[None], "cp": cp}, collective=False),
    "unshard": Target(cp_fast.unshard, lambda cp: {"x": _IDS[None, :8], "cp": cp, "seqlen": 16}),
    "roll": Target(cp_fast.roll, lambda cp: {"x": _IDS[None, :8], "shifts": -1, "cp": cp, "seqlen": 16}),
    "position_ids": Target(cp_fast.position_ids, lambda cp: {"cp": cp, "seqlen": 16}, collective=False),
    "dense_attention": Target(
        cp_ref.dense_attention, lambda cp: qkv(list(WHOLE)), collective=False, oracle=None
    ),
}  # fmt: skip


def of_entries(name: str, right: Arguments, given: Callable[[Any], Arguments], of: str = "batch") -> Target:
    """A function of TARGETS that takes a mapping, with the mapping's entries as arguments."""
    plain, names = TARGETS[name], tuple(right)

    def entries(**arguments: Any) -> Any:
        mapping = {one: arguments.pop(one) for one in names}
        return plain.function(**{of: [mapping] if of == "documents" else mapping}, **arguments)

    kind = "float" if of == "fill" else "torch.Tensor"
    parameters = [inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, annotation=kind) for one in names]
    entries.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    also = "batch", "documents", "fill", "whole"
    return Target(entries, lambda cp: {**right, **given(cp)}, plain.package, plain.collective, also=also)


TARGETS |= {
    "shard_tokens, entries": of_entries(
        "shard_tokens",
        {"input_ids": _IDS[None], "labels": _IDS[None], "position_ids": _IDS[None], "x": _IDS[None]},
        lambda cp: {"cp": cp, "fill": {"x": 0}},
    ),
    "shard_tokens, a mask": of_entries(
        "shard_tokens", {"input_ids": _IDS[None], "attention_mask": torch.ones_like(_IDS)[None]}, lambda cp: {"cp": cp}
    ),
    "shard_tokens, fill": of_entries(
        "shard_tokens", {"x": 0},
        lambda cp: {"cp": cp, "batch": {"input_ids": _IDS[None], "x": _IDS[None].to(torch.uint8)}}, "fill",
    ),
    "pack, entries": of_entries(
        "pack", {"input_ids": [1, 2], "labels": [1, 2], "position_ids": [0, 1], "attention_mask": [1, 1]},
        lambda cp: {}, "documents",
    ),
}  # fmt: skip
for _package, _of in ((cp_fast, ""), (cp_ref, " of cp_ref")):
    TARGETS["linear_attention" + _of] = Target(_package.linear_attention, of_linear_attention(_package), _package)
    TARGETS["causal_conv1d" + _of] = Target(_package.causal_conv1d, of_causal_conv1d(_package), _package)
    for _name in ("select_keys", "sparse_attention", "index_loss", "compress_keys", "compressed_attention"):
        TARGETS[_name + _of] = Target(getattr(_package, _name), of_chosen_keys(_package, _name), _package)

_MASKS: dict[str, Arguments] = {
    "block_causal": {"length": 8, "block": 2},
    "chunked": {"length": 8, "chunk": 2},
    "dilated_blocks": {"length": 8, "block": 2, "step": 2},
    "documents": {"cu_seqlens_q": [0, 3, 5]},
    "first_tokens_and_window": {"length": 8, "first": 1, "left": 2},
    "from_call": {"text": "prefix_lm(2, 4)"},
    "from_magi": {"q_ranges": [[0, 4]], "k_ranges": [[0, 4]], "types": ["causal"]},
    "packed": {"masks": [cp_fast.masks.prefix_lm(2, 3)], "starts_q": [0]},
    "picture": {"areas": torch.tensor([[0, 3, 0, 4, -1, 0]])},
    "prefix_lm": {"prefix": 2, "length": 4},
    "shared_prefix": {"prompt": 2, "answers": [2, 1]},
    "tree": {"lengths": [2, 1], "parents": [-1, 0]},
}
TARGETS |= {
    name: Target(getattr(cp_fast.masks, name), lambda cp, right=right: dict(right), collective=False, also=("areas",))
    for name, right in _MASKS.items()
}


def of_one_tensor(name: str, one: str) -> Target:
    """The form of a function of TARGETS that takes one tensor for some of q, k and v."""
    plain, module = TARGETS[name], RING if "ring" in name or "llama3" in name else FLASH
    of_itself = one == "qkv" and name == "flash_attn_varlen_func"  # takes the lengths once

    def arguments(cp: Any) -> Arguments:
        given = plain.arguments(cp)
        x = torch.stack([given.pop(part) for part in one], -3)
        if of_itself:
            given = {n: v for n, v in given.items() if n not in _LENGTHS} | {"cu_seqlens": CU, "max_seqlen": 8}
        return {one: x, **given}

    def oracle(given: Arguments) -> torch.Tensor:
        assert plain.oracle is not None
        return plain.oracle({**given, "q": given[one].unbind(-3)[0]})

    return Target(
        getattr(module, name.replace("_func", f"_{one}packed_func")), arguments,
        oracle=plain.oracle and oracle, layout=plain.layout, also=(*plain.also, "q", "k", "v"),
    )  # fmt: skip


TARGETS |= {
    name.replace("_func", f"_{one}packed_func"): of_one_tensor(name, one)
    for name in list(TARGETS)
    if "flash_attn" in name and name.endswith("_func")
    for one in ("kv", "qkv")
}
NOT_ATTACKED = {  # and why
    "checked": "takes no argument",
    "trace": "a tool for debugging, with a test of its own",
    "compare": "a tool for debugging, with a test of its own",
    "patch": "needs TransformerEngine",
    "unpatch": "needs TransformerEngine",
    "from_block_mask": "takes an object of PyTorch's, with tests of its own",
    "loss_for_backward": "one multiplication",
    "token_log_probs": "needs a model, with tests of its own",
    "token_log_probs_and_entropy": "needs a model, with tests of its own",
    "ranks_of_batch": "takes unchecked keywords, for a decorator",
}


def public_functions() -> set[str]:
    """The names of all functions that a user calls with arguments."""
    modules = (
        cp_fast,
        cp_fast.thd,
        cp_fast.masks,
        flash_attn,
        ring_flash_attn,
        sdpa,
        transformer_engine,
        loss,
        token_batches,
        sampler,
        sequences,
    )
    return {name for m in modules for name in m.__all__ if inspect.isfunction(getattr(m, name))}
