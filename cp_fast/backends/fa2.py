"""Backend "fa2": FlashAttention 2, with the kernels of the flash-attn package where it is installed, else PyTorch's.

`fa2_kernels` has the facts that both share; `fa2_package` and `fa2_builtin` how each is called. What follows from them:

- The deterministic backward's order of sums depends on the launch. So that a segment's gradients do not depend on its
  neighbours, every segment is a launch of its own then; and a plan that is updated in place cannot have it, since a
  captured graph would keep the first batch's launches.
- Otherwise such a plan is served as it is. Its grids have room for every segment to be the longest; the blocks too many
  return at once, which takes its time where there is room for many and for long ones.
- Head dims are equal and multiples of 8; others are padded with zero columns (`dims`).
- There is no gradient through lse; a second backward launch adds it (`lse_gradient`). That holds with a softcap too:
  its slope multiplies whatever reaches a score.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch

from cp_fast.backends.base import Gradients, Partial, Segments
from cp_fast.backends.dims import aligned, round_up, trim, widen
from cp_fast.backends.fa2_builtin import BuiltInKernels
from cp_fast.backends.fa2_kernels import Kernels, Said, say
from cp_fast.backends.fa2_package import PackageKernels
from cp_fast.backends.lse_gradient import lse_launch
from cp_fast.backends.probe import probe
from cp_ref.spec import Feature, Unsupported

__all__ = ["BUILT_IN", "PACKAGE", "Fa2Backend", "Fa2InPlace", "chosen_kernels", "whose"]

_FEATURES = frozenset(
    {
        Feature.GQA,
        Feature.ASYMMETRIC_DIMS,
        Feature.GQA_ASYMMETRIC_DIMS,
        Feature.HEAD_DIM_OVER_128,
        Feature.HEAD_DIM_ODD,
        Feature.LSE_GRADIENT,
        Feature.DETERMINISTIC,
        Feature.CUDA,
        Feature.FLOAT16,
        Feature.BFLOAT16,
    }
)


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""dout, q, k, v, out, aligned and of one head dim."""


class Fa2Backend:
    """FlashAttention 2; float16 and bfloat16 on CUDA, head dims up to 256, softcap where its kernels have it."""

    name: str = "fa2"

    def __init__(self, kernels: Kernels) -> None:
        """`kernels`: whose they are."""
        self.kernels = kernels
        self.features: frozenset[Feature] = _FEATURES | kernels.features

    def why_not(self) -> str | None:
        """None where the kernels are there and run on this GPU, else the reason."""
        return self.kernels.why_not()

    @torch.no_grad()
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, *, scale: float, softcap: float
    ) -> Partial:
        """See `Backend.forward`; out has q's dtype."""
        d, d_v = _dim(q, v), v.shape[2]
        q, k, v = (aligned(widen(x, d)) for x in (q, k, v))
        out, lse = self.kernels.forward(q, k, v, say(segments, scale=scale, softcap=softcap))
        return Partial(trim(out, d_v), lse, None)

    @torch.no_grad()
    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        segments: Segments,
        *,
        scale: float,
        softcap: float,
        deterministic: bool,
    ) -> Gradients:
        """See `Backend.backward`; the gradients have q's dtype, float32 where dlse is given."""
        d, d_qk, d_v = _dim(q, v), q.shape[2], v.shape[2]
        q, k, v, out, dout = (aligned(widen(x, d)) for x in (q, k, v, out, dout))
        gradients, lse = (self._each_segment if deterministic else self._all_segments), lse.contiguous()
        said = say(segments, scale=scale, softcap=softcap)
        dq, dk, dv = gradients((dout, q, k, v, out), lse, segments, said)
        if dlse is not None:
            ones, products = lse_launch(dlse, q.dtype, d)
            more_dq, more_dk, _ = gradients((ones, q, k, torch.zeros_like(v), products), lse, segments, said)
            dq, dk = dq.float() + more_dq, dk.float() + more_dk
        return Gradients(trim(dq, d_qk), trim(dk, d_qk), trim(dv, d_v))

    def _all_segments(self, operands: Operands, lse: torch.Tensor, segments: Segments, said: Said) -> Gradients:
        """One launch."""
        return self.kernels.backward(*operands, lse, said, deterministic=False)

    def _each_segment(self, operands: Operands, lse: torch.Tensor, segments: Segments, said: Said) -> Gradients:
        """A launch for each segment, whose bits do not depend on the others."""
        if segments.updated_in_place:
            raise Unsupported(
                "a plan with max_sequences", {"backend 'fa2'": {Feature.DETERMINISTIC}}, "make a plan for each batch"
            )
        dout, q, k, v, out = operands
        parts: list[Gradients] = []
        for s in range(len(segments.cu_q) - 1):
            rows, columns = slice(*segments.cu_q[s : s + 2]), slice(*segments.cu_kv[s : s + 2])
            own = (dout[rows], q[rows], k[columns], v[columns], out[rows], lse[:, rows].contiguous())
            alone = say(segments.alone(s), scale=said.scale, softcap=said.softcap)
            parts.append(self.kernels.backward(*own, alone, deterministic=True))
        return Gradients(*(torch.cat(x) for x in zip(*parts, strict=True)))


class Fa2InPlace(Fa2Backend):
    """FlashAttention 2 for plans that are updated in place, which cannot have its determinism."""

    def __init__(self, kernels: Kernels) -> None:
        """`kernels`: whose they are."""
        super().__init__(kernels)
        self.features = self.features - {Feature.DETERMINISTIC} | {Feature.IN_PLACE}


def _dim(q: torch.Tensor, v: torch.Tensor) -> int:
    """The head dim to run with. Refuses what the features already exclude, rather than compute something else."""
    if max(q.shape[2], v.shape[2]) > 256:
        raise ValueError(f"backend 'fa2' needs head dims up to 256, got d_qk={q.shape[2]} and d_v={v.shape[2]}")
    return round_up(max(q.shape[2], v.shape[2]), 8)


_package_kernels = PackageKernels()
BUILT_IN, PACKAGE = Fa2Backend(BuiltInKernels()), Fa2Backend(_package_kernels)


@cache
def chosen_kernels() -> Fa2Backend:
    """With the package's kernels where they work, else with PyTorch's; a warning, once, where the package is broken.

    A release may be of any build, and others than the one whose source was read: it has to pass `probe` here first.
    """
    reason = _package_kernels.why_not() or _wrong_here()
    if reason is None:
        return PACKAGE
    if BUILT_IN.kernels.why_not() is None and _broken() is not None:
        warnings.warn(
            f"the flash-attn package is installed, but backend 'fa2' does without it and its softcap: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return BUILT_IN


def whose(backend: Fa2Backend) -> str:
    """Whose kernels these are, and where they are not the package's why not: for `doctor`."""
    kernels = backend.kernels
    words = f"{kernels.name}, {kernels.version()}"
    if backend is PACKAGE:
        return words
    broken = _broken()
    return f"{words}; no softcap: " + (
        f"the flash-attn package does not work: {broken}" if broken else "the flash-attn package is not installed"
    )


def _broken() -> str | None:
    """Why the package, which is installed, is not used; None where it is used, or not there."""
    found = _package_kernels.broken()
    return _wrong_here() if found is None and _package_kernels.why_not() is None else found


@cache
def _wrong_here() -> str | None:
    """What the package's kernels get wrong on this GPU, in a few launches; asked where they can be launched."""
    try:
        return probe(PACKAGE, "cuda")
    except Exception as error:  # a build without kernels for this GPU, or with another signature
        return f"launching it failed: {type(error).__name__}: {error}"
