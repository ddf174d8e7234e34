"""Models of transformers and a layer of Megatron on one GPU in bfloat16, all ranks over the simulated group.

Their errors against float32 are little more than those of the same model on one rank with eager attention.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cp_fast
from cp_fast.integrations import transformers as ours
from cp_ref import SimGroup, dense_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE, NARROW = "cuda", torch.bfloat16
Grads = dict[str, torch.Tensor]
EVERY_EXPERT = {"gpt-oss": {"num_experts_per_tok": 4}}  # which are chosen would hang on the last bit


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, of the whole tensor."""
    return ((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-6)).item()


def not_worse(found: Grads, plain: Grads, exact: Grads) -> None:
    """What ranks computed is as near to `exact` as what one rank did in the same dtype, or nearly so."""
    assert found.keys() == plain.keys() == exact.keys()
    for name, x in exact.items():
        mine, theirs = error(found[name], x), error(plain[name], x)
        assert mine <= 1.5 * theirs + 0.01, (name, mine, theirs)


def added_up(parts: list[Grads]) -> Grads:
    return {name: torch.stack([part[name].float() for part in parts]).sum(0) for name in parts[0]}


class TestTransformers:
    @pytest.mark.parametrize("name", ["Gemma 2", "gpt-oss", "Llama", "Qwen3"])
    def test_a_model_is_the_same_over_ranks(self, name: str) -> None:
        """All batches in one test, as they share the compiled kernels."""
        for kind in ("packed", "padded", "full"):
            self.compare(name, kind, "p2p", 2)

    @pytest.mark.parametrize(("comm", "size"), [("all_gather", 4), ("a2a", 4), ("a2a+p2p", 4)])
    def test_every_schedule(self, comm: str, size: int) -> None:
        self.compare("gpt-oss", "packed", comm, size)

    @staticmethod
    def compare(name: str, kind: str, comm: Any, size: int) -> None:
        pytest.importorskip("transformers", reason="needs transformers: pip install '.[test-integrations]'")
        from tests.integrations.hugging_face.test_transformers import batches, model_of, on_one_rank

        batch = {key: x.to(DEVICE) for key, x in batches()[kind].items()}
        start = model_of(name, hidden_size=128, head_dim=64, **EVERY_EXPERT.get(name, {}))
        for weight in start.parameters():
            torch.nn.init.normal_(weight, std=0.05)
        start = start.to(DEVICE, NARROW)
        exact = on_one_rank(copy.deepcopy(start).float(), batch)
        plain = on_one_rank(copy.deepcopy(start), batch)

        def one(member: Any) -> Grads:
            cp = cp_fast.ContextParallel(member.split(2) if comm == "a2a+p2p" else member, comm)
            model = ours.prepare(copy.deepcopy(start), cp)
            loss = model(**ours.shard_batch(batch, cp=cp)).loss
            loss.backward()
            grads = {n: w.grad for n, w in model.named_parameters() if w.grad is not None}
            return {"loss": loss.detach(), **grads}

        found = added_up(SimGroup(size).run(one))
        not_worse(found, {"loss": plain[0], **plain[1]}, {"loss": exact[0], **exact[1]})


class Eager(torch.nn.Module):
    """A core attention of one rank, by the definition: rounded to the inputs' dtype at the end."""

    def __init__(self, config: Any, lengths: dict[str, Any], window: tuple[int, int], offset: Any) -> None:
        super().__init__()
        self.lengths, self.window, self.softmax_offset = lengths, window, offset
        self.kind = config.softmax_type

    def forward(self, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> torch.Tensor:
        sinks = {} if self.softmax_offset is None else {"softmax_offset": self.softmax_offset}
        how: dict[str, Any] = {"softmax_type": self.kind, "window_size": self.window, **sinks, **self.lengths}
        return dense_attention(q, k, v, **how)[0].to(q.dtype).flatten(-2)


CU = torch.tensor([0, 130, 200, 400], dtype=torch.int32)
PADDED = torch.tensor([0, 144, 224, 432], dtype=torch.int32)
MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (50, 0)},
    "sinks": {"softmax_type": "learnable"},
}


