"""A batch of token ids with its labels, cut for one rank: what models of transformers are called with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any, NoReturn, cast

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.api.plan import Plan, make_plan
from cp_fast.integrations.shared.balanced_table import check_holds, groups_of, table_of_batch
from cp_fast.integrations.shared.mask_areas import MaskAreas, Run
from cp_fast.integrations.shared.token_rows import TokenRows, digests, read_fills, read_rows
from cp_fast.runtime.handles import hide_from_checkpointing, outside_of_graphs
from cp_fast.thd import pad_thd_sequences_for_cp
from cp_ref.batches.sharding import position_ids as positions_of
from cp_ref.batches.sharding import shard, unshard
from cp_ref.batches.tensors import autocast, differentiable_once, filled, read_fill, taken, wide_dtype
from cp_ref.groups.collectives import all_reduce_sum, collective, together
from cp_ref.problems.call_checks import check_context
from cp_ref.schedules.ownership import divisor
from cp_ref.schedules.values import check_tensor, read_count

__all__ = ["CpBatch", "raise_on_all_ranks", "shard_batch"]


class CpBatch:
    """The sequences of a batch, for every layer's attention: `shard_batch` makes it.

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
        self._plans: dict[Any, Plan] = {}
        self._areas: MaskAreas | None = None
        self._rows: TokenRows | None = None  # The batch was cut from these.
        self.mixes_rows = False  # True: a row of a slice has tokens of several rows.
        self.contexts = 1  # This number of contexts share a step: `shard_batch` finds them in `over`.
        self.shape: torch.Size | None = None  # This rank's input_ids have it, [b, s/cp], after `shard_batch`.
        self._cut: Callable[[TokenRows, torch.Tensor], Parts] | None = None  # It cuts other rows in the same way.
        self.image_rows: dict[str, tuple[torch.Tensor, int]] | None = None  # Images and videos: mine, and how many.
        self.both_ways: tuple[Run, ...] = ()  # These tokens see each other both ways.

    def shard(self, x: torch.Tensor, fill_value: float = 0) -> torch.Tensor:
        """This rank's slice of another tensor of the batch, cut as its tokens were: weights of tokens, rewards, masks.

        Args:
            x: [b, s, ...], the same on all ranks, with a row for each token of input_ids.
            fill_value: the value of padding: a number of x's dtype; a float may be rounded.

        Returns:
            [b, s/cp, ...], with a row for each of the rank's input_ids. Differentiable.

        Raises:
            ValueError, TypeError: x has other axes; its dtype does not hold fill_value. RuntimeError: `shard_batch` did
            not make this object.

        >>> from cp_ref import SimGroup
        >>> ids, weights = torch.tensor([[5, 6, 7]]), torch.tensor([[0.1, 0.2, 0.3]])
        >>> def one(member):
        ...     batch = shard_batch({"input_ids": ids}, cp=ContextParallel(member, layout="balanced"))
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
        """The whole of a tensor of which every rank has a slice, in the order of input_ids. Collective.

        Args:
            x: [b, s/cp, ...], with a row for each of this rank's input_ids: logits, losses, hidden states.

        Returns:
            [b, s, ...], the same on all ranks. Differentiable, as `cp_fast.unshard`.

        Raises:
            ValueError, TypeError: x has other axes, here or on another rank. RuntimeError: `shard_batch` did not make
            this object.

        >>> from cp_ref import SimGroup
        >>> ids = torch.tensor([[5, 6, 7]])
        >>> def one(member):
        ...     part = shard_batch({"input_ids": ids}, cp=ContextParallel(member, layout="balanced"))
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

        together([self.cp.comm], lambda: read() is None, any)
        numbers, shape, packed = read(), self._known_rows.ids.shape, self.qkv_format == "thd"
        how: dict[str, Any] = {"cp": self.cp, "plan": self.plan}
        places, whole = (unshard(y[0], **how) if packed else unshard(y, **how).flatten(0, 1) for y in (numbers, x))
        return whole[places.argsort()[len(places) - shape.numel() :]].view(*shape, *x.shape[2:])

    def at_last_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """The values of each sequence's last token, on all ranks: [b, s/cp, n] -> [documents or rows, n]; 0 for a
        sequence without tokens. Collective; gradients are those of `cp_fast.integrations.sequences.sequence_sum`.
        """
        return self.sum_over(self.last_tokens(), x)

    def last_tokens(self) -> torch.Tensor:
        """int64 [b, s/cp] on the CPU: the number of the sequence whose last token this is, -1 for other tokens."""
        whole = self._known_rows.documents.clone()
        whole[:, :-1].masked_fill_(whole[:, :-1] == whole[:, 1:], -1)
        return self.shard(whole, -1)

    def rightmost(self, wanted: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Each sequence's rightmost slot of those that are wanted, its first one where none is. Collective.

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

        most = together([self.cp.comm], mine, lambda everyone: [max(each) for each in zip(*everyone, strict=True)])
        chosen = torch.tensor([*most, 0], device="cpu")[of]
        read = of.where((keys == chosen) & (documents >= 0), -1)
        odd = [number for number, key in enumerate(most) if key % 2 == 0 and lengths[number] > 0]
        return read, odd[0] if odd else None

    def sum_over(self, documents: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The sums of x [b, s/cp, ...] over the tokens of each number in documents [b, s/cp], -1 for none of them, on
        all ranks: [documents or rows, ...], in float32 or wider. Collective, forward and backward.
        """
        count = len(self._known_rows.cu_seqlens) - 1
        wide = x.flatten(0, 1).to(wide_dtype(x.dtype))
        sums = wide.new_zeros(count + 1, *wide.shape[1:])  # the last one is of padding
        mine = sums.index_add(0, documents.flatten().to(x.device) % (count + 1), wide)[:count]
        return cast(Any, _SumOverRanks).apply(mine, self.cp)  # torch leaves apply untyped

    @property
    def plan(self) -> Plan:
        """The plan of this batch for `cp_fast.shard`, `unshard` and `roll`, on tensors with its padding. The first use
        makes it, on all ranks: collective.
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

    def linear_plan(self, x: torch.Tensor) -> Plan:
        """The plan of linear layers and convolutions, made by the first of them. x: a layer's slice [b, s/cp, ...]."""
        heads = self.cp.a2a_size  # Linear layers have their own.
        return self._plan(x, x.dtype, ("linear",), heads_q=heads, heads_kv=heads, d_qk=64, d_v=64, linear=True)

    def sparse_plan(self, x: torch.Tensor, heads_q: int, heads_kv: int, d_qk: int, d_v: int) -> Plan:
        """The plan of sparse attention with these sizes, for the indexer too. x: a layer's slice [b, s/cp, ...]; the
        plan is for its dtype, under torch.autocast for that one.
        """
        sizes = {"heads_q": heads_q, "heads_kv": heads_kv, "d_qk": d_qk, "d_v": d_v}
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


def raise_on_all_ranks(given: dict[str, Any], error: Exception) -> NoReturn:
    """Raise an error on all ranks that a call of `shard_batch` would meet."""

    def refuse() -> NoReturn:
        raise error

    if isinstance(cp := given.get("cp"), ContextParallel):
        _agreed(cp, given.get("over"), refuse)
    raise error


@collective(raise_on_all_ranks)
def shard_batch(
    batch: Mapping[str, torch.Tensor],
    *,
    cp: ContextParallel,
    pad_token_id: int = 0,
    shift_labels: bool = True,
    over: Any = None,
    fill: Mapping[str, float] | None = None,
    whole: Collection[str] = (),
) -> dict[str, Any]:
    """This rank's part of a batch that every rank of a context has whole, as arguments of a model. Collective.

    Args:
        batch: input_ids [b, s], and any of
            position_ids [1, t]: the batch is packed; the positions of each document are 0, 1, 2 and so on. With several
                rows, or with a mask, they may only say what is so without them: 0, 1, 2 and so on in each row.
            attention_mask [b, s]: 1 for tokens, 0 for padding behind them.
            labels [b, s]: one for each token, -100 where nothing is to be learnt, as on padding.
            All are of integer dtypes, with numbers that int64 has. And any tensors [b, s, ...] that `fill` names, of
            any real dtype.
        cp: the group, the schedule and the layout. "balanced" shares documents, and rows with padding, out by the work
            that they make under a causal mask.
        pad_token_id: what lengths are filled up with until they divide.
        shift_labels: whether a token learns the label of the token behind it, as causal language models do: these take
            labels that are equal to input_ids, and shift them. False: a token learns its own label, as in masked
            language models and in token classification.
        fill: the further tensors of the batch, with a row for each token, and the value that each has on padding, a
            number of its dtype: {"advantages": 0.0, "token_type_ids": 0}.
        whole: the names of further tensors of the batch, of any shape, that every rank gets as they are: pixels.
        over: the ranks that share a step, and so the mean of its loss: a ProcessGroup or a DeviceMesh of all data and
            context parallel ranks (not of tensor parallel ranks, which have the same tokens), or a ContextParallel.
            None: the ranks of cp alone. Collective over all of them.

    Returns:
        input_ids, position_ids (inside each document) and cp_batch. With labels also labels, int64, shifted where that
        was asked for; then as shift_labels too, for models that would shift them again; and num_items_in_batch, int64,
        how many labels count on all ranks of `over`. A model's loss is then this rank's part of the mean: the parts of
        all ranks of `over` add up to it, and so do the gradients. `cp_fast.integrations.loss.loss_for_backward` makes
        of the part what a wrapper that averages gradients needs. The entries of `fill` are cut as input_ids are;
        `cp_batch.shard` and `cp_batch.unshard` cut and gather further tensors, and `cp_batch.plan` is the batch's plan.

    Raises:
        ValueError, TypeError: an entry that is not known, a row whose entries do not fit its tokens, a mask with
        padding before or between tokens, a label on padding, a packed batch with a mask, a value of padding that the
        entry's dtype does not hold; a batch, or another argument, that is not the same on all ranks of cp, whose
        loaders then gave them other rows. What one rank refuses raises on all ranks of cp
        and of `over`.

    >>> from cp_ref import SimGroup
    >>> ids = torch.tensor([[5, 6, 7, 8]])
    >>> def one(member):
    ...     return shard_batch({"input_ids": ids, "labels": ids}, cp=ContextParallel(member))
    >>> [(part["input_ids"].tolist(), part["labels"].tolist()) for part in SimGroup(2).run(one)]
    [([[5, 8]], [[6, -100]]), ([[6, 7]], [[7, 8]])]
    """
    check_context(cp, ContextParallel)

    def read() -> tuple[TokenRows, Said]:
        rows = read_rows(batch, shift_labels, fill, whole)
        bounds = torch.iinfo(rows.ids.dtype)
        pad = read_count("pad_token_id", pad_token_id, at_least=bounds.min, at_most=bounds.max)
        said = {"pad_token_id": pad, "shift_labels": shift_labels, "fill": str(sorted(read_fills(batch, fill).items()))}
        return rows, {"batch": digests(batch), **said, "whole": sorted(whole)}

    rows, count = _agreed(cp, over, read)
    pad_token_id, fills = int(pad_token_id), read_fills(batch, fill)
    targets = torch.full(rows.ids.shape, -100, device=rows.ids.device) if rows.targets is None else rows.targets
    cut = _balanced if cp.layout == "balanced" else _packed if rows.packed else _padded
    ids, targets, positions, sequences = cut(rows, targets, cp, pad_token_id)
    sequences._rows = replace(rows, ids=rows.ids.to("meta"), targets=None, others={})
    sequences._cut = lambda rows, targets: cut(rows, targets, cp, 0)
    sequences.shape = ids.shape
    sequences.contexts = 1 if over is None else prod(group.size for group in groups_of(over)) // cp.size
    positions = positions.clamp(max=max(rows.longest - 1, 0))  # Padding's too: a model's table may end there.
    made: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "cp_batch": sequences}
    if rows.targets is not None:
        made |= {"labels": targets, "num_items_in_batch": torch.tensor(count, device=targets.device)}
        made |= {"shift_labels": targets} if shift_labels else {}
    made |= {name: sequences.shard(x, fills[name]) for name, x in rows.others.items()}
    return made | {name: batch[name] for name in whole}


Said = dict[str, Any]  # the arguments of a call, in a form to compare; of the batch digests


def _agreed(cp: ContextParallel, over: Any, read: Callable[[], tuple[TokenRows, Said]]) -> tuple[TokenRows, int]:
    """Return the rows of a batch, which all ranks of a context have. Count the targets on all ranks of `over`."""
    groups = [] if over is None else groups_of(over)
    found: list[TokenRows] = []

    def same() -> int:
        def mine() -> list[Said]:
            check_holds(over, groups, cp)
            rows, said = read()
            found.append(rows)
            return [said]

        with cp.naming_errors("shard_batch"):
            everyone = together([cp.comm], mine, lambda all_of_them: [one for each in all_of_them for one in each])
        _check_the_same(everyone, cp.rank)
        targets = found[0].targets
        return 0 if targets is None else int((targets != -100).sum())

    if not groups:
        count = same()
        return found[0], count
    count = together(groups, lambda: same() * (cp.rank == 0), sum)  # All ranks of a context have the same targets.
    return found[0], count


def _check_the_same(everyone: list[Said], rank: int) -> None:
    for other, said in enumerate(everyone):
        mine, theirs = everyone[rank]["batch"], said["batch"]
        if theirs != mine:
            odd = ", ".join(name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name))
            raise ValueError(
                f"batch differs between rank {rank} and rank {other} in {odd}; all ranks of a context get the same "
                "batch whole (Trainer's and accelerate's own loaders give every process another)"
            )
        for name, value in everyone[rank].items():
            if value != said[name]:
                raise ValueError(
                    f"{name} differs between rank {rank} and rank {other}: {value} and {said[name]}; all ranks of a "
                    "context give the same"
                )


