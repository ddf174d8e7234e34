"""A transformer layer of Megatron-LM with context parallelism, without TransformerEngine:

    torchrun --nproc-per-node 2 examples/megatron_layer.py
    torchrun --nproc-per-node 4 examples/megatron_layer.py --cp-comm-type all_gather

The layer is that of Megatron's local specification; the lines with a number are what is changed. A packed batch goes
through it twice, spread over all ranks and on each rank whole, forward and backward, and the two are compared. Needs
megatron-core; on a CPU over gloo, on GPUs over NCCL.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")  # of what megatron-core would rather have installed

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

import cp_fast as cp  # noqa: E402
from conformance.runner.processes import device_of_group, own_gpu  # noqa: E402
from cp_fast.integrations.megatron import use_cp_fast  # noqa: E402  # 1

WIDTH, HEADS = 256, 8


def layer_of(cp_comm_type: str, ranks: int, device: torch.device) -> Any:
    """The first layer of a GPT, the same weights on every rank; in bfloat16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=HEADS // 2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        use_cpu_initialization=True,
        context_parallel_size=ranks,
        cp_comm_type=cp_comm_type,
        params_dtype=dtype,
    )
    torch.manual_seed(0)
    spec: Any = use_cp_fast(get_gpt_layer_local_spec())  # 2
    return TransformerLayer(config, spec.submodules, layer_number=1).to(device, dtype)


def build(context: cp.ContextParallel | None) -> tuple[Any, Any]:
    """One step of the layer for `python -m conformance step`: gradients are summed as Megatron's DDP does."""
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    device = device_of_group()
    layer = layer_of(context.cp_comm_type if context else "p2p", ranks, device)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        lengths = batch["cu_seqlens"]
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        packed = PackedSeqParams("thd", **dict.fromkeys(names, lengths))
        x, dy = (batch[name].to(device, next(layer.parameters()).dtype) for name in ("x", "dy"))
        if context:
            x, dy = (cp.shard(z, cp=context, qkv_format="thd", cu_seqlens_padded=lengths) for z in (x, dy))
        loss = (layer(x, attention_mask=None, packed_seq_params=packed)[0] * dy).sum()
        loss.backward()
        for weight in layer.parameters():
            dist.all_reduce(weight.grad)
        dist.all_reduce(loss := loss.detach())
        return loss

    return layer, step


def batch() -> dict[str, torch.Tensor]:
    """Two documents."""
    chance = torch.Generator().manual_seed(1)
    batch = {name: torch.randn(48, 1, WIDTH, generator=chance) for name in ("x", "dy")}
    return batch | {"cu_seqlens": torch.tensor([0, 16, 48], dtype=torch.int32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cp-comm-type", default="p2p", choices=["p2p", "all_gather", "a2a"])
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    if gpu:
        own_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    ranks, device = dist.get_world_size(), device_of_group()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    layer = layer_of(given.cp_comm_type, ranks, device)
    dtype = next(layer.parameters()).dtype

    # three documents; each length divides by 2 * ranks, and the lengths are global
    unit = given.tokens // 8 // (2 * ranks) * 2 * ranks
    cu_seqlens = torch.tensor([0, 1, 3, 8], dtype=torch.int32) * unit
    batch = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    batch |= {"cu_seqlens_q_padded": cu_seqlens, "cu_seqlens_kv_padded": cu_seqlens}
    spread, whole = PackedSeqParams("thd", **batch), PackedSeqParams("thd", **batch, local_cp_size=1)  # not spread
    torch.manual_seed(1)
    x, dy = (torch.randn(8 * unit, 1, WIDTH).to(device, dtype) for _ in range(2))

    def run(packed: Any, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        x = x.requires_grad_()
        out = layer(x, attention_mask=None, packed_seq_params=packed)[0]
        gradients = torch.autograd.grad(out, [x, *layer.parameters()], dy)
        return [out.detach(), *gradients]

    cut: dict[str, Any] = {
        "cp": cp.ContextParallel(parallel_state.get_context_parallel_group()),
        "qkv_format": "thd",
        "cu_seqlens_padded": cu_seqlens,
    }
    out, dx, *weights = run(spread, cp.shard(x, **cut), cp.shard(dy, **cut))
    for gradient in weights:  # data and context parallel ranks sum gradients, as Megatron's DDP does
        dist.all_reduce(gradient)
    found = [cp.unshard(out, **cut), cp.unshard(dx, **cut), *weights]
    expected = run(whole, x, dy)
    apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))
    if dist.get_rank() == 0:
        print(f"{ranks} ranks and one: out and {len(found) - 1} gradients at most {apart:.1e} apart (relative)")
    assert apart < (5e-2 if gpu else 1e-4), "they differ by more than rounding"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
