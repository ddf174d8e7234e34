"""The demonstration's options, and what every rank makes of them: the packed documents, q, k, v and the gradient."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from typer import Option

from cp_fast.backends import BACKENDS
from cp_fast.tools.cli.demo import Document, read_documents
from cp_ref.contract.cli.options import check_number, cumulative, exchanging, window
from cp_ref.contract.read_problem import DTYPES
from cp_ref.schedules.values import MOST_RANKS, check_choice, read_count
from cp_ref.schedules.words import LAYOUTS, MASKS, canonical_layout

__all__ = ["Job", "under_torchrun"]

_WIDTH = 128  # of the embedding


@dataclass(frozen=True)
class Job:
    """The options as given. Documents lie one after the other in a buffer, each padded to a multiple of 2 * ranks."""

    ranks: Annotated[int | None, Option(help="Number of ranks: 4, or torchrun's.", min=1, show_default=False)] = None
    text: Annotated[list[Path] | None, Option(help="A file or folder instead of Python's own; repeatable.")] = None
    tokens: Annotated[int, Option(help="Bytes of text in all.", min=1)] = 16384
    longest: Annotated[int, Option(help="Longest document, in bytes.", min=1)] = 2500
    heads: Annotated[int, Option(help="Query heads.", min=1)] = 4
    heads_kv: Annotated[int, Option(help="Key and value heads.", min=1)] = 2
    head_dim: Annotated[int, Option(help="Head dim, even.", min=2)] = 64
    dtype: Annotated[str, Option(help="float32 on a CPU, bfloat16 on GPUs, unless said otherwise.")] = ""
    layout: Annotated[str, Option(help="dual_chunk (or zigzag), contiguous or balanced.")] = "dual_chunk"
    mask: Annotated[str, Option(help="attn_mask_type, such as padding_causal or padding.")] = "padding_causal"
    window: Annotated[str, Option(help="LEFT,RIGHT; -1 is unbounded.")] = "-1,-1"
    cp_comm_type: Annotated[str, Option(help="The schedule: p2p, all_gather, a2a or a2a+p2p.")] = "p2p"
    a2a_size: Annotated[int | None, Option(help="a2a+p2p only: how many ranks exchange heads, 2 unless given.")] = None
    backend: Annotated[str, Option(help="auto, fa4, cudnn, fa2, cpu or torch: the attention kernels.")] = "auto"
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto"
    seed: Annotated[int, Option(help="Of the choice of documents and the weights.")] = 0
    head: Annotated[int, Option(help="The picture's query head, where heads are spread over the ranks.")] = 0
    spoil: Annotated[str, Option(hidden=True)] = ""  # For tests: a result to change, or "rank N" to let it fail.

    def __post_init__(self) -> None:
        """Raises ValueError for a wrong option, before any rank starts."""
        object.__setattr__(self, "layout", canonical_layout(self.layout))
        backends, devices = ("auto", *(b.name for b in BACKENDS)), ("auto", "cpu", "cuda")
        choices = {"layout": LAYOUTS, "mask": MASKS, "device": devices, "backend": backends, "dtype": ("", *DTYPES)}
        for name, known in choices.items():
            check_choice(f"--{name}", getattr(self, name), known)
        if self.heads % self.heads_kv or self.head_dim % 2:
            words = f"--heads {self.heads} must be a multiple of --heads-kv {self.heads_kv}"
            raise ValueError(f"{words}, and --head-dim {self.head_dim} even")
        check_number("--head", self.head, self.heads)
        read_count("--ranks", 4 if self.ranks is None else self.ranks, at_least=1, at_most=MOST_RANKS)
        window(self.window)
        _ = self.exchanging

    @cached_property
    def where(self) -> tuple[int, str, str]:
        """The number of ranks, their device, and both in words: one process a GPU if there are enough GPUs."""
        world = here = self.ranks or 4
        started_by = ""
        if under_torchrun():
            world = int(os.environ["WORLD_SIZE"])
            if self.ranks not in (None, world):
                raise ValueError(f"--ranks is {self.ranks}, but torchrun has started {world}; leave it out")
            here, started_by = int(os.environ.get("LOCAL_WORLD_SIZE", world)), " started by torchrun"
        gpus = torch.cuda.device_count() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else 0
        if self.device == "cuda" and gpus < here:
            raise ValueError(f"--device cuda needs one GPU a rank: {here} ranks, {gpus} GPUs that NCCL can use")
        if self.device != "cpu" and gpus >= here:
            return world, "cuda", f"{world} processes{started_by} over NCCL, one GPU each"
        fewer = f": there are fewer GPUs ({gpus}) than ranks; --ranks {gpus} uses them"
        why = "" if self.device == "cpu" else fewer if gpus else " (no GPU that NCCL can use)"
        return world, "cpu", f"{world} processes{started_by} over gloo on the CPU{why}"

    @property
    def exchanging(self) -> int:
        """How many ranks exchange heads."""
        return exchanging(self.cp_comm_type, self.a2a_size, self.where[0])

    @cached_property
    def documents(self) -> list[Document]:
        """The documents, in the order of the buffer."""
        return read_documents(self.text or [], self.tokens, self.longest, self.seed)

    @cached_property
    def slots(self) -> list[int]:
        """Each document's length, padded."""
        multiple = 2 * self.where[0]
        return [-(-len(d.data) // multiple) * multiple for d in self.documents]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return getattr(torch, self.dtype or ("float32" if self.where[1] == "cpu" else "bfloat16"))

    def problem(self) -> dict[str, Any]:
        """The arguments of `make_plan`, except the context and the device."""
        sizes = {"heads_q": self.heads, "heads_kv": self.heads_kv, "d_qk": self.head_dim, "d_v": self.head_dim}
        lengths = cumulative([len(d.data) for d in self.documents])
        cu_seqlens = {"cu_seqlens_q": lengths, "cu_seqlens_q_padded": cumulative(self.slots)}
        mask = {"attn_mask_type": self.mask, "window_size": window(self.window)}
        return {"qkv_format": "thd", "dtype": self.torch_dtype} | sizes | cu_seqlens | mask

    def token_ids(self) -> torch.Tensor:
        """The packed buffer: the bytes as token ids, -1 for padding; int64 [t]."""
        padded = (d.data.ljust(slots, b"\0") for d, slots in zip(self.documents, self.slots, strict=True))
        ids = torch.frombuffer(bytearray(b"".join(padded)), dtype=torch.uint8).long()
        return ids.where(ids > 0, -1)  # documents have no zero bytes

    def qkv(self, ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Token ids [t] and positions [t] to q [t, h_q, d], k and v [t, h_kv, d]: fixed random weights and RoPE.

        Padding becomes NaN on purpose: nothing of it may reach a result.
        """
        draw = torch.Generator().manual_seed(self.seed)  # on the CPU, so that every device has the same numbers
        x = torch.randn(256, _WIDTH, generator=draw).to(ids.device)[ids.clamp(min=0)]
        x[ids < 0] = float("nan")
        widths = (self.heads * self.head_dim, *[self.heads_kv * self.head_dim] * 2)
        weights = [torch.randn(_WIDTH, n, generator=draw).to(ids.device) * _WIDTH**-0.5 for n in widths]
        q, k, v = ((x @ w).unflatten(-1, (-1, self.head_dim)) for w in weights)
        dims = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=ids.device)
        angles = positions.double()[:, None, None] * 10_000.0 ** (-dims / self.head_dim)  # [t, 1, d/2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        rotated = [torch.cat([a * cos - b * sin, a * sin + b * cos], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1))]
        return [x.to(self.torch_dtype).requires_grad_() for x in (*rotated, v)]

    def dout(self) -> torch.Tensor:
        """A gradient of the whole output [t, h_q, d], NaN in the padding."""
        ids, draw = self.token_ids(), torch.Generator().manual_seed(self.seed + 1)
        dout = torch.randn(len(ids), self.heads, self.head_dim, generator=draw)
        dout[ids < 0] = float("nan")
        return dout.to(self.torch_dtype)


def under_torchrun() -> bool:
    """Whether this process is one of the ranks already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