def _packed(rows: TokenRows, targets: torch.Tensor, cp: ContextParallel, pad_token_id: int) -> Parts:
    factor = divisor(cp.layout, cp.size)
    padded = pad_thd_sequences_for_cp(rows.ids[0], targets[0], rows.cu_seqlens, factor, pad_token_id, -100)
    ids, targets, cu_padded = padded
    how: dict[str, Any] = {"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": cu_padded}
    positions = positions_of(**how, device=ids.device)[None]
    sequences = CpBatch(cp, "thd", rows.longest, rows.cu_seqlens, cu_padded.cpu())
    return shard(ids, **how)[None], shard(targets, **how)[None], positions, sequences


def _padded(rows: TokenRows, targets: torch.Tensor, cp: ContextParallel, pad_token_id: int) -> Parts:
    missing = -rows.ids.shape[1] % divisor(cp.layout, cp.size)
    ids, targets = _longer(rows.ids, missing, pad_token_id), _longer(targets, missing, -100)
    full = bool((rows.cu_seqlens.diff() == ids.shape[1]).all())
    positions = positions_of(cp=cp, seqlen=ids.shape[1], device=ids.device).expand(len(ids), -1)
    sequences = CpBatch(cp, "bshd", rows.longest, None if full else rows.cu_seqlens)
    return shard(ids, cp=cp), shard(targets, cp=cp), positions, sequences


