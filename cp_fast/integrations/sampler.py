"""Groups of ranks as long as their documents: short documents on one rank, long ones on many.

    contexts = GroupsOfAllSizes(dist.group.WORLD)
    sampler = DocumentSampler(lengths, rank=dist.get_rank(), ranks=dist.get_world_size(), tokens=8192, documents=64)
    for rounds in sampler:  # of one step
        parts = [shard_batch(pack([rows[i] for i in chosen]), cp=contexts[size]) for size, chosen in rounds]
        count = count_tokens(torch.cat([(part["labels"] != -100).flatten() for part in parts]), over=dist.group.WORLD)
        for part in parts:
            loss = model(**part | {"num_items_in_batch": count}).loss
            loss_for_backward(loss, averaged_over=model).backward()

A document that fits on one rank sends nothing. Megatron-LM calls this dynamic context parallelism. In each round of a
step every rank has one part of a batch, alone or in a group of 2, 4, 8 ... ranks. So all ranks call the model equally
often, as FSDP and DDP need it. One denominator counts the labels of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cp_fast.api.fast_context import ContextParallel
from cp_fast.integrations.shared.token_rows import wide_integers
from cp_ref.groups.agreement import merged
from cp_ref.groups.group import PaperGroup
from cp_ref.groups.process_groups import as_group
from cp_ref.schedules.values import check_data, kind_of, read_count, read_several

__all__ = ["DocumentSampler", "GroupsOfAllSizes", "RankGroup", "pack", "share_out"]


class RankGroup(NamedTuple):
    """Some consecutive ranks that share a packed batch in one round: `size` of them from `first`, and the numbers of
    its documents.
    """

    first: int
    size: int
    documents: list[int]


def share_out(lengths: Sequence[int], ranks: int, tokens: int) -> list[list[RankGroup]]:
    """Share documents out by rounds of groups: each document once, and each rank once a round.

    A document gets the smallest group that holds it: 1, 2, 4 ... ranks. Longest documents come first, each to the group
    of its size that has the least work and room for it, else to new ranks of a round, else to a larger group with room,
    else to a new round. The work of a document counts as its pairs and its tokens.

    Args:
        lengths: tokens of each document.
        ranks: how many there are, a power of two.
        tokens: how many a rank holds at most.

    Raises:
        ValueError, TypeError: a document does not fit on all ranks; ranks are no power of two.

    >>> share_out([20, 4, 3, 9], ranks=4, tokens=5)
    [[RankGroup(first=0, size=4, documents=[0])], [RankGroup(first=0, size=2, documents=[3]), \
RankGroup(first=2, size=1, documents=[1]), RankGroup(first=3, size=1, documents=[2])]]
    """
    _check_ranks(ranks)
    read_count("tokens", tokens, at_least=1)
    lengths = _read_lengths(lengths)
    rounds: list[list[RankGroup]] = []
    taken: list[int] = []  # The ranks that each round has given away.
    room: dict[tuple[int, int], int] = {}  # (round, group) -> the tokens left.
    work: dict[tuple[int, int], float] = {}
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        length = lengths[number]
        size = _size_for(number, length, ranks, tokens)
        fitting = [place for place, left in room.items() if left >= length]
        same = [place for place in fitting if rounds[place[0]][place[1]].size == size]
        free = next((n for n, held in enumerate(taken) if ranks - held >= size), None)
        if free is None and not fitting:
            rounds.append([])
            taken.append(0)
            free = len(rounds) - 1
        if free is not None:  # An idle rank is worth more than a full one.
            place = free, len(rounds[free])
            rounds[free].append(RankGroup(taken[free], size, []))
            taken[free] += size
            room[place], work[place] = size * tokens, 0.0
        else:
            place = min(same or fitting, key=lambda one: work[one])
        group = rounds[place[0]][place[1]]
        group.documents.append(number)
        room[place] -= length
        work[place] += length * (length + tokens) / group.size
    for groups, held in zip(rounds, taken, strict=True):
        groups += [RankGroup(first, 1, []) for first in range(held, ranks)]
    return rounds


class DocumentSampler:
    """The rounds of each step for one rank, the same steps on all ranks.

    The documents of a step do not depend on the number of ranks. So a run that ended behind step k of an epoch goes on
    with `itertools.islice(sampler, k, None)` and the same seed and epoch, also on another number of ranks. A DataLoader
    takes it as `sampler`, with `batch_size=None`, and calls `dataset[rounds]`.

    Args:
        lengths: tokens of each document of the data, in their order, the same on all ranks.
        rank, ranks: which one of how many, a power of two.
        tokens: how many a rank holds at most in a round: of documents. Contexts with layout "balanced" add no padding;
            the other layouts fill each document up to a multiple of 2 * size or of size.
        documents: how many a step has. The last step of an epoch has what is left.
        seed: an integer, of the order of documents, which `set_epoch` changes; None keeps their order.

    Iterating gives each step as a list of (size, numbers of documents): with which context this rank is called in each
    round, and for what. No numbers: `pack([])` is a batch without labels, so that the rank calls its model too.

    >>> sampler = DocumentSampler([20, 4, 3, 9, 5], rank=3, ranks=4, tokens=5, documents=4, seed=None)
    >>> list(sampler), len(sampler)
    ([[(4, [0]), (1, [2])], [(1, [])]], 2)
    """

    def __init__(
        self, lengths: Iterable[int], *, rank: int, ranks: int, tokens: int, documents: int, seed: int | None = 0
    ) -> None:
        _check_ranks(ranks)
        self.rank = read_count("rank", rank, at_least=0, at_most=ranks - 1)
        self.documents = read_count("documents", documents, at_least=1)
        if seed is not None:  # Each process hashes a string in another way, so ranks would get other orders.
            read_count("seed", seed, at_least=0)
        read_count("tokens", tokens, at_least=1)
        self.lengths = _read_lengths(lengths)
        for number, length in enumerate(self.lengths):
            _size_for(number, length, ranks, tokens)
        self.ranks, self.tokens, self.seed, self.epoch = ranks, tokens, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of another epoch from now on."""
        self.epoch = read_count("epoch", epoch, at_least=0)

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.documents)

    def __iter__(self) -> Iterator[list[tuple[int, list[int]]]]:
        order = list(range(len(self.lengths)))
        if self.seed is not None:
            generator = torch.Generator("cpu").manual_seed(hash((self.seed, self.epoch)) % 2**63)
            order = torch.randperm(len(order), generator=generator, device="cpu").tolist()
        for start in range(0, len(order), self.documents):
            step = order[start : start + self.documents]
            rounds = share_out([self.lengths[number] for number in step], self.ranks, self.tokens)
            mine = [next(g for g in groups if g.first <= self.rank < g.first + g.size) for groups in rounds]
            yield [(group.size, [step[n] for n in group.documents]) for group in mine]


