"""A transformer layer of megatron-core over gloo: over ranks as on one with the oracle, forward and backward."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cp_ref import dense_attention
from tests.dist.workers import Processes

pytestmark = pytest.mark.thorough

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install '.[test-integrations]'")

CU = torch.tensor([0, 13, 20, 40], dtype=torch.int32)
PADDED = torch.tensor([0, 16, 24, 48], dtype=torch.int32)


class Oracle(torch.nn.Module):
    """A core attention of one rank that has everything."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.window_size = config.window_size or (-1, -1)
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(config.num_attention_heads, dtype=torch.float64))

    def forward(self, q: Any, k: Any, v: Any, _: Any, attn_mask_type: Any = None, **more: Any) -> torch.Tensor:
        packed = more.get("packed_seq_params")
        one_row = packed is not None and q.ndim == 4  # [t, 1, h, d]
        q, k, v = (x.squeeze(1) if one_row else x for x in (q, k, v))
        lengths: dict[str, Any] = {} if packed is None else {"cu_seqlens_q": CU, "cu_seqlens_q_padded": PADDED}
        how: dict[str, Any] = {
            "qkv_format": "sbhd" if packed is None else "thd",
            "softmax_type": self.config.softmax_type,
        }
        sink: dict[str, Any] = {"softmax_offset": self.softmax_offset} if self.softmax_offset is not None else {}
        out = dense_attention(q, k, v, window_size=self.window_size, **how, **sink, **lengths)[0].flatten(-2)
        return out[:, None] if one_row else out


def layer_of(comm: str, size: int, core: Any, **more: Any) -> Any:
    """A TransformerLayer of Megatron's local specification with another core attention."""
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=size, hierarchical_context_parallel_sizes=[2, 2])
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=True,
        bias_dropout_fusion=False,
        context_parallel_size=size,
        cp_comm_type=comm,
        params_dtype=torch.float64,
        **more,
    )
    spec: Any = get_gpt_layer_local_spec()
    if isinstance(core, type):
        spec.submodules.self_attention.submodules.core_attention = core
    else:
        spec = core(spec)
    layer = TransformerLayer(config, spec.submodules, layer_number=1).double()
    torch.manual_seed(0)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return layer


def run(layer: Any, x: torch.Tensor, packed: Any) -> torch.Tensor:
    return layer(x, attention_mask=None, packed_seq_params=packed)[0]


