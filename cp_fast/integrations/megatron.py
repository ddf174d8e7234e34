"""Megatron-LM: the core attention of a TransformerLayer, under context parallelism, without TransformerEngine.

    from cp_fast.integrations.megatron import use_cp_fast

    spec = use_cp_fast(get_gpt_layer_local_spec())  # or CoreAttention in a specification of your own

A layer's settings come from Megatron's objects: sizes, softmax_type, windows and cp_comm_type from the
TransformerConfig, groups from the ProcessGroupCollection, the lengths of packed batches from PackedSeqParams.
Megatron's own get_batch_on_this_cp_rank cuts batches; the function of this name here cuts packed ones in layout
"balanced". Needs megatron-core.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from typing import Any

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.shared.drop_in import Asked, drop_in
from cp_fast.integrations.shared.megatron_balanced import get_batch_on_this_cp_rank, self_attention
from cp_fast.integrations.shared.shared_arguments import context_for, refuse
from cp_ref.spec import PaperGroup

__all__ = ["CoreAttention", "get_batch_on_this_cp_rank", "use_cp_fast"]

_MASKS = ("no_mask", "causal", "causal_bottom_right")
_PACKED = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def use_cp_fast(spec: Any) -> Any:
    """A transformer layer's ModuleSpec with `CoreAttention` in its self attention; the given one does not change.

    If its self attention is Megatron's SelfAttention, the layer takes batches of layout "balanced" too.
    """
    from megatron.core.transformer.attention import SelfAttention

    changed = copy.deepcopy(spec)
    attention = changed.submodules.self_attention
    attention.submodules.core_attention = CoreAttention
    if attention.module is SelfAttention:
        attention.module = self_attention()
    return changed


class CoreAttention(torch.nn.Module):
    """The arguments are those that SelfAttention gives to every core attention.

    Raises:
        NotImplementedError: dropout. ValueError: "a2a+p2p" without hierarchical groups; config.context_parallel_size is
        not the size of the group.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.utils import is_layer_window_attention

        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        refuse("CoreAttention", attention_dropout=dropout)
        self.config, self.layer_number, self.attn_mask_type = config, layer_number, attn_mask_type
        self.cp_comm_type = cp_comm_type or "p2p"
        self.groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        if (size := self.groups.cp.size()) != config.context_parallel_size:
            raise ValueError(
                f"config.context_parallel_size is {config.context_parallel_size}, but the context parallel group has "
                f"{size} ranks; they must be equal. A layer of whole sequences takes a pg_collection whose cp is a "
                "group of one rank"
            )
        self.softmax_scale = softmax_scale  # None: d_qk ** -0.5
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window_size = tuple(config.window_size) if windowed else (-1, -1)
        self.wants_max_logit = bool(config.qk_clip or config.log_max_attention_logit)
        self.current_max_attn_logits: torch.Tensor | None = None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            device = "cpu" if config.use_cpu_initialization else "cuda"
            heads = config.num_attention_heads // self.groups.tp.size()
            offset = torch.zeros(heads, dtype=config.params_dtype, device=device)
            self.softmax_offset = torch.nn.Parameter(
                config.init_method(offset) if config.perform_initialization else offset
            )

    @drop_in(lambda given: given["self"]._context(given.get("packed_seq_params")))
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Asked:
        """Attention of this rank's slices. Collective over the context parallel group.

        Args:
            query, key, value: [s/cp, b, h, d], or [t/cp, h, d] for packed batches.
            attention_mask: Megatron passes one for every mask; only the mask's type counts here.
            attn_mask_type: no_mask, causal, causal_bottom_right; padding and padding_causal for packed batches.
            packed_seq_params: lengths are global, as Megatron has them. Its `cp_group` and `local_cp_size` choose
                another group for this batch. That of `get_batch_on_this_cp_rank` says how the batch was cut.

        Returns:
            [s/cp, b, h * d_v], or [t/cp, h * d_v].

        Raises:
            NotImplementedError: attention_bias, a mask that has only a tensor (arbitrary, padding without packing).
        """
        refuse("CoreAttention", attention_bias=attention_bias)
        table = getattr(packed_seq_params, "table", None)
        packed = table is not None or (packed_seq_params is not None and packed_seq_params.qkv_format == "thd")
        mask = _mask((attn_mask_type or self.attn_mask_type).name, packed=packed)
        if table is not None and getattr(packed_seq_params, "qkv_format", None) == "thd":
            raise ValueError(
                "packed_seq_params has layout 'balanced', and this layer's self attention has positions for "
                "'dual_chunk'; make its specification by use_cp_fast, of one with SelfAttention"
            )
        cp = self._context(packed_seq_params)
        arguments: dict[str, Any] = {
            "qkv_format": "thd" if packed else "sbhd",
            "attn_mask_type": mask,
            "window_size": self.window_size,
            "softmax_scale": self.softmax_scale,
            "softmax_type": self.config.softmax_type,
            "softmax_offset": self.softmax_offset,
            "deterministic": self.config.deterministic_mode,
            "return_max_logit": self.wants_max_logit,
        }
        if packed:
            arguments |= {name: getattr(packed_seq_params, name) for name in _PACKED}

        def give(results: Any) -> torch.Tensor:
            out = results
            if self.wants_max_logit:
                out, largest = results
                before = self.current_max_attn_logits
                self.current_max_attn_logits = largest if before is None else torch.maximum(before, largest)
            return out.flatten(-2) if table is None else out.flatten(-2)[:, None]

        if table is None:
            return Asked(query, key, value, cp, arguments, give)
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        return Asked(q, k, v, table.over(cp), arguments, give)

    def _context(self, packed: Any) -> ContextParallel:
        """The layer's context, or that of a batch with its own group."""
        from megatron.core.parallel_state import get_hierarchical_context_parallel_groups

        group = getattr(packed, "cp_group", None)
        if group is None and getattr(packed, "local_cp_size", None) == 1:
            return context_for(PaperGroup(1), "p2p")
        if self.cp_comm_type != "a2a+p2p":
            return context_for(group or self.groups.cp, self.cp_comm_type)
        levels = getattr(self.groups, "hcp", None) or get_hierarchical_context_parallel_groups(check_initialized=False)
        if group is not None or not levels:
            found = "no hcp groups" if group is None else "a cp_group of the batch"
            raise ValueError(
                f"cp_comm_type is 'a2a+p2p' with {found}; it needs the groups of hierarchical_context_parallel_sizes"
            )
        return context_for(list(levels), self.cp_comm_type)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For distributed checkpoints: sinks are sharded over the tensor parallel group."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self.groups.tp, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)


def _mask(name: str, *, packed: bool) -> str:
    """The mask of a Megatron mask type. The lengths of a packed batch say where its padding is."""
    if packed:
        name = "no_mask" if name == "padding" else name.removeprefix("padding_")
    if name not in _MASKS:
        raise NotImplementedError(
            f"attn_mask_type is {name!r}, whose mask is a tensor; it must be one of {', '.join(_MASKS)}, or the "
            "lengths of a packed batch in packed_seq_params"
        )
    return name