def _longer(x: torch.Tensor, missing: int, value: int) -> torch.Tensor:
    """Append `missing` columns of a value to [b, s]. `F.pad` would round large values."""
    return torch.cat([x, filled(x, [len(x), missing], value)], 1)


def _balanced(rows: TokenRows, targets: torch.Tensor, cp: ContextParallel, pad_token_id: int) -> Parts:
    """Rows of any lengths; only all of them together have to divide."""
    missing = -rows.ids.shape[1] % cp.size
    ids, targets = _longer(rows.ids, missing, pad_token_id), _longer(targets, missing, -100)
    if rows.packed:
        cu_padded = rows.cu_seqlens.clone()
        cu_padded[-1] += missing
        table = table_of_batch(cp, "thd", rows.cu_seqlens, cu_padded)
        sequences = CpBatch(table.over(cp), "thd", rows.longest, rows.cu_seqlens, cu_padded)
        ids, targets = (shard(x[0], cp=cp, plan=table)[None] for x in (ids, targets))
    else:
        table = table_of_batch(cp, "bshd", rows.cu_seqlens, seqlen=ids.shape[1])
        sequences = CpBatch(table.over(cp), "bshd", rows.longest, rows.cu_seqlens)
        sequences.mixes_rows = len(ids) > 1
        ids, targets = (shard(x, cp=cp, plan=table) for x in (ids, targets))
    positions = positions_of(cp=cp, plan=table, device=ids.device)
    return ids, targets, positions[None] if rows.packed else positions, sequences
