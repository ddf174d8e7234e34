"""FlashAttention 2's kernels from the flash-attn package, which also support softcap.

This file relies on these facts about `flash_attn.flash_attn_interface` 2.8.3 (varlen form), and on those in `varlen`:

- Softcap is a number, 0.0 for none, in both passes; the backward multiplies by its slope.
- `deterministic` is an argument.
- dq, dk and dv are written into tensors that are passed in; the call returns delta.
- The raw lse is not padded, [h_q, n], and the backward reads it as contiguous without a check.
- Its operators are PyTorch's custom operators, without gradients in this form.
- flash-attn-4 installs a folder `flash_attn` too, with `flash_attn.cute` alone in it. Where both are installed they
  share the folder.
"""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from cp_fast.backends.backend_protocol import BackwardOperands, Gradients
from cp_fast.backends.fa2.fa2_backend import Fa2Backend
from cp_fast.backends.fa2.fa2_varlen import Varlen, checked_lse, gpu_why_not
from cp_ref.spec import Feature

__all__ = ["Package"]

_FROM, _BELOW = (2, 8, 3), (2, 9)  # the releases whose source was read; pyproject.toml says the same
_INTERFACE = "flash_attn.flash_attn_interface"


class Package(Fa2Backend):
    """Fa2 on the flash-attn package."""

    origin: str = "the flash-attn package"
    own_features: frozenset[Feature] = frozenset({Feature.SOFTCAP})

    def why_not(self) -> str | None:
        """None if the package is installed, its release is supported and the GPU runs it, else the reason."""
        return gpu_why_not() or self.broken() or (None if _found().library else "it is not installed")

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