class GroupsOfAllSizes(Mapping[int, ContextParallel]):
    """This rank's contexts of 1, 2, 4 ... ranks, by size. Collective over all processes of the group.

    Args:
        group: all processes that share the data, their number a power of two.
        options: of each `ContextParallel`: cp_comm_type ("a2a+p2p" needs pairs of groups, and is refused) and layout.

    Raises:
        ValueError, TypeError: the number of processes is no power of two; `cp_comm_type` is "a2a+p2p"; an option is
        wrong, here or on another process, or not the same on all.
    """

    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        comm = as_group(group, "p2p")

        def read() -> list[str]:
            if options.get("cp_comm_type") == "a2a+p2p":
                raise ValueError(
                    "cp_comm_type is 'a2a+p2p', which needs a pair of groups for each size; take another one"
                )
            _check_ranks(comm.size)
            ContextParallel(PaperGroup(1), **options)
            return [str(sorted(options.items()))]

        what = "an agreement on contexts"
        everyone = merged([comm], what, read, lambda found: [one for each in found for one in each])
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise ValueError(f"options are {theirs} on rank {rank} and {everyone[0]} on rank 0; they must be equal")
        members = dist.get_process_group_ranks(group)
        self._contexts: dict[int, ContextParallel] = {}
        size = 1
        while size <= len(members):
            groups = [members[first : first + size] for first in range(0, len(members), size)]
            mine, _ = dist.new_subgroups_by_enumeration(groups)
            self._contexts[size] = ContextParallel(mine, **options)
            size *= 2

    def __getitem__(self, size: int) -> ContextParallel:
        return self._contexts[size]

    def __iter__(self) -> Iterator[int]:
        return iter(self._contexts)

    def __len__(self) -> int:
        return len(self._contexts)


