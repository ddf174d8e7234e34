"""Other libraries' context parallelism in the same run: contenders of `benchmarks/attention.py --peers`.

    ring_flash_attn      zigzag, on the kernels of the run's backend, which stand in for FlashAttention 2's
    pytorch              `context_parallel` with cuDNN's kernels, both ways of passing K and V on
    transformer_engine   `DotProductAttention` with cuDNN's kernels, p2p, all_gather and a2a
    magi_attention       its kernels, in the setting that was the fastest of those it documents (`magi_way`)

Its adapter in `conformance.adapters` says which problems a library takes. A library that is not installed, or does not
take the problem, is named with its reason. MagiAttention places tokens itself; all others have those of `dual_chunk`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.schedules.areas import Areas
from cp_ref.schedules.problem import Problem, ScoreSpec
from cp_ref.schedules.table import ranges

__all__ = ["MAGI_SETTINGS", "WAYS", "Attend", "Other", "Slices", "flash_attn_interface", "magi_way", "others"]

Slices = Callable[[torch.Tensor], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

WAYS = (  # library, its adapter's object, cp_comm_type
    ("ring_flash_attn", "documented", "p2p"),
    ("pytorch", "cudnn", "p2p"),
    ("pytorch", "cudnn", "all_gather"),
    ("transformer_engine", "fused", "p2p"),
    ("transformer_engine", "fused", "all_gather"),
    ("transformer_engine", "fused", "a2a"),
    ("magi_attention", "bf16", "p2p"),
)


class Other(NamedTuple):
    """One way of a library to compute the problem.

    Attributes:
        slices: this rank's rows of a global packed tensor [t, h, d], in the library's format.
        attend: out of slices of q, k and v; differentiable.
        inside: what a call, and its backward pass, are made inside.
        layout: who has which tokens.
    """

    library: str
    schedule: str
    slices: Slices
    attend: Attend
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    layout: str = "dual_chunk"


def others(problem: Problem, backend: Backend, group: Any, device: torch.device) -> tuple[list[Other], dict[str, str]]:
    """The libraries' ways that work here, and the reasons against the others: by "library schedule".

    Args:
        problem: packed, causal, in dual_chunk.
        backend: the kernels that stand in for FlashAttention 2's.
        group: the process group.
    """
    found, reasons = list[Other](), dict[str, str]()
    rows = _own_rows(problem, dist.get_rank(group), device)
    packed = len(problem.sequences) > 1
    for library, member, schedule in WAYS:
        if library == "ring_flash_attn":  # before its adapter chooses other kernels for it
            sys.modules["flash_attn.flash_attn_interface"] = flash_attn_interface(backend, _parts(problem), device)
        try:
            adapter = getattr(import_module(f"conformance.adapters.{library}"), member)
        except ImportError as error:
            reasons[f"{library} {schedule}"] = str(error)
            continue
        if refused := _refused(library, adapter, problem, schedule, device):
            reasons[f"{library} {schedule}"] = refused
            continue
        if library == "magi_attention":
            sizes = problem.heads_q, problem.heads_kv, problem.d_qk
            slices, attend = magi_way(problem.workload.areas, problem.starts_q[-1], sizes, problem.scale)
            found.append(Other(library, schedule, slices, attend, layout="its own"))
            continue
        attend, inside = _MAKERS[library](problem, schedule, group, device)
        found.append(Other(library, schedule, partial(_slices, rows=rows, packed=packed), attend, inside))
    return found, reasons


def _refused(library: str, adapter: Any, problem: Problem, schedule: str, device: torch.device) -> str:
    """Why a library does not take the problem, by its adapter's table; nothing if it does."""
    shape: dict[str, Any] = {
        "qkv_format": "bshd",
        "attn_mask_type": "causal",
    }
    shape |= dict.fromkeys(("seqlen_q", "seqlen_kv"), problem.starts_q[-1])
    if len(problem.sequences) > 1:
        cu = torch.tensor(problem.starts_q, dtype=torch.int32)
        shape = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu}
    layout = (
        "contiguous" if library == "magi_attention" else "dual_chunk"
    )  # as its adapter calls the tokens it is given
    return adapter.why_not(
        SimpleNamespace(cp_comm_type=schedule, layout=layout, size=problem.cp_size),
        (problem.heads_q, problem.heads_kv, problem.d_qk, problem.d_v),
        getattr(torch, problem.dtype),
        device,
        {**shape, "window_size": problem.window_size},
    )


