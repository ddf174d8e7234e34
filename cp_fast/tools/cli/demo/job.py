"""The input of every rank: the packed documents and the options. Plain values, so that it can be sent to any
process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cp_ref.common.cli.options import cumulative
from cp_ref.spec import AttnMaskType, CPCommType, Layout, Problem, Sizes, read_problem

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """One demonstration.

    Documents lie one after the other in a buffer, each padded to a multiple of 2 * ranks:

        cu_seqlens         0       5             12        real bytes
        cu_seqlens_padded  0           8             16    slots, at 2 ranks
                           |d d d d d . . .|e e e e e e e .|
    """

    documents: tuple[bytes, ...]
    ranks: int
    device: str = "cpu"
    dtype: str = "float32"
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    layout: Layout = "dual_chunk"
    cp_comm_type: CPCommType = "p2p"
    a2a_size: int = 1  # The number of ranks that exchange heads: all in a2a, the inner group in a2a+p2p.
    attn_mask_type: AttnMaskType = "padding_causal"
    window_size: tuple[int, int] = (-1, -1)
    backend: str = "auto"
    seed: int = 0
    spoil: str = ""  # For tests: a result to change before the check, or "rank N" to let that rank fail.

    lengths: tuple[int, ...] = field(init=False)
    slots: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Count the documents' bytes and their slots."""
        lengths = [len(d) for d in self.documents]
        object.__setattr__(self, "lengths", tuple(lengths))
        object.__setattr__(self, "slots", tuple(-(-n // (2 * self.ranks)) * 2 * self.ranks for n in lengths))

    @property
    def problem(self) -> Problem:
        """The problem, read as `make_plan` reads it on the ranks.

        Raises:
            ValueError, TypeError: an option is wrong. It is raised before any rank starts.
        """
        return read_problem(
            cp_size=self.ranks,
            cp_comm_type=self.cp_comm_type,
            a2a_size=self.a2a_size,
            layout=self.layout,
            qkv_format="thd",
            attn_mask_type=self.attn_mask_type,
            window_size=self.window_size,
            areas=None,
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=None,
            cu_seqlens_q_padded=self.cu_seqlens_padded,
            cu_seqlens_kv_padded=None,
            softmax_scale=None,
            softcap=0.0,
            softmax_type="vanilla",
            sizes=Sizes(self.heads_q, self.heads_kv, self.head_dim, self.head_dim, self.dtype),
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return getattr(torch, self.dtype)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Cumulative lengths of the documents."""
        return cumulative(list(self.lengths))

    @property
    def cu_seqlens_padded(self) -> torch.Tensor:
        """The same of their slots."""
        return cumulative(list(self.slots))

    def token_ids(self) -> torch.Tensor:
        """The packed buffer: the bytes as token ids, -1 for padding; int64 [t]."""
        packed = torch.full((sum(self.slots),), -1, dtype=torch.int64)
        for start, document in zip(self.cu_seqlens_padded.tolist(), self.documents, strict=False):
            packed[start : start + len(document)] = torch.frombuffer(bytearray(document), dtype=torch.uint8).long()
        return packed
