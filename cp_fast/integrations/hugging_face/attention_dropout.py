"""Dropout of attention in training. All ranks share one seed for a call. Each layer derives its seed from it.

Which pairs are dropped depends on the seed and their places alone, so it is the same over any number of ranks. The seed
is drawn before the model runs: a layer that is computed again finds the same one, and draws nothing.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from cp_fast.integrations.token_batches import CpBatch
from cp_ref.groups.agreement import merged

__all__ = ["dropout_of_layer", "shared_seed"]

_ENTRY = re.compile("attn.*drop|attention.*drop|drop.*attn|drop.*attention")  # attention_probs_dropout_prob, attn_pdrop


def shared_seed(model: Any, sequences: CpBatch, device: torch.device) -> torch.Tensor | None:
    """The seed of a call, int64 [] on this device: what the first rank of the context draws from PyTorch's generator of
    the CPU. Every rank draws. None where nothing is dropped, by the model's mode and configuration. Collective.
    """
    entries = vars(model.config.get_text_config())
    likely = [p for name, p in entries.items() if _ENTRY.search(name) and isinstance(p, float | int) and p > 0]
    if not model.training or not likely:
        return None
    drawn = int(torch.randint(2**62, (), device="cpu"))
    seed = merged(sequences.cp, "a seed of dropout", lambda: drawn, lambda seeds: seeds[0])
    return torch.tensor(seed, device=device)


def dropout_of_layer(
    module: nn.Module, number: int, p: float, seed: torch.Tensor | None, device: torch.device
) -> dict[str, Any]:
    """The arguments of `attention`.

    Args:
        number: of the layer, by which its seed differs from others'.
        p: the probability.
        seed: of the call.

    Raises:
        NotImplementedError: the call has none.
    """
    if not p:
        return {}
    if seed is None:
        raise NotImplementedError(
            f"dropout is {p} in the attention of {type(module).__name__}, while the model's configuration, or its "
            "mode, has none, so its ranks agreed on no seed: set it in the configuration (attention_dropout, "
            "attention_probs_dropout_prob or attn_pdrop) or set it to 0 in the layer, and call train() on the model"
        )
    return {"dropout_p": float(p), "dropout_seed": seed.to(device) + number}
