"""Backend "fa2": FlashAttention 2, on the kernels of the flash-attn package if it is installed, else on PyTorch's.

Both have a part in common: the kernels' arguments, with facts about the kernels, and the launches. The package has more
features.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple

import torch

from cp_fast.kernels.attention.backend_probe import probe
from cp_fast.kernels.attention.backend_protocol import (
    FUSED_KERNELS,
    Backend,
    BackwardOperands,
    Gradients,
    LaunchOptions,
    Partial,
    check_scores,
)
from cp_fast.kernels.attention.kernel_operands import copied_if_unaligned, round_up, trim, widen, with_lse_gradient
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_fast.kernels.this_gpu import ampere_why_not
from cp_ref.schedules.problem import ScoreSpec
from cp_ref.schedules.words import Feature, Unsupported, describe

__all__ = [
    "BUILT_IN",
    "PACKAGE",
    "BuiltIn",
    "Fa2Backend",
    "Package",
    "Varlen",
    "checked_lse",
    "installed",
    "origin_of",
    "varlen_arguments",
]

# ---- the kernels' arguments
#
# The arguments of FlashAttention 2's varlen kernels, wherever these come from.
#
# Facts about these kernels that hold for PyTorch's own copy of them (2.11 and later) and for the flash-attn package
# (2.8):
#
# - A negative window side means unbounded, so a side of -1 cannot be expressed: tiles must be cropped until no side
#   is negative. Causal is the window (unbounded, 0); the causal flag adds nothing and stays False.
# - A side >= max_k counts as unbounded, and an unbounded right side with a bounded left one is replaced by max_k. Both
#   are wrong if a segment has more rows than columns. `varlen_arguments` gives a max_k that keeps either from
#   mattering: max_k only sizes the backward's grid.
# - With max_q = 1 and GQA the forward takes a path that lays its results out differently; max_q = 2 avoids it.
# - Lengths are read on the device; max_q and max_k are upper bounds, and blocks past a segment's end return at once. So
#   a segment may have no rows and no columns. Rows and columns of no segment are not written.
# - The lse is [h_q, n] float32, natural logarithm, and +inf for a row that sees nothing (`VarlenBatch` has no such
#   row).
# - The deterministic backward makes dq repeatable, but the order of its sums depends on how many segments and heads are
#   in the launch, and it takes about SMs / (segments * heads) + 1 float32 copies of dq.
# - Segments are a grid's second dimension: 65,535 at most.


_MOST_SEGMENTS = 65535


class Varlen(NamedTuple):
    """Segments as the kernels take it, and the options of scores."""

    cu_q: torch.Tensor  # int32 [segments + 1], on the device
    cu_k: torch.Tensor  # int32 [segments + 1]
    max_q: int  # at least 2
    max_k: int  # Larger than any side that hides a column.
    left: int  # -1 for unbounded
    right: int
    scores: ScoreSpec


def varlen_arguments(segments: VarlenBatch, options: LaunchOptions) -> Varlen:
    """Segments as the kernels take them.

    If the segments have bounds (`Plan.update`), the arguments depend on the bounds only, not on the current lengths.

    >>> varlen = varlen_arguments(VarlenBatch.pack([30], [10], None, 22), LaunchOptions(ScoreSpec(0.5)))
    >>> varlen.left, varlen.right, varlen.max_q, varlen.max_k
    (-1, 22, 30, 31)
    """
    left, right = segments.left, segments.right
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(f"backend 'fa2' takes window sides of None or >= 0, got ({left}, {right}): crop the tile")
    if len(segments.cu_q) - 1 > _MOST_SEGMENTS:
        raise ValueError(f"backend 'fa2' takes up to {_MOST_SEGMENTS} segments a launch, got {len(segments.cu_q) - 1}")
    longest = max(segments.max_q, segments.max_kv)  # a side this long hides nothing in any segment
    max_k = longest + 1
    if left is None and right in (None, 0):
        left, right, max_k = -1, -1 if right is None else 0, segments.max_kv
    else:
        left, right = (-1 if side is None else min(side, longest) for side in (left, right))
    cu_q, cu_k = segments.device_cu_q, segments.device_cu_kv
    return Varlen(cu_q, cu_k, max(2, segments.max_q), max_k, left, right, options.scores)


def checked_lse(lse: torch.Tensor, q: torch.Tensor, whose: str) -> torch.Tensor:
    """The lse; a RuntimeError if its layout is not [h_q, n]."""
    wanted = (q.shape[1], q.shape[0])
    if lse.shape != wanted or lse.dtype != torch.float32:
        raise RuntimeError(
            f"{whose} returned an lse {lse.dtype} {list(lse.shape)}, not float32 {list(wanted)}: backend 'fa2' does "
            "not know this layout"
        )
    return lse


# ---- what both have in common
#
# Backend "fa2": the common part of PyTorch's built-in FlashAttention 2 and the flash-attn package.
#
# The facts above, about the kernels of both, have these consequences:
#
# - The deterministic backward's order of sums depends on the launch. So every segment gets a separate launch, and its
#   gradients do not depend on its neighbours. A plan updated in place cannot be deterministic: a captured graph would
#   keep the first batch's launches.
# - A plan updated in place otherwise works unchanged. Its grids have room for every segment to be the longest. Surplus
#   blocks return at once, which still takes time with room for many long segments.
# - Head dims are equal and multiples of 8; others are padded with zero columns (`dims`).
# - There is no gradient through lse; a second backward launch adds it (`with_lse_gradient`). That holds for all scores:
#   the slope of a score multiplies each of its gradients.


class Fa2Backend(Backend):
    """FlashAttention 2; float16 and bfloat16 on CUDA, head dims up to 256. A subclass provides the kernels.

    With `in_place`, for plans updated in place, it is not deterministic.
    """

    name: str = "fa2"
    origin: str  # The name of the kernels' package.
    own_features: frozenset[Feature] = frozenset()  # Features of this origin only.

    def __init__(self, *, in_place: bool = False) -> None:
        """The features follow."""
        plan = Feature.IN_PLACE if in_place else Feature.DETERMINISTIC
        self.features: frozenset[Feature] = FUSED_KERNELS | self.own_features | {plan}

    @abstractmethod
    def version(self) -> str:
        """The version of the package that contains the kernels, if installed."""

    @abstractmethod
    def launch_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen: Varlen
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [n, h_q, d], lse [h_q, n]) of aligned q [n, h_q, d], k, v [m, h_kv, d]; d a multiple of 8 up to 256."""

    @abstractmethod
    def launch_backward(self, operands: BackwardOperands, varlen: Varlen, *, deterministic: bool) -> Gradients:
        """The gradients of one launch, of aligned operands of one head dim, a contiguous lse and no dlse."""

    @torch.no_grad()
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: VarlenBatch, options: LaunchOptions
    ) -> Partial:
        """See `Backend.forward`; out has q's dtype."""
        check_scores(self, options)
        d, d_v = _dim(q, v), v.shape[2]
        q, k, v = (copied_if_unaligned(widen(x, d)) for x in (q, k, v))
        out, lse = self.launch_forward(q, k, v, varlen_arguments(segments, options))
        return Partial(trim(out, d_v), lse, None)

    @torch.no_grad()
    def backward(self, given: list[BackwardOperands], segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """See `Backend.backward`; the gradients have q's dtype, float32 where dlse is given."""
        check_scores(self, options)
        operands = given.pop()
        d_qk, d_v = operands.q.shape[2], operands.v.shape[2]
        d = _dim(operands.q, operands.v)
        dout, q, k, v, out = (copied_if_unaligned(widen(x, d)) for x in operands[:5])
        aligned = BackwardOperands(dout, q, k, v, out, operands.lse.contiguous(), None)
        gradients = self._each_segment if options.deterministic else self._all_segments
        launch = partial(gradients, segments=segments, options=options)
        dq, dk, dv = with_lse_gradient(launch, aligned, operands.dlse, d)
        return Gradients(trim(dq, d_qk), trim(dk, d_qk), trim(dv, d_v))

    def _all_segments(self, operands: BackwardOperands, segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """One launch."""
        return self.launch_backward(operands, varlen_arguments(segments, options), deterministic=False)

    def _each_segment(self, operands: BackwardOperands, segments: VarlenBatch, options: LaunchOptions) -> Gradients:
        """One launch per segment, so that its bits do not depend on the others."""
        if segments.updated_in_place:
            raise Unsupported(
                "a plan with max_sequences", {"backend 'fa2'": {Feature.DETERMINISTIC}}, "make a plan for each batch"
            )
        dout, q, k, v, out, lse, *_ = operands
        parts: list[Gradients] = []
        for s in range(len(segments.cu_q) - 1):
            rows, columns = slice(*segments.cu_q[s : s + 2]), slice(*segments.cu_kv[s : s + 2])
            lse_rows = lse[:, rows].contiguous()
            own = BackwardOperands(dout[rows], q[rows], k[columns], v[columns], out[rows], lse_rows, None)
            parts.append(self.launch_backward(own, varlen_arguments(segments.alone(s), options), deterministic=True))
        return Gradients(*(torch.cat(x) for x in zip(*parts, strict=True)))


def _dim(q: torch.Tensor, v: torch.Tensor) -> int:
    """The head dim to run with. Refuses what the features already exclude, rather than compute something else."""
    if max(q.shape[2], v.shape[2]) > 256:
        raise ValueError(f"backend 'fa2' needs head dims up to 256, got d_qk={q.shape[2]} and d_v={v.shape[2]}")
    return round_up(max(q.shape[2], v.shape[2]), 8)


# ---- PyTorch's kernels
#
# FlashAttention 2's kernels in CUDA builds of PyTorch.
#
# This file relies on these facts about `aten::_flash_attention_forward/_backward` (varlen form), and on those in
# the first section. All hold from PyTorch 2.11 on:
#
# - `deterministic` is read from the process-wide flag, and warn_only counts as off.
# - `torch.nn.attention.activate_flash_attention_impl` replaces these very operators by another library for the whole
#   process.


_flag_lock = Lock()


class BuiltIn(Fa2Backend):
    """Fa2 on PyTorch's built-in kernels."""

    origin: str = "PyTorch's built-in kernels"
    key_block = 128  # Blocks have 64 or 128 rows.
    bits_of = ("out", "lse", "dk", "dv")  # The sums of dq depend on how many heads are in the launch.

    def why_not(self) -> str | None:
        """None where this PyTorch has the kernels and the GPU runs them, else the reason."""
        reason = ampere_why_not()
        if reason is None and not torch.backends.cuda.is_flash_attention_available():
            return "this PyTorch was built without FlashAttention"
        return reason

    def version(self) -> str:
        """PyTorch's."""
        return torch.__version__

    def launch_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen: Varlen
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Fa2Backend.launch_forward`."""
        lengths = varlen.cu_q, varlen.cu_k, varlen.max_q, varlen.max_k
        how = _scale_and_window(varlen) | _forward_extras()
        out, lse = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, False, False, **how)[:2]
        return out, checked_lse(lse, q, f"aten::_flash_attention_forward of PyTorch {torch.__version__}")

    def launch_backward(self, operands: BackwardOperands, varlen: Varlen, *, deterministic: bool) -> Gradients:
        """See `Fa2Backend.launch_backward`."""
        lengths = varlen.cu_q, varlen.cu_k, varlen.max_q, varlen.max_k
        rng_state = torch.zeros(2, dtype=torch.uint64, device=operands.q.device)  # of dropout, which is off
        dropout = 0.0, False, rng_state, rng_state.new_empty(0)
        given = *operands[:6], *lengths, *dropout
        with _deterministic() if deterministic else nullcontext():
            dq, dk, dv = torch.ops.aten._flash_attention_backward(*given, **_scale_and_window(varlen))
        return Gradients(dq, dk, dv)


def _scale_and_window(varlen: Varlen) -> dict[str, Any]:
    """The keywords of both operators."""
    return {"scale": varlen.scores.scale, "window_size_left": varlen.left, "window_size_right": varlen.right}


@cache
def _forward_extras() -> dict[str, int]:
    """Arguments of some PyTorch versions only: num_splits=1 makes a segment's result independent of the others."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    return {"num_splits": 1} if any(a.name == "num_splits" for a in schema.arguments) else {}


@contextmanager
def _deterministic() -> Iterator[None]:
    """The process-wide deterministic flag, on while the backward is launched.

    The lock keeps two threads from restoring each other's value. Other threads that launch operators at the same time
    see the flag too: their results stay right, but an operator without a deterministic form would raise. A user who
    trains deterministically with several threads per process sets the flag for the whole run; then nothing changes
    here.
    """
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        yield
        return
    with _flag_lock:
        enabled = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


# ---- the package's kernels
#
# FlashAttention 2's kernels from the flash-attn package, which also support softcap.
#
# This file relies on these facts about `flash_attn.flash_attn_interface` 2.8.3 (varlen form), and on those above:
#
# - Softcap is a number, 0.0 for none, in both passes; the backward multiplies by its slope.
# - `deterministic` is an argument.
# - dq, dk and dv are written into tensors that are passed in; the call returns delta.
# - The raw lse is not padded, [h_q, n], and the backward reads it as contiguous without a check.
# - Its operators are PyTorch's custom operators, without gradients in this form.
# - flash-attn-4 installs a folder `flash_attn` too, with `flash_attn.cute` alone in it. Where both are installed they
#   share the folder.


_FROM, _BELOW = (2, 8, 3), (2, 9)  # the releases whose source was read; pyproject.toml says the same
_INTERFACE = "flash_attn.flash_attn_interface"


class Package(Fa2Backend):
    """Fa2 on the flash-attn package."""

    origin: str = "the flash-attn package"
    own_features: frozenset[Feature] = frozenset({Feature.SOFTCAP})

    def why_not(self) -> str | None:
        """None if the package is installed, its release is supported and the GPU runs it, else the reason."""
        return ampere_why_not() or self.broken() or (None if _found().library else "it is not installed")

    def broken(self) -> str | None:
        """Why the installed package does not work; None if it works or is not installed."""
        return _found().broken

    def version(self) -> str:
        """The package's."""
        return _version()

    def launch_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen: Varlen
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Fa2Backend.launch_forward`."""
        out, lse, *_ = _library()._flash_attn_varlen_forward(
            q,
            k,
            v,
            **_options(varlen),
            return_softmax=False,
        )
        return out, checked_lse(lse, q, f"flash-attn {_version()}")

    def launch_backward(self, operands: BackwardOperands, varlen: Varlen, *, deterministic: bool) -> Gradients:
        """See `Fa2Backend.launch_backward`."""
        made = Gradients(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in operands[1:4]))
        _library()._flash_attn_varlen_backward(
            *operands[:6],
            *made,
            **_options(varlen),
            deterministic=deterministic,
        )
        return made


def _options(varlen: Varlen) -> dict[str, Any]:
    """The options of both passes."""
    return {
        "cu_seqlens_q": varlen.cu_q,
        "cu_seqlens_k": varlen.cu_k,
        "max_seqlen_q": varlen.max_q,
        "max_seqlen_k": varlen.max_k,
        "dropout_p": 0.0,
        "softmax_scale": varlen.scores.scale,
        "causal": False,
        "window_size_left": varlen.left,
        "window_size_right": varlen.right,
        "softcap": varlen.scores.softcap,
        "alibi_slopes": None,
    }


class _Found(NamedTuple):
    """The result of importing the package: both None if it is not installed."""

    library: ModuleType | None = None
    broken: str | None = None


@cache
def _found() -> _Found:
    """The package, imported on first use: the import takes a while."""
    try:
        library = importlib.import_module(_INTERFACE)
    except Exception as error:  # a broken installation fails in many ways, such as an undefined symbol
        if isinstance(error, ModuleNotFoundError) and error.name in ("flash_attn", _INTERFACE):
            return _Found()  # also if flash-attn-4 is installed without this package
        return _Found(None, f"importing {_INTERFACE} failed: {type(error).__name__}: {error}")
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", _version())
    release = tuple(int(n) for n in numbers.groups()) if numbers else ()
    if not _FROM <= release < _BELOW:
        known = f"{'.'.join(map(str, _FROM))} and later, below {'.'.join(map(str, _BELOW))}"
        return _Found(None, f"it is release {_version()}, and this backend is written for {known}")
    return _Found(library)


def _library() -> ModuleType:
    """The interface of a package that works: the backend was chosen by `why_not`."""
    library = _found().library
    assert library is not None, _found().broken
    return library


def _version() -> str:
    """The version that the imported package states."""
    return str(getattr(sys.modules.get("flash_attn"), "__version__", "unknown"))


# ---- which of them is used


BUILT_IN, PACKAGE = BuiltIn(), Package()
_ALONE = describe(PACKAGE.features - BUILT_IN.features)  # what the package alone has


@cache
def installed() -> Fa2Backend:
    """The package's kernels if they work, else PyTorch's. Warns once if the package is broken.

    Builds and releases differ from the one whose source was read, so the package must first pass `probe` here.
    """
    reason = PACKAGE.why_not() or _wrong_here()
    if reason is None:
        return PACKAGE
    if BUILT_IN.why_not() is None and _broken() is not None:
        warnings.warn(
            f"the flash-attn package is installed, but backend 'fa2' does without it and its {_ALONE}: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return BUILT_IN


def origin_of(backend: Fa2Backend) -> str:
    """The origin of its kernels and, unless that is the package, the reason: for `doctor`."""
    origin = f"{backend.origin}, {backend.version()}"
    if backend is PACKAGE:
        return origin
    broken = _broken()
    return f"{origin}; no {_ALONE}: " + (
        f"the flash-attn package does not work: {broken}" if broken else "the flash-attn package is not installed"
    )


def _broken() -> str | None:
    """Why the installed package is not used; None if it is used or not installed."""
    found = PACKAGE.broken()
    return _wrong_here() if found is None and PACKAGE.why_not() is None else found


@cache
def _wrong_here() -> str | None:
    """The first error of the package's kernels on this GPU in a few launches. Call it only if they can be launched."""
    try:
        return probe(PACKAGE, "cuda")
    except Exception as error:  # A build without kernels for this GPU, or with another signature.
        return f"launching it failed: {type(error).__name__}: {error}"