def over_ranks(comm: str, packed: bool, more: dict[str, Any]) -> str:
    """What differs between this rank's part and the one rank's; "" if nothing does."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.utils import get_batch_on_this_cp_rank

    import cp_fast
    from cp_fast.integrations.megatron import CoreAttention

    size = dist.get_world_size()
    ours, alone = layer_of(comm, size, CoreAttention, **more), layer_of(comm, size, Oracle, **more)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((48, 1, 32) if packed else (16, 2, 32), generator=generator, dtype=torch.float64)
    dy = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    params = None
    cp = cp_fast.ContextParallel(parallel_state.get_context_parallel_group())
    if packed:
        params = PackedSeqParams("thd", CU, CU, PADDED, PADDED, 20, 20)
        dy[:, 0] *= torch.cat([(torch.arange(n) < r) for n, r in ((16, 13), (8, 7), (24, 20))])[:, None]
        local, dlocal = (cp_fast.shard(z, cp=cp, qkv_format="thd", cu_seqlens_padded=PADDED) for z in (x, dy))
    else:  # Megatron cuts [b, s, ...]
        batch = get_batch_on_this_cp_rank({"x": x.transpose(0, 1), "dy": dy.transpose(0, 1)})
        local, dlocal = (batch[name].transpose(0, 1).contiguous() for name in ("x", "dy"))
    whole, local = x.requires_grad_(), local.detach().requires_grad_()
    expected, found = run(alone, whole, params), run(ours, local, params)
    found.backward(dlocal)
    expected.backward(dy)
    wrong = []
    how: dict[str, Any] = {
        "cp": cp,
        "qkv_format": "thd" if packed else "sbhd",
        "cu_seqlens_padded": PADDED if packed else None,
    }
    real = torch.ones(len(x), dtype=torch.bool)
    if packed:
        real = torch.cat([(torch.arange(n) < r) for n, r in ((16, 13), (8, 7), (24, 20))])
    assert local.grad is not None
    assert whole.grad is not None
    for name, mine, want in (("out", found, expected), ("dx", local.grad, whole.grad)):
        if not torch.allclose(cp_fast.unshard(mine.detach(), **how)[real], want[real], rtol=1e-9, atol=1e-9):
            wrong.append(name)
    for (name, mine), want in zip(ours.named_parameters(), alone.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        if not torch.allclose(mine.grad, want.grad, rtol=1e-9, atol=1e-9):
            wrong.append(name)
    attention = next(module for module in ours.modules() if isinstance(module, CoreAttention))
    kept = attention._context(params).agreements.fingerprints
    run(ours, local, params)  # another layer of the batch: no other plan
    return ", ".join(wrong) + ("" if kept and attention._context(params).agreements.fingerprints == kept else " plans")


MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (5, 0)},
    "sinks": {"softmax_type": "learnable"},
    "max_logit": {"deterministic_mode": True, "log_max_attention_logit": True},
}


@pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("more", MORE.values(), ids=MORE.keys())
def test_a_layer_is_the_same_over_ranks(four: Processes, comm: str, packed: bool, more: dict[str, Any]) -> None:
    assert four.run(over_ranks, comm, packed, more) == [""] * 4


def balanced_over_ranks(comm: str, exact: bool, more: dict[str, Any]) -> str:
    """The same in layout "balanced", with a rotary embedding of positions, or of all rows of the batch."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    import cp_fast
    from cp_fast.integrations.megatron import get_batch_on_this_cp_rank, use_cp_fast

    size = dist.get_world_size()
    ours, alone = layer_of(comm, size, use_cp_fast, **more), layer_of(comm, size, Oracle, **more)
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(1, 48, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    real = torch.cat([(torch.arange(n) < r) for n, r in ((16, 13), (8, 7), (24, 20))])
    dy[0] *= real[:, None]
    positions = torch.cat([*map(torch.arange, PADDED.diff().tolist())])
    embedding = torch.randn(24, 1, 1, 8, generator=generator, dtype=torch.float64)
    of_rows = embedding[positions]
    params = PackedSeqParams("thd", CU, CU, PADDED, PADDED, 24, 24)
    batch = {"x": x, "dy": dy, "loss_mask": None, "position_ids": positions[None]}
    local, laid = get_batch_on_this_cp_rank(batch, params)
    assert local["loss_mask"] is None
    assert torch.equal(local["position_ids"][0], laid.position_ids)
    mine = local["x"].transpose(0, 1).contiguous().requires_grad_()
    found = ours(mine, attention_mask=None, packed_seq_params=laid, rotary_pos_emb=of_rows if exact else embedding)[0]
    found.backward(local["dy"].transpose(0, 1))
    whole = x.transpose(0, 1).contiguous().requires_grad_()
    rows = PackedSeqParams("sbhd", CU, CU, PADDED, PADDED)
    expected = alone(whole, attention_mask=None, packed_seq_params=rows, rotary_pos_emb=of_rows)[0]
    expected.backward(dy.transpose(0, 1))
    cp: Any = cp_fast.ContextParallel(parallel_state.get_context_parallel_group(), layout="balanced")
    wrong = []
    for name, part, want in (("out", found, expected), ("dx", mine.grad, whole.grad)):
        assert part is not None
        assert want is not None
        if not torch.allclose(cp_fast.unshard(part.detach(), cp=cp, plan=laid.table)[real], want[real], atol=1e-9):
            wrong.append(name)
    for (name, weight), want in zip(ours.named_parameters(), alone.parameters(), strict=True):
        dist.all_reduce(weight.grad)
        if not torch.allclose(weight.grad, want.grad, rtol=1e-9, atol=1e-9):
            wrong.append(name)
    return ", ".join(wrong)


@pytest.mark.parametrize("exact", [False, True], ids=["positions", "rows"])
@pytest.mark.parametrize(
    ("comm", "more"), [("p2p", "plain"), ("all_gather", "window"), ("a2a", "sinks"), ("a2a+p2p", "max_logit")]
)
def test_balanced_documents_are_the_same_over_ranks(four: Processes, comm: str, more: str, exact: bool) -> None:
    assert four.run(balanced_over_ranks, comm, exact, MORE[more]) == [""] * 4


def balanced_refused() -> list[str]:
    """What one rank alone gives, or has in its model."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from cp_fast.integrations.megatron import CoreAttention, get_batch_on_this_cp_rank, use_cp_fast

    attention: Any = layer_of("p2p", 4, use_cp_fast).self_attention  # makes the groups too
    params, tokens, said = PackedSeqParams("thd", CU, CU, PADDED, PADDED, 24, 24), torch.zeros(1, 48), []
    wrong: list[tuple[dict[str, Any], Any]] = [
        ({"tokens": tokens[:, 1:]}, params),
        ({"tokens": tokens}, PackedSeqParams("sbhd")),
        ({"tokens": tokens}, PackedSeqParams("thd", CU, CU, PADDED, CU)),
        ({"tokens": tokens[:, :46]}, PackedSeqParams("thd", torch.tensor([0, 46], dtype=torch.int32))),
    ]
    for given in wrong:
        with pytest.raises(ValueError, match=r".") as caught:
            get_batch_on_this_cp_rank(*(given if dist.get_rank() == 1 else ({"tokens": tokens}, params)))
        said.append(str(caught.value))
    laid, x = get_batch_on_this_cp_rank({"tokens": tokens}, params)[1], torch.zeros(12, 1, 32, dtype=torch.float64)
    for core, emb, error in ((CoreAttention, 24, ValueError), (use_cp_fast, 9, ValueError)):
        layer, emb = layer_of("p2p", 4, core), torch.zeros(emb, 1, 1, 8, dtype=torch.float64)
        with pytest.raises(error, match=r".") as caught:
            layer(x, attention_mask=None, packed_seq_params=laid, rotary_pos_emb=None if core is CoreAttention else emb)
        said.append(str(caught.value))
    for name, value in (("inference_context", "some"), ("mrope_section", [2, 1, 1]), ("mtp_num_layers", 1)):
        setattr(attention.config, name, value)
        given = {name: value} if name == "inference_context" else {}
        with pytest.raises(NotImplementedError) as caught:
            attention(x, None, packed_seq_params=laid, **given)
        said.append(str(caught.value))
    return said


def test_what_balanced_documents_need_is_named(four: Processes) -> None:
    said = four.run(balanced_refused)
    starts = [
        "batch['tokens'] has shape [1, 47]; it must be [1, 48, ...]",
        "packed_seq_params has qkv_format 'sbhd'",
        "packed_seq_params has other lengths for keys",
        "packed_seq_params ends at 46 tokens; they must divide by cp_size = 4",
        "packed_seq_params has layout 'balanced', and this layer's self attention",
        "rotary_pos_emb has 9 positions, but a document has 24 tokens",
        "inference_context is 'some', which layout 'balanced' does not support",
        "mrope_section is [2, 1, 1], which layout 'balanced' does not support",
        "mtp_num_layers is 1, which layout 'balanced' does not support",
    ]
    for mine, others, start in zip(said[1], said[0], starts, strict=True):
        assert mine.startswith(start)
        assert start in others


def refused() -> list[str]:
    """What the core attention says of what it cannot honour."""
    from types import SimpleNamespace

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from cp_fast.integrations.megatron import CoreAttention

    layer = layer_of("p2p", dist.get_world_size(), CoreAttention)
    core, q = layer.self_attention.core_attention, torch.zeros(8, 2, 4, 8, dtype=torch.float64)
    said = []
    for odd in (
        {"attention_bias": torch.zeros(1, 4, 8, 8)},
        {"attn_mask_type": AttnMaskType.arbitrary},
        {"attn_mask_type": AttnMaskType.padding},
    ):
        with pytest.raises(NotImplementedError) as caught:
            core(q, q[:, :, :2], q[:, :, :2], None, **odd)
        said.append(str(caught.value).partition(",")[0])
    config = SimpleNamespace(attention_dropout=0.1)
    with pytest.raises(NotImplementedError, match=r"attention_dropout=0\.0 in the TransformerConfig") as caught:
        CoreAttention(config, 1, AttnMaskType.causal, "self")
    said.append(str(caught.value).partition(",")[0])
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):  # sizes and p2p are right
        with pytest.raises(NotImplementedError, match=f"{name} is True, which CoreAttention does not support"):
            CoreAttention(SimpleNamespace(**vars(layer.config) | {name: True}), 1, AttnMaskType.causal, "self")
    switched_off = SimpleNamespace(**vars(layer.config) | {"context_parallel_size": 1})  # TransformerEngine looks at it
    with pytest.raises(ValueError, match="context_parallel_size is 1, but the context parallel group has 4 ranks"):
        CoreAttention(switched_off, 1, AttnMaskType.causal, "self")
    core.cp_comm_type = "a2a+p2p"
    core.groups = SimpleNamespace(cp=core.groups.cp)
    other = PackedSeqParams("sbhd", cp_group=core.groups.cp)
    with pytest.raises(ValueError, match="hierarchical_context_parallel_sizes"):
        core(q, q[:, :, :2], q[:, :, :2], None, packed_seq_params=other)
    alone = PackedSeqParams("sbhd", local_cp_size=1)  # this batch is not spread
    assert core(q, q[:, :, :2], q[:, :, :2], None, packed_seq_params=alone).shape == (8, 2, 32)

    return said


def test_what_cannot_be_honoured_is_named(four: Processes) -> None:
    expected = ["attention_bias is a tensor [1", "attn_mask_type is 'arbitrary'", "attn_mask_type is 'padding'"]
    assert four.run(refused) == [[*expected, "attention_dropout is 0.1"]] * 4


def batches_refused() -> dict[str, tuple[str, str]]:
    """Of batches that one rank alone has: what it says, and what the others say; then all have right ones."""
    from dataclasses import replace

    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    from cp_fast.integrations.megatron import CoreAttention, get_batch_on_this_cp_rank

    layer = layer_of("p2p", 4, CoreAttention)
    group, said = parallel_state.get_context_parallel_group(), {}
    x = torch.zeros(12, 1, 32, dtype=torch.float64)
    good = PackedSeqParams("thd", CU, CU, PADDED, PADDED, 24, 24)
    short, whole = torch.tensor([0, 16, 24, 40], dtype=torch.int32), {"tokens": torch.zeros(1, 48)}
    alone = torch.ones(12, 48, dtype=torch.bool)
    wrong: dict[str, tuple[dict[str, Any], Any]] = {
        "size": ({}, replace(good, local_cp_size=4)),
        "another size": ({}, replace(good, local_cp_size=2, cp_group=group)),
        "no number": ({}, replace(good, local_cp_size="two")),
        "unpadded": ({}, PackedSeqParams("thd", CU, CU)),
        "padded as real": ({}, PackedSeqParams("thd", CU, CU, CU, CU)),
        "keys": ({}, PackedSeqParams("thd", CU, CU, PADDED, CU)),
        "ends early": ({}, PackedSeqParams("thd", short, short)),
        "mask": ({"attention_mask": alone}, good),
    }
    for name, (more, params) in wrong.items():
        mine = dist.get_rank() == 1
        with pytest.raises((ValueError, TypeError)) as caught:
            layer(x, **({"attention_mask": None} | (more if mine else {})), packed_seq_params=params if mine else good)
        said[name] = str(caught.value)
        if name in ("size", "another size", "no number"):
            with pytest.raises((ValueError, TypeError)) as caught:
                get_batch_on_this_cp_rank(whole, params if mine else good)
            assert str(caught.value).endswith(said[name].partition("_params.")[2])
    for params in (good, replace(good, local_cp_size=torch.tensor(4, dtype=torch.int32), cp_group=group)):
        layer(x, attention_mask=None, packed_seq_params=params)
    lone = replace(good, local_cp_size=1)  # not spread
    layer(x.repeat(4, 1, 1), attention_mask=None, packed_seq_params=lone)
    assert get_batch_on_this_cp_rank(whole, lone)[0]["tokens"].shape == (1, 48)
    return said


def test_batches_that_were_cut_in_another_way_are_refused(four: Processes) -> None:
    starts = {
        "size": "packed_seq_params.local_cp_size is 4, and cp_group is None",
        "another size": "packed_seq_params.local_cp_size is 2, and cp_group has 4 ranks",
        "no number": "packed_seq_params.local_cp_size is 'two'",
        "unpadded": "cu_seqlens_q gives sequence 0 13 rows, which do not divide by 2 * cp_size = 8",
        "padded as real": "cu_seqlens_q_padded gives sequence 0 13 rows",
        "keys": "cu_seqlens_kv_padded gives sequence 0 13 rows",
        "ends early": "cu_seqlens_q ends at 40, and the ranks hold 48 rows; cu_seqlens_q_padded must have the slots",
        "mask": "attention_mask is not a mask that is plainly causal",
    }
    said = four.run(batches_refused)
    for name, start in starts.items():
        assert said[1][name].startswith(start)
        assert start in said[0][name]
    assert "give the padded lengths as cu_seqlens_q_padded" in said[1]["unpadded"]


def masks() -> list[str]:
    """Masks as Megatron's dataloader makes and cuts them: of one document, and of two."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.utils import get_batch_on_this_cp_rank

    from cp_fast.integrations.megatron import CoreAttention

    layer, said = layer_of("p2p", 4, CoreAttention), []
    core = layer.self_attention.core_attention
    x = torch.zeros(4, 2, 32, dtype=torch.float64)
    causal = torch.ones(16, 16, dtype=torch.bool).triu(1).expand(2, 1, 16, 16)
    documents = causal.clone()
    documents[:, :, 9:, :9] = True  # --reset-attention-mask

    def call(mask: torch.Tensor, params: Any = None) -> None:
        rows = x if params is None else torch.zeros(4, 1, 32, dtype=torch.float64)
        layer(rows, attention_mask=mask, packed_seq_params=params)

    mine = get_batch_on_this_cp_rank({"attention_mask": causal.contiguous()})["attention_mask"]
    packed = PackedSeqParams("thd", torch.tensor([0, 8, 16]), torch.tensor([0, 8, 16]))
    rank = dist.get_rank()
    rows = [rank, 7 - rank, 8 + rank, 15 - rank]
    for mask in (causal, mine, causal.contiguous()):
        call(mask)
        call(mask)
    for mask in (causal[:1], causal[:1, :, rows]):
        call(mask, packed)
    q = torch.zeros(4, 2, 4, 8, dtype=torch.float64)
    core(q, q[:, :, :2], q[:, :, :2], causal & False, AttnMaskType.no_mask)
    cut = get_batch_on_this_cp_rank({"attention_mask": documents.clone()})["attention_mask"]
    changed = causal.clone()
    call(changed)
    changed[:, :, 9:, :9] = True  # in place: the tensor was right before
    for mask in (documents, cut, changed, causal.int(), causal[..., :12]):
        with pytest.raises((ValueError, TypeError)) as caught:
            call(mask)
        said.append(str(caught.value))
    for odd in (causal, ~causal):
        with pytest.raises(ValueError, match="hides nothing") as caught:
            core(q, q[:, :, :2], q[:, :, :2], odd, AttnMaskType.no_mask)
    with pytest.raises(ValueError, match="plainly causal"):
        call(mine[:1], packed)  # cut as one document
    return said


def test_masks_as_tensors_are_plainly_causal(four: Processes) -> None:
    for said in four.run(masks):
        for words in said[:3]:
            assert words.startswith("attention_mask is not a mask that is plainly causal")
            assert "documents by packed_seq_params" in words
        assert said[3].startswith("attention_mask is a tensor [2, 1, 16, 16] of torch.int32")
        assert said[4].startswith("attention_mask has shape [2, 1, 16, 12]; it must be [..., 4, 16]")


def multi_token_prediction() -> str:
    from megatron.core.packed_seq_params import PackedSeqParams

    from cp_fast.integrations.megatron import CoreAttention

    layer = layer_of("p2p", 4, CoreAttention)
    layer.self_attention.core_attention.config.mtp_num_layers = 1
    x = torch.zeros(12, 1, 32, dtype=torch.float64)
    whole = PackedSeqParams("thd", PADDED, PADDED, PADDED, PADDED, 24, 24)
    for params in (whole, PackedSeqParams("thd", PADDED, PADDED)):
        layer(x, attention_mask=None, packed_seq_params=params)
    with pytest.raises(NotImplementedError) as caught:
        layer(x, attention_mask=None, packed_seq_params=PackedSeqParams("thd", CU, CU, PADDED, PADDED, 24, 24))
    return str(caught.value)


def test_multi_token_prediction_needs_documents_without_padding(four: Processes) -> None:
    for said in four.run(multi_token_prediction):
        assert said.startswith("mtp_num_layers is 1, and cu_seqlens_q_padded has padding between documents")
        assert "divide by 2 * cp_size = 8" in said


def specs() -> None:
    from types import SimpleNamespace

    from megatron.core.models.gpt import gpt_layer_specs as gpt
    from megatron.core.models.T5 import t5_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    from cp_fast.integrations.megatron import CoreAttention, use_cp_fast
    from cp_fast.integrations.shared.megatron_balanced import self_attention

    config = layer_of("p2p", 4, CoreAttention).config
    config.num_moe_experts, config.moe_layer_freq, config.num_layers = 4, [0, 1], 2
    layer: Any = gpt.get_gpt_layer_local_spec()
    block = gpt.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    config.mtp_num_layers = 1
    latent = gpt.get_gpt_layer_local_spec(multi_latent_attention=True)
    for spec in (layer, latent, block, gpt.get_gpt_mtp_block_spec(config, block, False), [layer, layer]):
        changed = use_cp_fast(spec)
        assert "CoreAttention" in repr(changed)
        assert "DotProductAttention" not in repr(changed)
        assert "CoreAttention" not in repr(spec)
        assert use_cp_fast(changed) == changed
        assert spec is latent or repr(self_attention()) in repr(changed)
    both: Any = use_cp_fast(t5_spec.get_t5_decoder_with_local_block_spec(2))
    for one in both.layer_specs:
        assert one.submodules.self_attention.submodules.core_attention is CoreAttention
        assert one.submodules.cross_attention.submodules.core_attention is CoreAttention
    for odd in (None, SimpleNamespace(), ModuleSpec(module=torch.nn.Linear)):
        with pytest.raises(TypeError, match="without a core_attention"):
            use_cp_fast(odd)
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(module=torch.nn.Linear)
    with pytest.raises(NotImplementedError, match="spec has the core attention Linear"):
        use_cp_fast(layer)


def test_every_attention_of_a_specification_is_changed(four: Processes) -> None:
    assert four.run(specs) == [None] * 4