def _own_rows(problem: Problem, rank: int, device: torch.device) -> torch.Tensor:
    """The global rows that a rank holds, in the order of its buffer."""
    own = problem.slots.q.of(rank)
    order = own.row.argsort()
    return torch.from_numpy(ranges(own.start[order], (own.stop - own.start)[order])).to(device)


def _slices(x: torch.Tensor, rows: torch.Tensor, packed: bool) -> torch.Tensor:
    return x[rows] if packed else x[rows][None]


def _parts(problem: Problem) -> dict[int, tuple[int, ...]]:
    """The lengths of a rank's sequences, and of the halves of them, by their sum."""
    local = tuple(n // problem.cp_size for n in problem.lengths.len_q)
    halves = tuple(n // 2 for n in local)
    return {sum(local): local, sum(halves): halves}


# ---- ring-flash-attention


def _ring_flash_attn(problem: Problem, schedule: str, group: Any, device: torch.device) -> Any:
    library = import_module("ring_flash_attn")
    how = {"softmax_scale": problem.scale, "causal": True, "group": group}
    if len(problem.sequences) == 1:
        return partial(library.zigzag_ring_flash_attn_func, **how), nullcontext
    local = next(iter(_parts(problem).values()))
    cu = torch.tensor([*accumulate(local, initial=0)], dtype=torch.int32, device=device)
    return partial(library.zigzag_ring_flash_attn_varlen_func, cu_seqlens=cu, max_seqlen=max(local), **how), nullcontext


def flash_attn_interface(backend: Backend, parts: Mapping[int, Sequence[int]], device: torch.device) -> ModuleType:
    """FlashAttention 2's private functions, as ring-flash-attention calls them, by another library's kernels.

    Args:
        parts: the lengths of segments by their sum: what `cu_seqlens` on the device says, without waiting for it.
    """
    module = ModuleType("flash_attn.flash_attn_interface")

    @cache
    def segments(rows_q: int, rows_k: int, causal: bool) -> VarlenBatch:
        return VarlenBatch.pack(parts[rows_q], parts[rows_k], None, 0 if causal else None, device)

    def forward(q: Any, k: Any, v: Any, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        part = backend.forward(q, k, v, segments(len(q), len(k), causal), LaunchOptions(ScoreSpec(scale)))
        return part.out.to(q.dtype), part.lse

    def backward(dout: Any, operands: Any, out: Any, lse: Any, into: Any, scale: float, causal: bool) -> None:
        q, k, v = operands
        where = segments(len(q), len(k), causal)
        gradients = backend.backward(
            [BackwardOperands(dout, q, k, v, out, lse, None)], where, LaunchOptions(ScoreSpec(scale))
        )
        for place, x in zip(into, gradients, strict=True):
            place.copy_(x.view_as(place))

    def _flash_attn_forward(
        q: Any, k: Any, v: Any, dropout_p: Any, softmax_scale: Any, causal: Any, window_size_left: Any,
        window_size_right: Any, softcap: Any, alibi_slopes: Any, return_softmax: Any,
    ) -> Any:  # fmt: skip
        out, lse = forward(q.squeeze(0), k.squeeze(0), v.squeeze(0), softmax_scale, causal)
        return out[None], lse[None], None, None

    def _flash_attn_backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, dropout_p: Any,
        softmax_scale: Any, causal: Any, window_size_left: Any, window_size_right: Any, softcap: Any,
        alibi_slopes: Any, deterministic: Any, rng_state: Any = None,
    ) -> None:  # fmt: skip
        dout, q, k, v, out, lse = (x.squeeze(0) for x in (dout, q, k, v, out, softmax_lse))
        backward(dout, (q, k, v), out, lse, (dq, dk, dv), softmax_scale, causal)

    def _flash_attn_varlen_forward(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
        dropout_p: Any, softmax_scale: Any, causal: Any, window_size_left: Any = -1, window_size_right: Any = -1,
        softcap: Any = 0.0, alibi_slopes: Any = None, return_softmax: Any = False,
    ) -> Any:  # fmt: skip
        return *forward(q, k, v, softmax_scale, causal), None, None

    def _flash_attn_varlen_backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any,
        cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: Any, softmax_scale: Any, causal: Any,
        window_size_left: Any = -1, window_size_right: Any = -1, softcap: Any = 0.0, alibi_slopes: Any = None,
        deterministic: Any = False, rng_state: Any = None,
    ) -> None:  # fmt: skip
        backward(dout, (q, k, v), out, softmax_lse, (dq, dk, dv), softmax_scale, causal)

    functions = _flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward
    for function in functions:
        setattr(module, function.__name__, function)
    return module


# ---- PyTorch


def _pytorch(problem: Problem, schedule: str, group: Any, device: torch.device) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import _attention as library
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = DeviceMesh.from_group(group, device.type)
    positions = torch.arange(problem.starts_q[-1], device=device)  # it wants something to cut
    how = {"is_causal": True, "scale": problem.scale, "enable_gqa": problem.heads_q != problem.heads_kv}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # by name: `context_parallel` exchanges the function
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)

    @contextmanager
    def inside() -> Iterator[None]:
        library.set_rotate_method({"p2p": "alltoall", "all_gather": "allgather"}[schedule])
        whole = positions.clone()
        with (
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            library.context_parallel(mesh, buffers=[whole], buffer_seq_dims=[0]),
        ):
            yield

    return attend, inside


