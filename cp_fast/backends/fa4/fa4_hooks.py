"""The methods of the library that `score_kernels` replaces, and their parameters: another release may differ."""

from __future__ import annotations

import inspect
from types import ModuleType

__all__ = ["changed_hook"]

_PLACE = ("batch_idx", "head_idx", "m_block")
_BLOCK = ("smem_pipe_read", "n_block", "mma_qk_fn", "mma_pv_fn", "pipeline_k", "pipeline_v", "acc_O", "tOrP")
_AUX = ("aux_data", "fastdiv_mods")

# class -> method -> its parameters after self: all of them in order, or for a set some of them
_HOOKS: dict[str, dict[str, tuple[str, ...] | frozenset[str]]] = {
    "FlashAttentionForwardSm90": {
        "apply_score_mod": ("thr_mma_qk", *_PLACE, "acc_S", "n_block", "softmax_scale", "seqlen", *_AUX),
        "first_half_block_overlap": frozenset({"softmax", "score_mod_fn"}),
        "mma_one_n_block": frozenset({*_BLOCK, "softmax", "score_mod_fn"}),
        "mma_one_n_block_intrawg_overlap": frozenset({*_BLOCK, "softmax", "score_mod_fn"}),
        "epilogue": frozenset({"acc_O", "lse"}),
    },
    "FlashAttentionBackwardSm90": {
        "apply_score_mod": ("acc_S", "thr_mma_SdP", *_PLACE, "n_block", "softmax_scale", "seqlen_info", *_AUX),
        "apply_score_mod_bwd": (
            *("grad_tensor", "score_tensor", "thr_mma_SdP", *_PLACE, "n_block", "softmax_scale", "seqlen_info", *_AUX),
        ),
        "mma_one_m_block": frozenset(
            {"consumer_state_Q", "consumer_state_dO", "mma_pdo_fn", "copy_P_r2s", "tLSEsdPsum"}
            | {"score_mod_fn", "score_mod_bwd_fn"}
        ),
        "_get_stat": frozenset({"tSrS", "row", "lane", "shuffle"}),
    },
}


def changed_hook(interface: ModuleType) -> str | None:
    """The first method that is not as `scores.score_kernels` needs it, as "class.method"; None where all are.

    interface: the module `flash_attn.cute.interface`.

    >>> changed_hook(ModuleType("another"))
    'FlashAttentionForwardSm90.apply_score_mod'
    """
    for name, methods in _HOOKS.items():
        for method, wanted in methods.items():
            there = getattr(getattr(interface, name, None), method, None)
            if there is None:
                return f"{name}.{method}"
            found = tuple(one for one in inspect.signature(there).parameters if one != "self")
            if not (wanted <= set(found) if isinstance(wanted, frozenset) else wanted == found):
                return f"{name}.{method}"
    return None
