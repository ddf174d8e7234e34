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
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.shared.drop_in import Asked, check_two_chunks, context_for, drop_in, lengths_on_host, refuse
from cp_fast.integrations.shared.megatron_balanced import get_batch_on_this_cp_rank, group_of_batch, self_attention
from cp_ref.batches.sharding import shard
from cp_ref.groups.group import PaperGroup
from cp_ref.schedules.values import kind_of

__all__ = ["CoreAttention", "get_batch_on_this_cp_rank", "use_cp_fast"]

_PLAIN = ("DotProductAttention", "TEDotProductAttention", "CoreAttention")
_MASKS = ("no_mask", "causal", "causal_bottom_right")
_ROWS = 1024  # of a mask that are compared at once
_PACKED = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def use_cp_fast(spec: Any) -> Any:
    """Make a specification of Megatron with `CoreAttention` in every attention of it; the given one does not change.

    If a layer's self attention is Megatron's SelfAttention, the layer takes batches of layout "balanced" too.

    Args:
        spec: of a layer (ModuleSpec), of a block such as that of `get_gpt_decoder_block_spec` or of T5
            (TransformerBlockSubmodules), of multi-token prediction, or a list of them.

    Raises:
        TypeError: it has no core attention. NotImplementedError: a core attention of it is none of Megatron's two that
        compute plain attention (DotProductAttention, TEDotProductAttention).
    """
    from megatron.core.transformer.attention import SelfAttention

    changed = copy.deepcopy(spec)
    found = list(_attentions(changed, set()))
    if not found:
        raise TypeError(
            f"spec is {kind_of(spec)} without a core_attention; it must be the specification of a layer or of a block"
        )
    for module, submodules in found:
        core = submodules.core_attention
        core = getattr(core, "module", core)  # a class, or a ModuleSpec of one
        if getattr(core, "__name__", None) not in _PLAIN:
            raise NotImplementedError(
                f"spec has the core attention {getattr(core, '__name__', core)}; use_cp_fast replaces "
                f"{' and '.join(_PLAIN[:2])} alone, which compute what CoreAttention does"
            )
        submodules.core_attention = CoreAttention
        if getattr(module, "module", None) is SelfAttention:
            module.module = self_attention()
    return changed


