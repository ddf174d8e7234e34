"""The sequences of a batch over ranks, as each layer of a model is given them: its slices, its plans, its attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch

from cp_fast.api.attention import attention, plan_for
from cp_fast.api.checked_calls import checking
from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan, make_plan
from cp_fast.integrations.shared.mask_areas import BothWays, MaskAreas
from cp_fast.integrations.shared.token_rows import TokenRows
from cp_fast.runtime.handles import hide_from_checkpointing, outside_of_graphs
from cp_ref.batches.sharding import unshard
from cp_ref.batches.tensors import autocast, differentiable_once, filled, needs_grad, read_fill, taken, wide_dtype
from cp_ref.groups.agreement import merged
from cp_ref.groups.collectives import all_reduce_sum
from cp_ref.schedules.values import check_tensor

__all__ = ["CpBatch", "Parts"]

_OF_A_CALL = ("softmax_offset", "alibi_slopes", "dropout_seed")  # A plan has none of these.


class CpBatch:
    """The sequences of a batch, for every layer's attention: `shard_tokens` makes it.

    It is no dataclass, because fully_shard with a mixed precision policy copies the dataclasses among a module's
    arguments, field by field.

    Args:
        cp: for this batch: its layout is a table where that of the given one is "balanced".
        longest: how many positions the longest sequence has, padding of the rows included.
        cu_seqlens: global; None: all sequences are full.
        cu_seqlens_padded: of packed batches.
    """

    def __init__(
        self,
        cp: ContextParallel,
        qkv_format: str,
        longest: int,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_padded: torch.Tensor | None = None,
    ) -> None:
        self.cp, self.qkv_format, self.longest = cp, qkv_format, longest
        self.cu_seqlens, self.cu_seqlens_padded = cu_seqlens, cu_seqlens_padded
        self._plans: dict[Any, Plan] = {}  # Of linear layers and of attention to chosen keys, by kind.
        self._attention: dict[Any, tuple[ContextParallel, Plan]] = {}  # Plans of attention, with their contexts.
        self._areas: MaskAreas | None = None
        self._rows: TokenRows | None = None  # The batch was cut from these.
        self.mixes_rows = False  # True: a row of a slice has tokens of several rows.
        self.contexts = 1  # This number of contexts share a step: `shard_tokens` finds them in `over`.
        self.shape: torch.Size | None = None  # This rank's input_ids have it, [b, s/cp], after `shard_tokens`.
        self._cut: Callable[[TokenRows, torch.Tensor], Parts] | None = None  # It cuts other rows in the same way.
        self.image_rows: dict[str, tuple[torch.Tensor, int]] | None = None  # Images and videos: mine, and how many.
        self.both_ways: BothWays | None = None  # These tokens see each other both ways.

    def shard(self, x: torch.Tensor, fill_value: float = 0) -> torch.Tensor:
        """Cut this rank's slice out of another tensor of the batch, as its tokens were cut: weights of tokens, rewards,
        masks.

        Args:
            x: [b, s, ...], the same on all ranks, with a row for each token of input_ids.
            fill_value: the value of padding: a number of x's dtype; a float may be rounded.

        Returns:
            [b, s/cp, ...], with a row for each of the rank's input_ids. Differentiable.

        Raises:
            ValueError, TypeError: x has other axes; its dtype does not hold fill_value. RuntimeError: `shard_tokens`
            did not make this object.

        >>> from cp_fast.integrations.token_batches import shard_tokens
        >>> from cp_ref import SimGroup
        >>> ids, weights = torch.tensor([[5, 6, 7]]), torch.tensor([[0.1, 0.2, 0.3]])
        >>> def one(member):
        ...     batch = shard_tokens({"input_ids": ids}, cp=ContextParallel(member, layout="balanced"))
        ...     return batch["cp_batch"].shard(weights)
        >>> SimGroup(2).run(one)
        [tensor([[0.1000, 0.2000]]), tensor([[0.3000, 0.0000]])]
        """
        check_tensor("x", x, "a tensor [b, s, ...]")
        numbers, shape = self._numbers.to(x.device), list(self._known_rows.ids.shape)
        if list(x.shape[:2]) != shape:
            raise ValueError(f"x has shape {list(x.shape)}; it must begin with that of input_ids, {shape}")
        fill, rows = read_fill("fill_value", fill_value, x.dtype), x.flatten(0, 1)
        rows = torch.cat([rows, filled(rows, [1, *rows.shape[1:]], fill)])  # the last one is of padding
        return taken(rows, 0, (numbers.flatten() - 1) % len(rows)).view(*numbers.shape, *rows.shape[1:])

    def unshard(self, x: torch.Tensor) -> torch.Tensor:
        """Put together the whole of a tensor of which every rank has a slice, in the order of input_ids. Collective.

        Args:
            x: [b, s/cp, ...], with a row for each of this rank's input_ids: logits, losses, hidden states.

        Returns:
            [b, s, ...], the same on all ranks. Differentiable, as `cp_fast.unshard`.

        Raises:
            ValueError, TypeError: x has other axes, here or on another rank. RuntimeError: `shard_tokens` did not make
            this object.

        >>> from cp_fast.integrations.token_batches import shard_tokens
        >>> from cp_ref import SimGroup
        >>> ids = torch.tensor([[5, 6, 7]])
        >>> def one(member):
        ...     part = shard_tokens({"input_ids": ids}, cp=ContextParallel(member, layout="balanced"))
        ...     return part["cp_batch"].unshard(part["input_ids"]).tolist()
        >>> SimGroup(2).run(one)
        [[[5, 6, 7]], [[5, 6, 7]]]
        """

        def read() -> torch.Tensor:
            numbers = self._numbers
            check_tensor("x", x, "a tensor [b, s/cp, ...]")
            if x.shape[:2] != numbers.shape:
                raise ValueError(
                    f"x has shape {list(x.shape)}; it must begin with that of this rank's input_ids, "
                    f"{list(numbers.shape)}"
                )
            return numbers.to(x.device)

        merged(self.cp, "unshard of a batch", lambda: read() is None, any)
        numbers, shape, packed = read(), self._known_rows.ids.shape, self.qkv_format == "thd"
        how: dict[str, Any] = {"cp": self.cp, "plan": self.plan}
        places, whole = (unshard(y[0], **how) if packed else unshard(y, **how).flatten(0, 1) for y in (numbers, x))
        return whole[places.argsort()[len(places) - shape.numel() :]].view(*shape, *x.shape[2:])

    def at_last_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of each sequence's last token, on all ranks: [b, s/cp, n] -> [documents or rows, n]; 0 for
        a sequence without tokens. Collective; gradients are those of `cp_fast.integrations.sequences.sequence_sum`.
        """
        return self.sum_over(self.last_tokens(), x)

    def last_tokens(self) -> torch.Tensor:
        """int64 [b, s/cp] on the CPU: the number of the sequence whose last token this is, -1 for other tokens."""
        whole = self._known_rows.documents.clone()
        whole[:, :-1].masked_fill_(whole[:, :-1] == whole[:, 1:], -1)
        return self.shard(whole, -1)

    def rightmost(self, wanted: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Find each sequence's rightmost slot of those that are wanted, its first one where none is. Collective.

        Args:
            wanted: bool [b, s/cp], on the CPU; a row's padding is asked too.

        Returns:
            int64 [b, s/cp] on the CPU: the number of the sequence whose slot this is, -1 for other slots and for those
            of sequences without tokens. And the first sequence that has tokens, and whose slot is padding.
        """
        numbers, documents = self._numbers, self.documents
        of = documents if self._known_rows.packed else self.places[0]
        lengths = self._known_rows.cu_seqlens.diff()
        # Keys grow to the right. All unwanted keys are below all wanted ones. A token's key is odd.
        keys = 2 * torch.where(wanted, numbers, -numbers) + (documents >= 0)

        def mine() -> list[int]:
            least = torch.full((len(lengths) + 1,), torch.iinfo(torch.int64).min, device="cpu")
            return least.scatter_reduce(0, of.flatten() % len(least), keys.flatten(), "amax")[:-1].tolist()

        def largest(everyone: list[list[int]]) -> list[int]:
            return [max(each) for each in zip(*everyone, strict=True)]

        most = merged(self.cp, "the last token of each sequence", mine, largest)
        chosen = torch.tensor([*most, 0], device="cpu")[of]
        read = of.where((keys == chosen) & (documents >= 0), -1)
        odd = [number for number, key in enumerate(most) if key % 2 == 0 and lengths[number] > 0]
        return read, odd[0] if odd else None

    def sum_over(self, documents: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Sum x [b, s/cp, ...] over the tokens of each number in documents [b, s/cp], -1 for none of them, on all
        ranks: [documents or rows, ...], in float32 or wider. Collective, forward and backward.
        """
        count = len(self._known_rows.cu_seqlens) - 1
        wide = x.flatten(0, 1).to(wide_dtype(x.dtype))
        sums = wide.new_zeros(count + 1, *wide.shape[1:])  # the last one is of padding
        mine = sums.index_add(0, documents.flatten().to(x.device) % (count + 1), wide)[:count]
        return cast(Any, _SumOverRanks).apply(mine, self.cp)  # torch leaves apply untyped

    @property
    def plan(self) -> Plan:
        """Return the plan of this batch for `cp_fast.shard`, `unshard` and `roll`, on tensors with its padding. The
        first use makes it, on all ranks: collective.
        """
        return self.linear_plan(self._numbers.float())

    @cached_property
    def documents(self) -> torch.Tensor:
        """int64 [b, s/cp] on the CPU: the number of each token's document in a packed batch, else of its row; -1 for
        padding.
        """
        return self.shard(self._known_rows.documents, -1)

    @property
    def whole_shape(self) -> torch.Size:
        """Of the batch's input_ids, [b, s]."""
        return self._known_rows.ids.shape

    @property
    def has_padding(self) -> bool:
        """Whether rows of the batch have padding."""
        return bool((self._known_rows.documents < 0).any())

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two of int64 [b, s/cp] on the CPU: the row of the batch that each token lies in, and its place there; -1 and
        0 for tokens that the cut has added.
        """
        numbers, length = self._numbers, self.whole_shape[1]
        added = numbers == 0
        return ((numbers - 1) // length).masked_fill(added, -1), ((numbers - 1) % length).masked_fill(added, 0)

    @property
    def _known_rows(self) -> TokenRows:
        if self._rows is None:
            raise RuntimeError("this CpBatch was not made by shard_batch, which knows the tokens of its slices")
        return self._rows

    @cached_property
    def _numbers(self) -> torch.Tensor:
        """[b, s/cp] on the CPU: the places of this rank's tokens in the batch, from 1; 0 for padding."""
        rows = self._known_rows
        numbers = torch.arange(1, 1 + rows.ids.numel(), device="cpu").view(rows.ids.shape)
        assert self._cut is not None
        return self._cut(TokenRows(numbers, None, rows.cu_seqlens, rows.packed), numbers)[0]

    def areas(self, rows: int, tokens: int) -> MaskAreas:
        """The masks of this batch that are no windows; the first use makes them. [rows, tokens]: a slice's shape."""
        if self._areas is None:
            slot = tokens * self.cp.size
            full = slot * torch.arange(rows + 1, device="cpu")
            lengths = full if self.cu_seqlens is None else self.cu_seqlens
            self._areas = MaskAreas(self.cp, lengths, self.cu_seqlens_padded, slot, self.both_ways)
        return self._areas

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        sides: tuple[int, int, int],
        **scores: Any,
    ) -> torch.Tensor:
        """Compute one layer's attention: [b, s/cp, h, d] -> [b, s/cp, h, d_v]. Collective.

        The layers of one kind share a plan, which the first of them makes, or finds with an equal batch.

        Args:
            causal: whether a query sees no later token of its sequence, but for `both_ways`.
            sides: its window (left, right), as of `attention`, and the tokens of a chunk, of which it sees its own
                alone; 0: the sequences have no chunks.
            scores: further arguments of `attention`, None for its defaults.
        """
        if torch.compiler.is_compiling():
            return outside_of_graphs(CpBatch.attend, self, q, k, v, causal, sides, **scores)
        rows, areas = q.shape[:2], self._areas_of(q, causal, sides[2])
        if packed := areas is not None or self.qkv_format == "thd":
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        scores = {name: x for name, x in scores.items() if x is not None}
        if checking() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):  # A graph keeps a plan of its own.
            out = attention(q, k, v, **self._arguments(areas, causal, sides), **scores)
        else:
            cp, plan = self._attention_plan((q, k, v), areas, causal, sides, scores)
            out = attention(q, k, v, cp=cp, plan=plan, **{name: scores[name] for name in _OF_A_CALL if name in scores})
        return out.unflatten(0, rows) if packed else out

    def _attention_plan(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        areas: MaskAreas | None,
        causal: bool,
        sides: tuple[int, int, int],
        scores: dict[str, Any],
    ) -> tuple[ContextParallel, Plan]:
        """Return the plan of a layer's kind, and its context."""
        device, shapes = qkv[0].device, (x.shape for x in qkv)
        half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        stream = torch.cuda.current_stream(device).cuda_stream if qkv[0].is_cuda else 0
        kinds = (_kind(x) if isinstance(x, torch.Tensor) else x for x in scores.values())
        key = causal, sides, *shapes, qkv[0].dtype, half, device, stream, needs_grad(*qkv), *scores, *kinds
        if (found := self._attention.get(key)) is None:
            arguments = self._arguments(areas, causal, sides)
            found = self._attention[key] = arguments["cp"], plan_for(*qkv, **arguments, **scores)
        return found

    def _areas_of(self, x: torch.Tensor, causal: bool, chunk: int) -> MaskAreas | None:
        """The areas of a layer's mask, if it is no window. x: the layer's slice [b, s/cp, ...]."""
        if not chunk and (self.both_ways is None or not causal):
            return None
        areas = self.areas(*x.shape[:2])
        return areas if self.both_ways is not None or chunk < areas.longest else None

    def _arguments(self, areas: MaskAreas | None, causal: bool, sides: tuple[int, int, int]) -> dict[str, Any]:
        """The arguments of `attention` for a mask in this batch."""
        left, right, chunk = sides
        if areas is not None:
            return areas.arguments(left, chunk)
        lengths = {"cu_seqlens_q": self.cu_seqlens, "cu_seqlens_q_padded": self.cu_seqlens_padded}
        kinds = ("no_mask", "causal") if self.cu_seqlens is None else ("padding", "padding_causal")
        mask = {"attn_mask_type": kinds[causal], "window_size": (left, right)}
        return {"cp": self.cp, "qkv_format": self.qkv_format, **mask, **lengths}

    def linear_plan(self, x: torch.Tensor) -> Plan:
        """Return the plan of linear layers and convolutions, made by the first of them. x: a layer's slice [b, s/cp,
        ...].
        """
        heads = self.cp.a2a_size  # Linear layers have their own.
        return self._plan(x, x.dtype, ("linear",), heads_q=heads, heads_kv=heads, d_qk=64, d_v=64, linear=True)

    def sparse_plan(self, x: torch.Tensor, heads_q: int, heads_kv: int, d_qk: int, d_v: int, **more: Any) -> Plan:
        """Return the plan of sparse attention with these sizes, for the indexer too. x: a layer's slice [b, s/cp, ...];
        the plan is for its dtype, under torch.autocast for that one. more: window_size and softmax_type.
        """
        sizes: dict[str, Any] = {"heads_q": heads_q, "heads_kv": heads_kv, "d_qk": d_qk, "d_v": d_v, **more}
        dtype = autocast(x[:0]).dtype
        return self._plan(x, dtype, (dtype, *sizes.values()), **sizes, sparse=True)

    def _plan(self, x: torch.Tensor, dtype: torch.dtype, kind: tuple[Any, ...], **sizes: Any) -> Plan:
        """Return a causal plan of the batch. It is made once for each kind."""
        if torch.compiler.is_compiling():
            return outside_of_graphs(CpBatch._plan, self, x, dtype, kind, **sizes)
        key = x.shape[:2], x.device, *kind
        if key not in self._plans:
            if self.qkv_format != "thd":
                sizes |= {"batch_size": len(x), "seqlen_q": x.shape[1] * self.cp.size}
            with hide_from_checkpointing():  # A layer that is computed again finds the plan.
                self._plans[key] = make_plan(
                    cp=self.cp,
                    qkv_format=cast(Any, self.qkv_format),
                    attn_mask_type="causal" if self.cu_seqlens is None else "padding_causal",
                    cu_seqlens_q=self.cu_seqlens,
                    cu_seqlens_q_padded=self.cu_seqlens_padded,
                    dtype=dtype,
                    device=x.device,
                    **sizes,
                )
        return self._plans[key]


def _kind(x: torch.Tensor) -> tuple[object, ...]:
    """All that a plan depends on of a tensor of scores."""
    return x.shape, x.dtype, x.device, needs_grad(x)


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors. Its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: ContextParallel) -> torch.Tensor:
        ctx.cp = cp
        return all_reduce_sum(cp.comm, x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_reduce_sum(ctx.cp.comm, grad.contiguous()), None


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, CpBatch]  # ids, targets, positions