def pack(documents: Sequence[Mapping[str, Any]], pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """Pack documents into one row, as `shard_batch` takes it.

    Args:
        documents: each with input_ids [t], and labels [t] or none, which then are the input_ids. An attention_mask [t]
            of ones and position_ids 0, 1, 2 ... say nothing else. Texts and numbers of a document are left out.
        pad_token_id: the one token of a row without documents, which learns nothing.

    Raises:
        ValueError, TypeError: naming the document, the entry and the rule: ids are no integers, labels are not one a
            token, a mask or positions say padding or several documents, or there are other entries with one value a
            token.

    >>> pack([{"input_ids": [5, 6]}, {"input_ids": [7], "labels": [-100]}])
    {'input_ids': tensor([[5, 6, 7]]), 'position_ids': tensor([[0, 1, 0]]), 'labels': tensor([[   5,    6, -100]])}
    """
    if not isinstance(documents, Sequence):
        raise TypeError(f"documents is {kind_of(documents)}; it must be a list of documents with input_ids")
    read_count("pad_token_id", pad_token_id, at_least=-(2**63), at_most=2**63 - 1)  # Even if no row needs it.
    rows = [_row(f"documents[{number}]", document) for number, document in enumerate(documents)]
    if not any(len(ids) for ids, *_ in rows):
        rows = [_row("pad_token_id", {"input_ids": [pad_token_id], "labels": [-100]})]
    return {name: torch.cat(found)[None] for name, found in zip(_NAMES, zip(*rows, strict=True), strict=True)}


def _row(name: str, document: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ids, positions and labels of a document, one each a token."""
    if not isinstance(document, Mapping) or "input_ids" not in document:
        what = "a dict without input_ids" if isinstance(document, Mapping) else kind_of(document)
        raise TypeError(f"{name} is {what}; it must be a dict with input_ids [t]")
    ids = _integers(f"{name}['input_ids']", document["input_ids"], None)
    for entry, x in document.items():
        if entry in ("input_ids", *_SAID) or getattr(x, "is_nested", False):
            continue
        length = [len(x)] if isinstance(x, list | tuple) else list(getattr(x, "shape", ()))[:1]
        if length == [len(ids)]:
            raise ValueError(
                f"{name} has {entry!r}, one value a token, which pack does not join; leave it out, and let labels be "
                "-100 where a mask says that nothing is learnt"
            )
    positions = torch.arange(len(ids))
    rest = {entry: _integers(f"{name}[{entry!r}]", x, len(ids)) for entry, x in document.items() if entry in _SAID}
    rules = {"attention_mask": (torch.ones_like(positions), "1 for each token")}
    rules["position_ids"] = positions, "0, 1, 2 and so on"
    for entry, (plain, rule) in rules.items():
        if entry in rest and not torch.equal(rest[entry].cpu(), plain.cpu()):
            raise ValueError(
                f"{name}[{entry!r}] is not {rule}; pack takes documents one by one and without padding, and makes "
                "position_ids itself"
            )
    return ids, positions, rest.get("labels", ids)


def _integers(name: str, values: Any, length: int | None) -> torch.Tensor:
    """A row of integers, int64; length: of the document's tokens."""
    if values is None:
        raise TypeError(f"{name} is None; leave it out, or give integers, one a token")
    x = _tensor(name, values)
    if x.dtype == torch.bool and not name.endswith("['attention_mask']"):
        raise TypeError(f"{name} has dtype torch.bool; it must be integers, one a token")
    if x.ndim != 1 or x.dtype.is_floating_point or x.dtype.is_complex or (length is not None and len(x) != length):
        raise ValueError(
            f"{name} has shape {list(x.shape)} and dtype {x.dtype}; it must be integers "
            f"[{'t' if length is None else length}], one a token"
        )
    return wide_integers(name, x)


def _tensor(name: str, values: Any) -> torch.Tensor:
    """The values of a document's entry, which may be a list, an array or a tensor."""
    if isinstance(values, torch.Tensor):
        check_data(name, values)
        return values
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
        raise TypeError(f"{name} is {kind_of(values)}; it must be integers, one a token")
    if not len(values):
        return torch.zeros(0, dtype=torch.int64)
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # PyTorch refuses other than 64-bit numbers.
        for at, value in enumerate(values):
            read_count(f"{name}[{at}]", value, at_least=-(2**63), at_most=2**63 - 1)
        raise TypeError(f"{name} is {kind_of(values)}; it must be integers, one a token") from None


_NAMES = ("input_ids", "position_ids", "labels")
_SAID = ("labels", "attention_mask", "position_ids")  # A document may have these in addition to input_ids.


def _size_for(number: int, length: int, ranks: int, tokens: int) -> int:
    """The smallest power of two of ranks that holds a document."""
    size = 1
    while size * tokens < length:
        size *= 2
    if size > ranks:
        raise ValueError(
            f"lengths[{number}] is {length}; {ranks} ranks hold {ranks * tokens} tokens, {tokens} each: give more "
            "ranks, or more tokens a rank"
        )
    return size


def _read_lengths(lengths: Any) -> list[int]:
    """The documents' numbers of tokens: of a list, an array, a tensor or what else goes through them in their order."""
    if isinstance(lengths, torch.Tensor):
        check_data("lengths", lengths)
        lengths = lengths.tolist()
    if isinstance(lengths, str | bytes | Mapping | Set) or not isinstance(lengths, Iterable):
        raise TypeError(f"lengths is {kind_of(lengths)}; it must be a list of the documents' numbers of tokens")
    found = enumerate(read_several("lengths", lengths))
    return [read_count(f"lengths[{number}]", length, at_least=0) for number, length in found]


def _check_ranks(ranks: int) -> None:
    if read_count("ranks", ranks, at_least=1) & (ranks - 1):
        raise ValueError(f"ranks is {ranks}; it must be a power of two, so that groups of all sizes divide it")
