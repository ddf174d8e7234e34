"""`cp_fast` on all levels: `auto`, and one object for each of its backends, `fa4`, `fa2`, `cudnn`, `cpu`, `torch`.

    python -m conformance --impl cp_fast                              # conformance.adapters.cp_fast:auto
    python -m conformance --impl conformance.adapters.cp_fast:cpu
    python -m conformance --impl conformance.adapters.cp_fast:processes --cp-size 2,4       # over gloo, or NCCL

`merge` calls the kernels in use: those of CP_FAST_KERNELS, or the first available. `tile` calls one segment of the
backend, cut to the rows and columns that see anything, as in the program.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch as pytorch

import cp_fast as package
import cp_fast.thd
from conformance.adapters.band_tiles import crop, out_of_nothing
from conformance.case import Case
from cp_fast.compile.own_keys import choose_own_first
from cp_fast.compile.same_bits import from_first_keys
from cp_fast.kernels.attention.backend_protocol import Backend, BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.choose_backend import by_name, choose
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_fast.movers.select_movers import movers_for
from cp_ref.problems.arguments import features_of
from cp_ref.schedules.planners.visibility import Visibility
from cp_ref.schedules.problem import Problem, ScoreSpec
from cp_ref.schedules.words import Feature

__all__ = ["OneBackend", "auto", "cpu", "cudnn", "fa2", "fa4", "operator_calls", "processes", "tensors", "torch"]

CU = [0, 8, 8, 12]
REAL = [0, 5, 5, 9]
LOCAL = [0, 4, 4, 6]  # With cp_size 2. A tail of 2 rows follows.


def tensors(device: str, requires_grad: bool = False) -> dict[str, pytorch.Tensor]:
    """Operands: x, y global; the rest local."""
    generator = pytorch.Generator().manual_seed(1)

    def random(*shape: int) -> pytorch.Tensor:
        return pytorch.randn(*shape, generator=generator).to(device)

    return {
        "cu": pytorch.tensor(CU, device=device),
        "real": pytorch.tensor(REAL, device=device),
        "local": pytorch.tensor(LOCAL, device=device),
        "held": pytorch.tensor([0, 3, 3, 5], device=device),
        "x": random(16, 2, 4).requires_grad_(requires_grad),
        "y": random(16, 3).requires_grad_(requires_grad),
        "kv": random(2, 8, 2, 4).requires_grad_(requires_grad),
        "out": random(8, 2, 4),
        "step": random(8, 2, 4).bfloat16(),
        "half_step": random(4, 2, 4).bfloat16(),
        "lse": random(2, 8),
        "lse_step": random(2, 8),
        "half_lse": random(2, 4),
        "padded_lse": random(3, 2, 5),
        "padded_half_lse": random(3, 2, 2),
        "ids": pytorch.arange(9, device=device),
        "rows": pytorch.tensor([6, 0, 3, 2], device=device),
    }


def operator_calls(device: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """(operator, arguments)."""
    t, ops = tensors(device, requires_grad=True), pytorch.ops.cp_attention
    return {
        "partition_indices": (ops.partition_indices.default, (t["cu"], 16, 2, 1)),
        "rank_lengths": (ops.rank_lengths.default, (t["real"], t["cu"], 2, 0, True, False)),
        "partition": (ops.partition.default, ([t["x"], t["y"]], t["cu"], 2, 1)),
        "reorder": (ops.reorder.default, ([t["x"], t["y"]], t["cu"], 2, True)),
        "reorder back": (ops.reorder.default, ([t["x"]], t["cu"], 2, False)),
        "read_half": (ops.read_half.default, ([t["x"], t["y"]], t["cu"], 1)),
        "read_half of kv": (ops.read_half.default, ([t["kv"]], t["local"], 0)),
        "read_second_half_lse": (ops.read_second_half_lse.default, (t["lse"], t["local"], True, 4)),
        "copy_valid_": (ops.copy_valid_.default, (t["out"], t["step"], t["local"], t["held"])),
        "pad_sequences": (ops.pad_sequences.default, (t["ids"], t["real"], t["cu"], 16, -100)),
        "lse_correction_": (ops.lse_correction_.default, (t["lse"], t["half_lse"], t["local"], True)),
        "out_correction_": (
            ops.out_correction_.default,
            (t["out"], t["half_step"], t["lse"], t["half_lse"], t["local"], True, True),
        ),
        "grad_correction_": (ops.grad_correction_.default, (t["out"], t["half_step"], t["local"], "none", "add")),
    }


Tensor = pytorch.Tensor
for _device in ("cpu", "cuda") if pytorch.cuda.is_available() else ("cpu",):
    movers_for(_device)  # A compiler takes half a minute. It must not count as the first problem's time.


_ONE_LAUNCH = ("a2a", "all_gather")  # They may compute a row with all its keys, in one launch.


def case_bits(case: Case, backend: str) -> frozenset[str]:
    """The results of a case that have the bits of one launch over the whole batch: docs/how_to/bits.md."""
    p, library = case.problem, by_name(backend)
    if not library.key_block or p.areas is not None or (p.cp_size > 1 and p.cp_comm_type not in _ONE_LAUNCH):
        return frozenset()
    if not from_first_keys(p):
        return frozenset()
    if p.cp_size > 1 and p.cp_comm_type == "all_gather":
        first = choose_own_first(p, deterministic=case.deterministic)
        if "forward" in first or (p.window_size[0] >= 0 and not p.causal):  # Partial results; segments that are cut.
            return frozenset()
        gradients = () if "backward" in first else ("dq",)
    else:
        together = p.heads_kv % p.a2a_size == 0  # A rank has all query heads that share a kv head.
        if backend != "cpu" and not together:  # Nobody has measured it.
            return frozenset()
        gradients = ("dq", "dk", "dv") if together else ("dq",)
    return frozenset(("out", "lse", *(gradients if case.deterministic else ()))).intersection(library.bits_of)


class OneBackend:
    """`cp_fast` with one backend by name: features that the backend lacks are unsupported, without a fallback. The name
    "auto" means the package's default: the first backend with all features of a problem.
    """

    ops = staticmethod(lambda device: list(operator_calls(device).values()))
    supports_compile = chooses_schedule = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.ContextParallel = partial(package.ContextParallel, backend=name)

    def __getattr__(self, name: str) -> Any:
        """All other members are the package's."""
        return getattr(package, name)

    def __repr__(self) -> str:
        return f"cp_fast with backend {self.name!r}"

    def same_bits(self, case: Case) -> frozenset[str]:
        """`case_bits` of its backend; "auto" claims it without a GPU, where it is "cpu"."""
        if self.name == "auto" and pytorch.cuda.is_available():
            return frozenset()
        return case_bits(case, "cpu" if self.name == "auto" else self.name)

    @staticmethod
    def batch_invariant(one: Problem, other: Problem) -> bool:
        """Whether a ring of three or more adds its gradients in the same order for both: all on the way, or none."""
        seen, other_seen = (Visibility(problem.workload) for problem in (one, other))
        ring = one.cp_comm_type in ("p2p", "a2a+p2p") and seen.member_count > 2
        return not ring or seen.sends_directly == other_seen.sends_directly

    @staticmethod
    def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """By `cp_fast.movers`' `merge_`, one part after the other."""
        first_out, first_lse = parts[0]
        out, lse = first_out.to(first_lse.dtype, copy=True), first_lse.clone()
        for part_out, part_lse in parts[1:]:
            movers_for(out.device.type).merge_(out, lse, part_out, part_lse, slice(0, len(out)))
        return out, lse

    def tile(
        self, q: Tensor, k: Tensor, v: Tensor, *, left: int | None, right: int | None, **scores: Any
    ) -> tuple[Tensor, Tensor]:
        """By the backend's `forward`, of one segment."""
        options = LaunchOptions(ScoreSpec(**scores))
        backend = self._backend(q, k, v, options.scores)
        out, lse = out_of_nothing(q, v)
        cut = crop(len(q), len(k), left, right)
        if cut is not None:
            segments = _segment(cut.rows, cut.columns, cut.left, cut.right, q.device)
            operands = (q[cut.rows], k[cut.columns], v[cut.columns])
            part = backend.forward(*operands, segments, options)
            out[cut.rows], lse[:, cut.rows] = part.out.to(out.dtype), part.lse
        return out, lse

    def tile_backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *, left: int | None,
        right: int | None, **scores: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """By the backend's `backward`."""
        options = LaunchOptions(ScoreSpec(**scores))
        backend = self._backend(q, k, v, options.scores)
        dq, dk, dv = (pytorch.zeros_like(x) for x in (q, k, v))
        cut = crop(len(q), len(k), left, right)
        if cut is not None:
            rows, columns = cut.rows, cut.columns
            segments = _segment(rows, columns, cut.left, cut.right, q.device)
            operands = BackwardOperands(
                dout[rows], q[rows], k[columns], v[columns], out[rows], lse[:, rows].contiguous(), None
            )
            grads = backend.backward([operands], segments, options)
            dq[rows], dk[columns], dv[columns] = (x.to(q.dtype) for x in grads)
        return dq, dk, dv

    def _backend(self, q: Tensor, k: Tensor, v: Tensor, scores: ScoreSpec) -> Backend:
        """The backend, if it has what the tile needs."""
        wanted = {
            Feature(f"device {q.device.type}"): True,
            Feature(str(q.dtype).removeprefix("torch.")): True,
            Feature.GQA: q.shape[1] != k.shape[1],
            Feature.ASYMMETRIC_DIMS: q.shape[2] != v.shape[2],
            Feature.GQA_ASYMMETRIC_DIMS: q.shape[1] != k.shape[1] and q.shape[2] != v.shape[2],
            Feature.HEAD_DIM_OVER_128: max(q.shape[2], v.shape[2]) > 128,
            Feature.HEAD_DIM_ODD: bool(q.shape[2] % 8 or v.shape[2] % 8),
        }
        return choose(features_of(scores) | {feature for feature, needed in wanted.items() if needed}, self.name)


def _segment(rows: slice, columns: slice, left: int | None, right: int | None, device: pytorch.device) -> VarlenBatch:
    lengths = ([rows.stop - rows.start], [columns.stop - columns.start])
    return VarlenBatch.pack(*lengths, left, right, device)


class Processes(OneBackend):
    """`cp_fast` as it comes, with a process for every rank."""

    group_kind = "process"


processes = Processes("auto")
auto, fa4, fa2, cudnn, cpu, torch = (OneBackend(name) for name in ("auto", "fa4", "fa2", "cudnn", "cpu", "torch"))
