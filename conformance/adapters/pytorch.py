"""PyTorch's context parallelism: `scaled_dot_product_attention` inside
`torch.distributed.tensor.experimental.context_parallel`.

    suite                  PyTorch
    p2p, all_gather        set_rotate_method("alltoall"), ("allgather")
    dual_chunk             load balancing, the default
    contiguous             `_cp_options.enable_load_balance = False`, which its tests and many users set
    bshd [b, s, h, d]      [b, h, s, d] by views

Objects: `flash`, `efficient`, `cudnn`, the kernels it has rings of (`torch.nn.attention.sdpa_kernel`), and the module
itself, where PyTorch chooses. On the CPU it has no ring: what it does there is up to it
(docs/conformance/findings.md).

The forward and the backward pass each run inside `context_parallel`, as its tutorial says they must; between them an
autograd.Function keeps PyTorch's own graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from conformance.adapters.peers import Peer, SupportTable, Unsupported, library

__all__ = ["Unsupported", "attention", "chosen", "cudnn", "efficient", "flash", "group_kind", "supports"]

_cp = library("torch.distributed.tensor.experimental._attention", "PyTorch 2.11 or later, with torch.distributed")

_SUPPORTED = SupportTable(
    f"PyTorch {torch.__version__}",
    {
        "cp_comm_type": ("p2p", "all_gather"),
        "layout": ("contiguous", "dual_chunk"),
        "attn_mask_type": ("causal", "no_mask"),
        "dtype": ("bfloat16", "float16", "float32"),
        "heads": ("equal", "grouped"),
        "dims": ("equal", "unequal"),
        "head_dim": ("multiple of 8", "odd"),
        "lengths": ("self", "cross"),
        "device": ("cuda",),
    },
    {
        "device": "the CPU's flash attention has no sharding strategy (NotImplementedError)",
        "qkv_format": "its tensors are [b, h, s, d]",
        "attn_mask_type": "no attn_mask, and is_causal",
        "window": "scaled_dot_product_attention has no window",
        "return_lse": "scaled_dot_product_attention returns the output alone",
        "deterministic": "a switch of the whole process",
        "softmax_type": "no argument",
    },
    (
        ({"layout": "dual_chunk", "attn_mask_type": "no_mask"}, "RuntimeError: Load balancing requires is_causal=True"),
        (
            {"attn_mask_type": "causal", "lengths": "cross"},
            "NotImplementedError: is_causal requires the same query and context sequence lengths",
        ),
    ),
)
# outside each of these, PyTorch raises "No available kernel"
_FLASH = _SUPPORTED.having(dtype=("bfloat16", "float16"), dims=("equal",))
_EFFICIENT = _SUPPORTED.having(heads=("equal",), head_dim=("multiple of 8",))
_CUDNN = _SUPPORTED.having(dtype=("bfloat16", "float16"), head_dim=("multiple of 8",))


class PyTorch(Peer):
    """With one kernel, or with PyTorch's choice."""

    def __init__(self, supported: SupportTable, kernel: SDPBackend | None = None) -> None:
        self.supported, self._kernel = supported, kernel

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: Any, options: dict[str, Any]) -> torch.Tensor:
        """out."""
        causal = "causal" in options.get("attn_mask_type", "causal")
        inside = partial(self._inside, cp, q.shape[1], q.device)
        grouped = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
        scale = options.get("softmax_scale")
        function = partial(_attend, is_causal=causal, scale=scale, **grouped)
        try:
            return _Passes.apply(q, k, v, function, inside)
        except RuntimeError as error:
            if "No available kernel" in str(error):  # PyTorch's text for features that the chosen kernel lacks
                raise Unsupported(f"{self.supported.library}: {error}") from error
            raise

    @contextmanager
    def _inside(self, cp: Any, local: int, device: torch.device) -> Iterator[None]:
        mesh = _mesh(cp.group, device.type)
        _cp.set_rotate_method({"p2p": "alltoall", "all_gather": "allgather"}[cp.cp_comm_type])
        _cp._cp_options.enable_load_balance = cp.layout == "dual_chunk"
        positions = torch.arange(local * dist.get_world_size(cp.group), device=device)  # it needs a buffer to shard
        kernel = nullcontext() if self._kernel is None else sdpa_kernel(self._kernel)
        with kernel, _cp.context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
            yield


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    # looked up by name inside: `context_parallel` replaces the function in its module
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


class _Passes(torch.autograd.Function):
    """Run both the forward and the backward pass of a function inside a context."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: Any, inside: Any) -> Any:
        needed = ctx.needs_input_grad[:3]
        ctx.leaves = [x.detach().requires_grad_(n) for x, n in zip((q, k, v), needed, strict=True)]
        ctx.inside = inside
        with torch.enable_grad(), inside():
            ctx.out = function(*ctx.leaves)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        wanted = [x for x in ctx.leaves if x.requires_grad]
        with torch.enable_grad(), ctx.inside():
            found = iter(torch.autograd.grad(ctx.out, wanted, grads[0]))
        return (*(next(found) if x.requires_grad else None for x in ctx.leaves), None, None)


@cache
def _mesh(group: Any, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)


flash = PyTorch(_FLASH, SDPBackend.FLASH_ATTENTION)
efficient = PyTorch(_EFFICIENT, SDPBackend.EFFICIENT_ATTENTION)
cudnn = PyTorch(_CUDNN, SDPBackend.CUDNN_ATTENTION)
chosen = PyTorch(_SUPPORTED)
attention, supports = chosen.attention, chosen.supports
group_kind = PyTorch.group_kind