# ---- TransformerEngine


def _transformer_engine(problem: Problem, schedule: str, group: Any, device: torch.device) -> Any:
    os.environ |= {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
    library = import_module("transformer_engine.pytorch")
    packed = len(problem.sequences) > 1
    form: dict[str, Any] = {"qkv_format": "bshd", "attn_mask_type": "causal"}
    if packed:
        cu = torch.tensor(problem.starts_q, dtype=torch.int32, device=device)
        lengths = {f"cu_seqlens_{side}{padded}": cu for side in ("q", "kv") for padded in ("", "_padded")}
        longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(problem.lengths.len_q))
        form = {
            "qkv_format": "thd",
            "attn_mask_type": "padding_causal",
            "pad_between_seqs": False,
            **lengths,
            **longest,
        }
    layer = library.DotProductAttention(
        problem.heads_q,
        (problem.d_qk, problem.d_v),
        num_gqa_groups=problem.heads_kv,
        attention_dropout=0.0,
        qkv_format=form["qkv_format"],
        softmax_scale=problem.scale,
    )
    layer.set_context_parallel_group(group, dist.get_process_group_ranks(group), torch.cuda.Stream(), schedule)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = layer(q, k, v, window_size=(problem.window_size[0], 0), **form)
        return out.unflatten(-1, (problem.heads_q, problem.d_v))

    return attend, nullcontext


_MAKERS: dict[str, Callable[[Problem, str, Any, torch.device], Any]] = {
    "ring_flash_attn": _ring_flash_attn,
    "pytorch": _pytorch,
    "transformer_engine": _transformer_engine,
}


# ---- MagiAttention
#
# On two H200s this was the fastest of the settings that it documents: one remote stage, which is its default, over a
# process group of high priority; CatGQA, and the tail of the backward pass's reduction hidden, both of which it calls
# experimental. Remote dK and dV travel in bfloat16, as it does by default. `benchmarks/masks.py --peers` takes it too.


MAGI_SETTINGS = {
    "MAGI_ATTENTION_KERNEL_BACKEND": "ffa",
    "MAGI_ATTENTION_CATGQA": "1",
    "MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE": "1",
}


def magi_way(areas: Areas, tokens: int, sizes: tuple[int, int, int], scale: float) -> tuple[Slices, Attend]:
    """How it cuts global tensors [t, h, d] into this rank's slices, and out of slices of q, k and v. Collective: over
    all processes. Raises ImportError where it is not installed.

    Args:
        tokens: of the batch.
        sizes: heads_q, heads_kv, head dim.
    """
    api, adapter = (import_module(name) for name in ("magi_attention.api", "conformance.adapters.magi_attention"))
    os.environ |= MAGI_SETTINGS
    key = adapter.key_of(areas, tokens, *sizes, _urgent_group())

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return api.calc_attn(q, k, v, key, softmax_scale=scale)[0]

    return partial(api.dispatch, key=key), attend


@cache
def _urgent_group() -> Any:
    """All processes, whose messages overtake kernels."""
    return dist.new_group(pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
