"""The entries of `tests.golden` that calls of layers make: what each rank sends and receives, and the bits of results.

An entry is a drawn batch of one of the six functions, on both packages: schedule, format, layout and dtype, cp 1 to 4.
A line of it has the bytes that one rank exchanges with each peer in one pass, or the digest of a result or a gradient.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch

import cp_fast
import cp_ref
from cp_ref import SimGroup

__all__ = ["FUNCTIONS", "layer_entries"]

FUNCTIONS = ("attention", "linear_attention", "causal_conv1d", "select_keys", "sparse_attention", "index_loss")
KINDS = ("gated_delta_rule", "kda", "mamba2")
H_Q, H_KV, D, D_V, H_I, D_I, TOP_K = 8, 4, 6, 4, 3, 5, 4


def layer_entries(numbers: range) -> Iterator[tuple[str, str]]:
    """Name and text of each."""
    for number in numbers:
        function = FUNCTIONS[number % len(FUNCTIONS)]
        lines: list[str] = []
        for package in (cp_fast, cp_ref):
            call = partial(played, package, function, number)
            ranks = SimGroup(1 + number // len(FUNCTIONS) % 4).run(call)
            lines += [f"{package.__name__} rank {n}: {line}" for n, some in enumerate(ranks) for line in some]
        yield f"layer {number:04} {function}", "\n".join(lines)


def played(package: Any, function: str, number: int, member: Any) -> list[str]:
    """The lines of one rank: forward, backward, and the forward pass once more, which is then known."""
    rng = random.Random(f"layer {number}")
    sparse = function in FUNCTIONS[3:]
    comm = rng.choice(("all_gather", "a2a") if sparse else ("p2p", "all_gather", "a2a", "a2a+p2p"))
    comm = "all_gather" if comm.startswith("a2a") and member.size == 3 else comm
    comm = "a2a" if comm == "a2a+p2p" and member.size < 4 else comm
    layout, fmt = rng.choice(("dual_chunk", "contiguous", "balanced")), rng.choice(("thd", "thd", "bshd", "sbhd"))
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
    slots = [8 * rng.randint(1, 4) for _ in range(3)] if fmt == "thd" else [24, 24]
    lengths = [rng.choice((n, n - 3, n // 2, 0)) for n in slots]
    total = -(-sum(slots) // 8) * 8
    ends = [torch.tensor([0, *accumulate(some)], dtype=torch.int32) for some in (lengths, slots)]
    given: dict[str, Any] = {"qkv_format": fmt, "heads_q": H_Q, "heads_kv": H_KV, "d_qk": D, "d_v": D_V}
    given |= {"attn_mask_type": "padding_causal", "cu_seqlens_q": ends[0], "dtype": dtype, "device": "cpu"}
    given |= {"cu_seqlens_q_padded": ends[1]} if fmt == "thd" else {"batch_size": 2, "seqlen_q": 24}
    given |= {"softmax_type": "learnable"} if rng.random() < 0.3 and function != "index_loss" else {}
    cp = package.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm, layout=layout)
    plan = package.make_plan(cp=cp, linear=function in FUNCTIONS[1:3], **given)

    draw = torch.Generator().manual_seed(number)

    def rows(*last: int) -> torch.Tensor:
        shape = {"thd": (total,), "bshd": (2, 24), "sbhd": (24, 2)}[fmt]
        whole = torch.randn(*shape, *last, generator=draw, dtype=torch.float64).to(dtype)
        return package.shard(whole, cp=cp, plan=plan)

    sent: list[str] = []
    exchange = cp.comm.exchange

    def noted(sends: Any, recvs: Any) -> Any:
        sent.append(f"sends {bytes_by_peer(sends)} receives {bytes_by_peer(recvs)}")
        return exchange(sends, recvs)

    tensors, options = arguments(rng, function, plan, rows, draw)
    how: dict[str, Any] = {"cp": cp, "plan": plan} | options
    call = getattr(package, function)
    leaves = {n: x.requires_grad_() for n, x in tensors.items() if x.is_floating_point() and n not in ("lse",)}
    if function == "sparse_attention" and rng.random() < 0.3:  # autograd sees v as a part of k
        tensors["v"] = leaves["k"][..., :D_V]
    cp.comm.exchange = noted
    results = call(**tensors, **how)
    results = results if isinstance(results, tuple) else (results,)
    lines = [f"{function} {comm} {layout} {fmt} {dtype} {lengths} {slots}", *(f"forward {x}" for x in sent)]
    lines += [f"result {list(x.shape)} {digest(x)}" for x in results]
    sent.clear()
    some = [x for x in results if x.requires_grad and x.is_floating_point()]
    if some:
        grads = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in some]
        found = torch.autograd.grad(some, list(leaves.values()), grads, allow_unused=True)
        lines += [f"backward {x}" for x in sent]
        lines += [f"gradient of {n} {None if x is None else digest(x)}" for n, x in zip(leaves, found, strict=True)]
    sent.clear()
    again = call(**tensors, **how)
    lines += [f"again {x}" for x in sent]
    lines += [f"result {digest(x)}" for x in (again if isinstance(again, tuple) else (again,))]
    return lines


def arguments(
    rng: random.Random, function: str, plan: Any, rows: Any, draw: torch.Generator
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the options of a call. rows: draws a slice with these last axes."""
    if function == "causal_conv1d":
        size = rng.randint(1, 4)
        tensors = {"x": rows(H_KV), "weight": torch.randn(H_KV, size, generator=draw)}
        tensors["weight"] = tensors["weight"].to(tensors["x"].dtype)
        tensors |= {"bias": torch.randn(H_KV, generator=draw)} if plan.problem.dtype != "float64" else {}
        return tensors, {"activation": rng.choice((None, "silu"))}
    if function == "linear_attention":
        kind = rng.choice(KINDS)
        tensors = {"q": rows(2, D), "k": torch.nn.functional.normalize(rows(2, D), dim=-1), "v": rows(4, D_V)}
        tensors["g"] = -rows(4, D).abs() if kind == "kda" else -rows(4).abs()
        tensors |= {} if kind == "mamba2" else {"beta": rows(4).sigmoid()}
        if rng.random() < 0.5:
            state = torch.randn(len(plan.problem.sequences), 4, D, D_V, generator=draw)
            tensors["initial_state"] = state.to(tensors["q"].dtype)
        return tensors, {"kind": kind, "output_final_state": rng.random() < 0.5}
    attended = {"q": rows(H_Q, D), "k": rows(H_KV, D)}
    wide = torch.float64 if plan.problem.dtype == "float64" else torch.float32
    if plan.problem.softmax_type == "learnable" and function in ("attention", "sparse_attention"):
        attended["softmax_offset"] = torch.randn(H_Q, generator=draw)
    if function == "attention":
        return attended | {"v": rows(H_KV, D_V)}, {"return_lse": True}
    size = attended["q"].shape[:-2]
    if function == "sparse_attention":
        by_head = (H_KV,) if rng.random() < 0.3 else ()
        attended["v"] = attended["k"][..., :D_V] if rng.random() < 0.3 else rows(H_KV, D_V)
        named = torch.randint(-1, 12, (*size, *by_head, TOP_K), generator=draw, dtype=torch.int32)
        return attended | {"indices": named}, {"return_lse": rng.random() < 0.7}
    indexer = {"q_index": rows(H_I, D_I), "k_index": rows(D_I), "weights": rows(H_I)}
    if function == "select_keys":
        return indexer, {"top_k": rng.randint(1, 9)}
    lse_size = {"thd": (H_Q, *size), "bshd": (size[0], H_Q, *size[1:]), "sbhd": (*size[1:], H_Q, size[0])}
    more = {"lse": 3 + torch.randn(lse_size[plan.problem.qkv_format], generator=draw).to(wide)}
    more |= {"indices": torch.randint(-1, 12, (*size, TOP_K), generator=draw, dtype=torch.int32)}
    return indexer | attended | more, {}


def bytes_by_peer(parcels: Any) -> dict[int, int]:
    """What travels, however it is cut into tensors."""
    found: dict[int, int] = {}
    for parcel in parcels:
        found[parcel.peer] = found.get(parcel.peer, 0) + parcel.tensor.nbytes
    return dict(sorted(found.items()))


def digest(x: torch.Tensor) -> str:
    """A tensor's bits, in a word."""
    bits = x.detach().contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return hashlib.blake2b(bits, digest_size=8).hexdigest()
