"""Backend "fa4": FlashAttention 4 (package `flash-attn-4`), through its raw varlen forward and backward.

This file relies on these facts about `flash_attn.cute.interface` 4.0.0b36 on Hopper (sm90):

- A window side of None is unbounded and -1 is minus one; but *both* sides negative count as unbounded. (None, 0) is
  recognised as causal.
- max_seqlen_* size nothing in the varlen forward, but are part of its compile cache's key. They are left out, so that a
  shape class compiles once (2-4 s) and not again for short segments. In the backward they size the semaphores of the
  deterministic mode, and nothing without it. A side of one block is another shape class, also where they are left out
  and few rows are given. So they are given, with a minimum of a few blocks.
- With seqused_*, a segment has the rows from cu_seqlens[s] on, seqused[s] of them: segments lie in any order, and have
  common keys. Tiles of 128 rows (the query heads of a kv head times tokens) start in the order of the segments, and
  with a window each segment's last tile is the first. There is no other order. The forward pass has no out and lse to
  continue from (`out` and `lse` are only written), and does not split keys on Hopper.
- cu_seqlens must be int32, contiguous and on the GPU. q, k, v, out and dout are copied by the library where their
  rows are not 16-byte aligned. The lse is float32 [h_q, n], natural logarithm.
- The kernels read whole blocks, past a segment's end into its neighbour's rows: these rows are multiplied by zero, so
  they must be finite. Rows between segments must not hold NaN.
- Head dims are multiples of 8. The backward refuses GQA with d_qk != d_v. For head dims up to 128 that are not
  multiples of 32, its kernel and its float32 accumulators round differently. All three are padded with zero columns
  (`dims`), at the cost of one copy of q, k, v, out and dout and of the wider products (192/128: about a fifth of the
  speed).
- The first call of a shape class compiles, which is not safe in two threads at once: a lock is held while launching.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache, lru_cache
from threading import Lock
from types import ModuleType
from typing import Any

import torch

from cp_fast.kernels.attention.backend_protocol import (
    FUSED_KERNELS,
    Backend,
    BackwardOperands,
    Gradients,
    LaunchOptions,
    Outs,
    Partial,
)
from cp_fast.kernels.attention.fa4.fa4_recorded import Launches, keep_on_disk
from cp_fast.kernels.attention.fa4.scores.launch_program import launch_program, traced_scores
from cp_fast.kernels.attention.fa4.scores.score_kernels import score_arguments, score_call
from cp_fast.kernels.attention.kernel_operands import round_up, trim, widen
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_fast.kernels.this_gpu import NotInstalled, hopper_why_not
from cp_ref.calls.scores import ScoreTensors
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature

__all__ = [
    "Fa4Backend",
    "changed_hook",
]

# ---- the library's methods that scores replace
#
# The methods of the library that `score_kernels` replaces, and their parameters: another release may differ.


_PLACE = ("batch_idx", "head_idx", "m_block")
_BLOCK = ("smem_pipe_read", "n_block", "mma_qk_fn", "mma_pv_fn", "pipeline_k", "pipeline_v", "acc_O", "tOrP")
_AUX = ("aux_data", "fastdiv_mods")

# class -> method -> its parameters after self: all of them in order, or for a set some of them
_HOOKS: dict[str, dict[str, tuple[str, ...] | frozenset[str]]] = {
    "FlashAttentionForwardSm90": {
        "apply_score_mod": ("thr_mma_qk", *_PLACE, "acc_S", "n_block", "softmax_scale", "seqlen", *_AUX),
        "first_half_block_overlap": frozenset({"softmax", "score_mod_fn"}),
        "mma_one_n_block": frozenset({*_BLOCK, "softmax", "score_mod_fn"}),
        "mma_one_n_block_intrawg_overlap": frozenset({*_BLOCK, "softmax", "score_mod_fn"}),
        "epilogue": frozenset({"acc_O", "lse"}),
    },
    "FlashAttentionBackwardSm90": {
        "apply_score_mod": ("acc_S", "thr_mma_SdP", *_PLACE, "n_block", "softmax_scale", "seqlen_info", *_AUX),
        "apply_score_mod_bwd": (
            *("grad_tensor", "score_tensor", "thr_mma_SdP", *_PLACE, "n_block", "softmax_scale", "seqlen_info", *_AUX),
        ),
        "mma_one_m_block": frozenset(
            {"consumer_state_Q", "consumer_state_dO", "mma_pdo_fn", "copy_P_r2s", "tLSEsdPsum"}
            | {"score_mod_fn", "score_mod_bwd_fn"}
        ),
        "_get_stat": frozenset({"tSrS", "row", "lane", "shuffle"}),
    },
}


def changed_hook(interface: ModuleType) -> str | None:
    """The first method that is not as `scores.score_kernels` needs it, as "class.method"; None where all are.

    interface: the module `flash_attn.cute.interface`.

    >>> changed_hook(ModuleType("another"))
    'FlashAttentionForwardSm90.apply_score_mod'
    """
    for name, methods in _HOOKS.items():
        for method, wanted in methods.items():
            there = getattr(getattr(interface, name, None), method, None)
            if there is None:
                return f"{name}.{method}"
            found = tuple(one for one in inspect.signature(there).parameters if one != "self")
            if not (wanted <= set(found) if isinstance(wanted, frozenset) else wanted == found):
                return f"{name}.{method}"
    return None


# ---- the kernel library


_RELEASE = "4.0.0b36, the release that this backend is written for"
_launch_lock = Lock()
_SEVERAL_BLOCKS = 257  # More rows than two blocks of any kernel.


class Fa4Backend(Backend):
    """FlashAttention 4 on Hopper; float16 and bfloat16, head dims up to 256."""

    name: str = "fa4"
    rounded_gradients = True
    shared_keys_tile = 128
    writes_rows = True
    key_block = 384  # Of 128, 96, 64 and 48 rows: those of windows, on all GPUs, in both passes.
    features: frozenset[Feature] = FUSED_KERNELS | {
        Feature.SOFTCAP,
        Feature.ALIBI,
        Feature.SCORE_MOD,
        Feature.DROPOUT,
        Feature.DETERMINISTIC,
        Feature.IN_PLACE,
    }

    def why_not(self) -> str | None:
        """None where the library is installed, looks as expected and the GPU is a Hopper, else the reason."""
        return _why_not()

    def check_score_inputs(self, scores: ScoreSpec, inputs: ScoreTensors) -> None:
        """Trace the scores of a call; raise Unsupported for a score_mod that cannot be traced."""
        traced_scores(inputs, scores.softcap)

    def pads(self, d_qk: int, d_v: int) -> bool:
        """See `Backend.pads`."""
        return _forward_dims(d_qk, d_v) != (d_qk, d_v)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: VarlenBatch,
        options: LaunchOptions,
        outs: Outs | None = None,
    ) -> Partial:
        """See `Backend.forward`; out has q's dtype."""
        d, (d_qk, d_v) = v.shape[2], _forward_dims(q.shape[2], v.shape[2])
        tensors: list[torch.Tensor | None] = [_operand(q, d_qk), _operand(k, d_qk), _operand(v, d_v)]
        if (starts := segments.starts) is None:
            tensors += [segments.device_cu_q, segments.device_cu_kv, None, None]
        else:
            tensors += [starts.device_q, starts.device_kv, starts.device_rows, starts.device_columns]
        tensors += outs or (None, None)
        numbers = _forward_numbers(segments.left, segments.right, options.scores)
        out, lse = _launch("_flash_attn_fwd", tensors, numbers, options)
        return Partial(out if outs else trim(out, d), lse, None)

    def backward(self, given: list[BackwardOperands], segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """See `Backend.backward`; the gradients have q's dtype."""
        dout, q, k, v, out, lse, dlse = given.pop()
        dims = q.shape[2], v.shape[2]
        d_qk, d_v = _backward_dims(*dims, gqa=q.shape[1] != k.shape[1])
        tensors: list[torch.Tensor | None] = [_operand(q, d_qk), _operand(k, d_qk), _operand(v, d_v)]
        tensors += [_operand(out, d_v), _operand(dout, d_v)]
        tensors += [lse.contiguous(), None if dlse is None else dlse.contiguous()]
        tensors += [segments.device_cu_q, segments.device_cu_kv]
        del dout, q, k, v, out, lse, dlse
        longest = (segments.max_q, segments.max_kv) if options.deterministic else None
        numbers = _backward_numbers(segments.left, segments.right, options.scores, longest)
        dq, dk, dv = _launch("_flash_attn_bwd", tensors, numbers, options)
        return Gradients(trim(dq, dims[0]), trim(dk, dims[0]), trim(dv, dims[1]))


_CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")
_FUNCTIONS = {  # The tensor arguments, and the number of results.
    "_flash_attn_fwd": (("q", "k", "v", *_CU_SEQLENS, "seqused_q", "seqused_k", "out", "lse"), 2),
    "_flash_attn_bwd": (("q", "k", "v", "out", "dout", "lse", "dlse", *_CU_SEQLENS), 3),
}


def _launch(
    name: str, tensors: list[torch.Tensor | None], numbers: dict[str, Any], options: LaunchOptions
) -> tuple[torch.Tensor, ...]:
    """One of the library's functions, for one thread at a time and on the tensors' device."""
    first, count = tensors[0], 0
    assert first is not None
    if options.score_inputs is not None:
        given = launch_program(options.score_inputs, options.scores)
        tensors += given.tensors
        count = len(given.tensors)
        numbers = {**numbers, "softcap": 0.0, "program": given.program, "first_head": given.first_head}
    with _launch_lock, torch.cuda.device(first.get_device()):
        del first  # The kernels' operands are freed early.
        return _launches(_interface(), name, count)(tensors, numbers)


@cache
def _launches(library: ModuleType, name: str, count: int) -> Launches:
    """Recorded calls of a function. count: of tensors that scores read; 0 for plain scores."""
    arguments, results = _FUNCTIONS[name]
    if count == 0:
        return Launches(library, getattr(library, name), arguments, results)
    return Launches(library, score_call(library, name, count), (*arguments, *score_arguments(count)), results)


@cache
def _interface() -> ModuleType:
    """The library, imported on first use: the import takes seconds."""
    keep_on_disk()
    return importlib.import_module("flash_attn.cute.interface")


@cache
def _why_not() -> str | None:
    """The reason why the library does not run here, found once."""
    if (reason := hopper_why_not()) is not None:
        return reason
    try:
        library = _interface()
    except Exception as error:  # A broken installation raises errors of many types.
        return NotInstalled(
            f"importing flash_attn.cute.interface (pip install flash-attn-4) failed: {type(error).__name__}: {error}"
        )
    both = {"cu_seqlens_q", "cu_seqlens_k", "window_size_left", "window_size_right", "softmax_scale", "softcap"}
    both |= {"score_mod", "aux_tensors", "aux_scalars"}
    forward = {"return_lse", "pack_gqa", "seqused_q", "seqused_k", "out", "lse"}
    backward = {"deterministic", "dlse", "score_mod_bwd"}
    for name, arguments in (("_flash_attn_fwd", forward), ("_flash_attn_bwd", backward)):
        function = getattr(library, name, None)
        if function is None or not both | arguments <= set(inspect.signature(function).parameters):
            return f"this flash-attn-4 has another {name} than {_RELEASE}"
    if (hook := changed_hook(library)) is not None:
        return f"this flash-attn-4 has another {hook} than {_RELEASE}"
    return None


@lru_cache
def _forward_numbers(left: int | None, right: int | None, scores: ScoreSpec) -> dict[str, Any]:
    """The forward pass's arguments that are no tensors."""
    return _band(left, right) | {"softmax_scale": scores.scale, "softcap": scores.softcap or None, "return_lse": True}


@lru_cache
def _backward_numbers(
    left: int | None, right: int | None, scores: ScoreSpec, longest: tuple[int, int] | None
) -> dict[str, Any]:
    """The backward pass's arguments that are no tensors. longest: of q and of k and v, if it is deterministic."""
    how = {"softmax_scale": scores.scale, "softcap": scores.softcap, "deterministic": longest is not None}
    how["max_seqlen_q"], how["max_seqlen_k"] = (max(n, _SEVERAL_BLOCKS) for n in longest or (0, 0))
    return _band(left, right) | how


def _band(left: int | None, right: int | None) -> dict[str, Any]:
    """The window of segments as the library's arguments."""
    if left is not None and right is not None and left < 0 and right < 0:
        raise ValueError(f"backend 'fa4' takes a window of ({left}, {right}) for unbounded; no row sees anything in it")
    return {"causal": False, "window_size_left": left, "window_size_right": right}


@lru_cache
def _forward_dims(d_qk: int, d_v: int) -> tuple[int, int]:
    """The head dims to run the forward with: 192/128 has its own kernel, any other pair is padded to be equal.

    >>> _forward_dims(192, 128), _forward_dims(128, 64), _forward_dims(80, 80), _forward_dims(75, 20)
    ((192, 128), (128, 128), (80, 80), (80, 80))
    """
    wide = round_up(max(d_qk, d_v), 8)
    return (d_qk, d_v) if (d_qk, d_v) == (192, 128) else (wide, wide)


@lru_cache
def _backward_dims(d_qk: int, d_v: int, *, gqa: bool) -> tuple[int, int]:
    """The head dims to run the backward with, see the head of this file.

    >>> _backward_dims(192, 128, gqa=False), _backward_dims(192, 128, gqa=True), _backward_dims(80, 80, gqa=False)
    ((192, 128), (192, 192), (96, 96))
    """
    if (d_qk, d_v) == (192, 128) and not gqa:
        return d_qk, d_v
    wide = max(d_qk, d_v)
    wide = round_up(wide, 8 if wide > 128 else 32)
    return wide, wide


def _operand(x: torch.Tensor, d: int) -> torch.Tensor:
    """x [rows, heads, up to d] with zero columns up to d."""
    # Strides of zero would be compiled in: another shape class.
    return widen(x.contiguous() if 0 in x.stride() else x, d)