@pytest.fixture(scope="module")
def megatron() -> Iterator[Any]:
    """One process is all of Megatron's groups."""
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install '.[test-integrations]'")
    from megatron.core import parallel_state

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield parallel_state
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class TestMegatron:
    @staticmethod
    def layer_of(dtype: torch.dtype, **more: Any) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig
        from megatron.core.transformer.transformer_layer import TransformerLayer

        from cp_fast.integrations.megatron import use_cp_fast

        config = TransformerConfig(
            num_layers=1,
            hidden_size=256,
            num_attention_heads=4,
            num_query_groups=2,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            bias_dropout_fusion=False,
            use_cpu_initialization=True,
            params_dtype=dtype,
            **more,
        )
        spec: Any = use_cp_fast(get_gpt_layer_local_spec())
        layer = TransformerLayer(config, spec.submodules, layer_number=1)
        generator = torch.Generator().manual_seed(0)
        for weight in layer.parameters():
            weight.data = (torch.randn(weight.shape, generator=generator) * 0.1).to(NARROW)  # the same in every dtype
        return layer.to(DEVICE, dtype)

    @pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
    @pytest.mark.parametrize(("comm", "size"), [("p2p", 2), ("all_gather", 4), ("a2a", 2), ("a2a+p2p", 4)])
    @pytest.mark.parametrize("more", MORE.values(), ids=MORE.keys())
    def test_a_layer_is_the_same_over_ranks(
        self, megatron: Any, comm: Any, size: int, packed: bool, more: dict[str, Any]
    ) -> None:
        from megatron.core.packed_seq_params import PackedSeqParams

        generator = torch.Generator().manual_seed(1)
        shape = (432, 1, 256) if packed else (192, 2, 256)
        x, dy = (torch.randn(shape, generator=generator).to(DEVICE, NARROW) for _ in range(2))
        real = torch.ones(shape[0], dtype=torch.bool)
        if packed:
            slots, lengths = PADDED.diff().tolist(), CU.diff().tolist()
            real = torch.cat([torch.arange(s) < n for s, n in zip(slots, lengths, strict=True)])
            dy[~real.to(DEVICE)] = 0
        params = PackedSeqParams("thd", CU, CU, PADDED, PADDED, 200, 200) if packed else None
        cut: dict[str, Any] = {"qkv_format": "sbhd"}
        if packed:
            cut = {"qkv_format": "thd", "cu_seqlens_padded": PADDED}

        def passed(layer: Any, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Grads]:
            x = x.detach().requires_grad_()
            out = layer(x, attention_mask=None, packed_seq_params=params)[0]
            out.backward(dy)
            assert x.grad is not None
            return out.detach(), x.grad, {n: w.grad for n, w in layer.named_parameters() if w.grad is not None}

        def whole(dtype: torch.dtype) -> Grads:
            layer = self.layer_of(dtype, **more)
            core = layer.self_attention.core_attention
            batch = {"qkv_format": "sbhd"}
            batch |= {"qkv_format": "thd", "cu_seqlens_q": CU, "cu_seqlens_q_padded": PADDED} if packed else {}
            layer.self_attention.core_attention = Eager(layer.config, batch, core.window_size, core.softmax_offset)
            out, dx, grads = passed(layer, x.to(dtype), dy.to(dtype))
            return {"out": out[real], "dx": dx[real], **grads}

        layers = [self.layer_of(NARROW, **more) for _ in range(size)]

        def one(member: Any) -> tuple[Grads, Grads]:
            layer, core = layers[member.rank], layers[member.rank].self_attention.core_attention
            levels = member.split(2) if comm == "a2a+p2p" else None
            core.groups = SimpleNamespace(cp=member, tp=core.groups.tp, hcp=levels)
            core.cp_comm_type = comm
            cp = cp_fast.ContextParallel(levels or member, comm)
            out, dx, grads = passed(layer, cp_fast.shard(x, cp=cp, **cut), cp_fast.shard(dy, cp=cp, **cut))
            together = {"out": out, "dx": dx}
            return {n: cp_fast.unshard(y, cp=cp, **cut)[real] for n, y in together.items()}, grads

        parts = SimGroup(size).run(one)
        found = parts[0][0] | added_up([grads for _, grads in parts])
        not_worse(found, whole(NARROW), whole(torch.float32))
