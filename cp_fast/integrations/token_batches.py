"""A batch of token ids with its labels, cut for one rank: what models of transformers are called with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.shared.balanced_table import check_holds, groups_of, table_of_batch
from cp_fast.integrations.shared.cp_batch import CpBatch, Parts
from cp_fast.integrations.shared.token_rows import TokenRows, digests, read_fills, read_rows
from cp_fast.thd import pad_thd_sequences_for_cp
from cp_ref.batches.sharding import position_ids as positions_of
from cp_ref.batches.sharding import shard
from cp_ref.batches.tensors import filled
from cp_ref.groups.agreement import collective, merged
from cp_ref.groups.group import Group
from cp_ref.problems.call_checks import check_context
from cp_ref.schedules.ownership import divisor
from cp_ref.schedules.values import read_count

__all__ = ["CpBatch", "ranks_of_batch", "shard_tokens"]


def ranks_of_batch(given: dict[str, Any]) -> list[Group]:
    """Return the groups that `shard_tokens` meets, by its unchecked keywords."""
    cp, over = given.get("cp"), given.get("over")
    if not isinstance(cp, ContextParallel):
        return []
    return [cp.comm, *([] if over is None else groups_of(over))]


@collective(ranks_of_batch)
def shard_tokens(
    batch: Mapping[str, torch.Tensor],
    *,
    cp: ContextParallel,
    pad_token_id: int = 0,
    shift_labels: bool = True,
    over: Any = None,
    fill: Mapping[str, float] | None = None,
    whole: Collection[str] = (),
) -> dict[str, Any]:
    """Cut this rank's part out of a batch that every rank of a context has whole, as arguments of a model. Collective.

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
    ...     return shard_tokens({"input_ids": ids, "labels": ids}, cp=ContextParallel(member))
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

    rows, count = _same_rows(cp, over, read)
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


def _same_rows(cp: ContextParallel, over: Any, read: Callable[[], tuple[TokenRows, Said]]) -> tuple[TokenRows, int]:
    """Return the rows of a batch, which all ranks of a context have. Count the targets on all ranks of `over`."""
    groups = [] if over is None else groups_of(over)
    found: list[TokenRows] = []

    def mine() -> list[Said]:
        check_holds(over, groups, cp)
        rows, said = read()
        found.append(rows)
        return [said]

    def targets() -> int:
        everyone = merged(cp, "shard_tokens", mine, lambda found: [one for each in found for one in each])
        _check_the_same(everyone, cp.rank)
        targets = found[0].targets
        return 0 if targets is None else int((targets != -100).sum())

    if not groups:
        count = targets()
        return found[0], count
    # All ranks of a context have the same targets.
    count = merged(groups, "a count of labels", lambda: targets() * (cp.rank == 0), sum)
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
