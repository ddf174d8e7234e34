"""PyTorch's `context_parallel` called as its documentation does, without the suite: gradients by kernel and dtype.

    torchrun --nproc-per-node 2 benchmarks/checks/pytorch_by_hand.py

Two ranks, causal, 2 x 256 tokens, 2 heads of 64; errors against float64 on one GPU. See docs/conformance/findings.md.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import _context_parallel, context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

CASES = (
    (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16, True),
    (SDPBackend.EFFICIENT_ATTENTION, torch.float16, True),
    (SDPBackend.EFFICIENT_ATTENTION, torch.float32, True),
    (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16, False),
    (SDPBackend.FLASH_ATTENTION, torch.bfloat16, True),
)


def errors(mesh: DeviceMesh, kernel: SDPBackend, dtype: torch.dtype, balanced: bool, seed: int) -> str:
    """The largest errors of this rank's dq, dk and dv."""
    torch.manual_seed(seed)
    q, k, v, dout = (torch.randn(2, 2, 256, 64, device="cuda").to(dtype) for _ in range(4))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    whole = F.scaled_dot_product_attention(exact[0], exact[1], exact[2], is_causal=True)
    wanted = torch.autograd.grad(whole, exact, dout.double())
    _context_parallel._cp_options.enable_load_balance = balanced
    buffers = [x.detach().contiguous() for x in (q, k, v, dout, *wanted)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)):  # which cuts them in place
        *inputs, dout, dq, dk, dv = (x.clone() for x in buffers)
        leaves = [x.requires_grad_() for x in inputs]
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
            got = torch.autograd.grad(out, leaves, dout)
        pairs = zip(("dq", "dk", "dv"), got, (dq, dk, dv), strict=True)
        return ", ".join(f"{name} {(a.double() - b).abs().max().item():.3g}" for name, a, b in pairs)


def main() -> None:
    """Every case with three seeds."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (2,))
    for kernel, dtype, balanced in CASES:
        for seed in range(3):
            found = errors(mesh, kernel, dtype, balanced, seed)
            print(f"{kernel.name} {dtype} balanced={balanced} seed {seed} rank {rank}: {found}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