def _attentions(spec: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """Every ModuleSpec in a specification whose submodules have a core attention, and these submodules; each once."""
    if id(spec) in seen:
        return
    seen.add(id(spec))
    submodules = getattr(spec, "submodules", None)
    if getattr(submodules, "core_attention", None) is not None:
        yield spec, submodules
    parts: list[Any] = []
    if isinstance(spec, Mapping):
        parts = list(spec.values())
    elif isinstance(spec, list | tuple):
        parts = list(spec)
    elif is_dataclass(spec) and not isinstance(spec, type):
        parts = [getattr(spec, field.name) for field in fields(spec)]
    for part in parts:
        yield from _attentions(part, seen)


class CoreAttention(torch.nn.Module):
    """A core attention of Megatron over ranks. Its arguments are those that SelfAttention gives to every core
    attention.

    Raises:
        NotImplementedError: dropout, attention in FP8. ValueError: "a2a+p2p" without hierarchical groups;
        config.context_parallel_size is not the size of the group.
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
        if dropout:
            raise NotImplementedError(
                f"attention_dropout is {dropout}, and CoreAttention has no seed that all ranks share; set "
                "attention_dropout=0.0 in the TransformerConfig"
            )
        narrow = ("fp8_dot_product_attention", "fp8_multi_head_attention")
        refuse("CoreAttention", **{name: getattr(config, name, None) for name in narrow})
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

    @drop_in(lambda given: given["self"]._told(given.get("packed_seq_params")))
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
            attention_mask: None, or a causal mask [..., s/cp or s, s], True where it hides, as Megatron's dataloader
                makes it; for no_mask one that hides nothing. A mask on a GPU is read once a batch, which waits.
            attn_mask_type: no_mask, causal, causal_bottom_right; padding and padding_causal for packed batches.
            packed_seq_params: lengths are global, as Megatron has them, and every document's divides by 2 * cp_size:
                with padding between documents `cu_seqlens_q_padded` has the lengths of their slots. Its `cp_group`
                chooses another group for this batch, and `local_cp_size` is that group's size; 1 without a group is
                for a batch that is not spread. That of `get_batch_on_this_cp_rank` says how the batch was cut.

        Returns:
            [s/cp, b, h * d_v], or [t/cp, h * d_v].

        Raises:
            NotImplementedError: attention_bias, a mask that has only a tensor (arbitrary, padding without packing);
            multi-token prediction with padding between documents, where Megatron rolls by lengths without padding.
            ValueError: attention_mask hides other pairs; a length of packed_seq_params does not divide, or they end
            before the buffer; its cp_group and local_cp_size do not fit.
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
        cut: dict[str, Any] = {"qkv_format": arguments["qkv_format"]}
        if packed:
            given = {name: getattr(packed_seq_params, name) for name in _PACKED}
            lengths = lengths_on_host(**{name: x for name, x in given.items() if x is not None})
            arguments |= lengths
            if table is None:
                slots = self._check_lengths(lengths, cp, query, key)
                cut["cu_seqlens_padded"] = slots
            else:
                cut = {"plan": table}
        if attention_mask is not None:
            _check_mask(attention_mask, mask, cp, query, key, cut)

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

    def _check_lengths(
        self, lengths: dict[str, torch.Tensor], cp: ContextParallel, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Check that a packed batch can have been cut in 2 * cp_size chunks of every document; its slots' lengths."""
        slots: list[torch.Tensor] = []
        for side, x in (("q", query), ("kv", key)):
            name = f"cu_seqlens_{side}"
            name = name if name in lengths else "cu_seqlens_q"
            real = lengths.get(name)
            padded = f"{name}_padded" if f"{name}_padded" in lengths else name
            if real is None or padded not in lengths:
                raise ValueError("packed_seq_params has no cu_seqlens_q; a packed batch needs the documents' lengths")
            if self.config.mtp_num_layers and not torch.equal(real.long(), lengths[padded].long()):
                raise NotImplementedError(
                    f"mtp_num_layers is {self.config.mtp_num_layers}, and {padded} has padding between documents: "
                    "multi-token prediction of Megatron rolls labels by the lengths without padding. Pack documents "
                    f"whose lengths divide by 2 * cp_size = {2 * cp.size}"
                )
            check_two_chunks(cp, **{padded: lengths[padded]})
            rows, end = len(x) * cp.size, int(lengths[padded][-1])
            if cp.size > 1 and end < rows:
                raise ValueError(
                    f"{padded} ends at {end}, and the ranks hold {rows} rows; "
                    f"cu_seqlens_{side}_padded must have the slots that the buffer was cut by, padding included"
                )
            slots.append(lengths[padded])
        return slots[0]

    def _told(self, packed: Any) -> ContextParallel:
        """The ranks to tell of an error: those of the layer, if the batch's own group is wrong."""
        try:
            return self._context(packed)
        except (TypeError, ValueError):
            return self._context(None)

    def _context(self, packed: Any) -> ContextParallel:
        """The layer's context, or that of a batch with its own group."""
        from megatron.core.parallel_state import get_hierarchical_context_parallel_groups

        group = group_of_batch(packed, self.groups.cp)
        if isinstance(group, PaperGroup):
            return context_for(group, "p2p")
        if self.cp_comm_type != "a2a+p2p":
            return context_for(group, self.cp_comm_type)
        levels = getattr(self.groups, "hcp", None) or get_hierarchical_context_parallel_groups(check_initialized=False)
        if (own := getattr(packed, "cp_group", None)) is not None or not levels:
            found = "no hcp groups" if own is None else "a cp_group of the batch"
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


_checked: Any = WeakTensorKeyDictionary()  # by mask: what it was checked for


def _check_mask(
    mask: Any, kind: str, cp: ContextParallel, query: torch.Tensor, key: torch.Tensor, cut: dict[str, Any]
) -> None:
    """Raise unless a mask tensor, True where it hides, hides what the mask of this type does. Layers of a batch get the
    same tensor, so its values are read once.

    Args:
        cut: how the rows were cut: keywords of `shard`.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.ndim < 2:
        what = f"a tensor {list(mask.shape)} of {mask.dtype}" if isinstance(mask, torch.Tensor) else kind_of(mask)
        raise TypeError(f"attention_mask is {what}; it must be None, or bool [..., s/cp, s]")
    rows, keys = len(query) * cp.size, len(key) * cp.size
    asked = kind, rows, keys, cp.rank, cp.size, str(cut)
    now = None if mask.is_inference() else (mask._version, asked)
    if now is not None and _checked.get(mask) == now:
        return
    if mask.shape[-2] not in (len(query), rows) or mask.shape[-1] != keys:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}; it must be [..., {len(query)}, {keys}] of this rank's "
            f"queries, or [..., {rows}, {keys}]"
        )
    place = torch.arange(rows, device="cpu")
    if mask.shape[-2] != rows:
        place = shard(place if "sbhd" not in cut.values() else place[:, None], cp=cp, **cut).flatten()
    last = (place + (keys - rows if kind == "causal_bottom_right" else 0)).to(mask.device)
    columns = torch.arange(keys, device=mask.device)
    wrong = torch.zeros((), dtype=torch.bool, device=mask.device)
    for start in range(0, len(last), _ROWS):
        stop = start + _ROWS
        hidden = columns > last[start:stop, None] if kind != "no_mask" else columns < 0
        wrong |= (mask[..., start:stop, :] != hidden).any()
    if wrong:
        plainly = "hides nothing" if kind == "no_mask" else "is plainly causal"
        raise ValueError(
            f"attention_mask is not a mask that {plainly}, and CoreAttention takes no other mask as a tensor; give "
            "documents by packed_seq_params (qkv_format 'thd'), and attention_mask=None"
        )
    if now is not None:
        _checked[mask] = now
