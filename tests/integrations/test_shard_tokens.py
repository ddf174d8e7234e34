"""Batches cut for the ranks, and losses over them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cp_fast
from cp_fast.integrations.loss import count_tokens, loss_for_backward, token_mean
from cp_fast.integrations.token_batches import shard_tokens
from cp_ref import SimGroup
from tests.dist.workers import Processes

IDS = torch.arange(16).view(2, 8)
ONES = torch.ones(2, 8, dtype=torch.int64)


def packed(*positions: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.arange(len(positions))[None],
        "position_ids": torch.tensor([positions], dtype=torch.int64),
    }


def with_mask(row: list[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS[:, :5], "attention_mask": torch.tensor([[1] * 5, row])}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "labels one token short": ({"input_ids": IDS, "labels": IDS[:, 1:]}, "row 0 of labels has 7 entries for 8 tokens"),
    "labels of another batch": ({"input_ids": IDS, "labels": IDS[:1]}, r"labels has shape \[1, 8\]; .* \[2, 8\]"),
    "labels that are no integers": ({"input_ids": IDS, "labels": IDS / 2}, "labels has dtype torch.float32"),
    "ids without a batch": ({"input_ids": IDS[0]}, r"input_ids has shape \[8\]; it must be \[b, s\]"),
    "ids that are no tensor": ({"input_ids": [[1, 2]]}, "input_ids is of type list; it must be a tensor"),
    "positions with a gap": (packed(0, 1, 2, 0, 4, 5), "row 0 of position_ids has 4 at token 4, behind 0"),
    "positions of no token": (packed(), "row 0 of position_ids has no token; a packed batch has at least one"),
    "positions that do not begin": (packed(1, 2, 3), "row 0 of position_ids does not begin with 0"),
    "positions one short": (packed(0, 1, 2) | {"input_ids": IDS[:1]}, "row 0 of position_ids has 3 entries for 8"),
    "a mask with another number": (with_mask([1, 1, 1, 1, 2]), "row 1 of attention_mask has 2 at token 4"),
    "a mask with a hole": (with_mask([1, 0, 1, 1, 1]), "row 1 of attention_mask has padding before or between tokens"),
    "padding on the left": (with_mask([0, 1, 1, 1, 1]), "row 1 of attention_mask has padding before or between tokens"),
    "a mask of another size": (
        {"input_ids": IDS, "attention_mask": ONES[:, :5]},
        "row 0 of attention_mask has 5 entries for 8 tokens",
    ),
    "a label on padding": (
        with_mask([1, 1, 1, 0, 0]) | {"labels": IDS[:, :5]},
        "row 1 of labels has 11 at token 3, which is padding by attention_mask",
    ),
    "positions of several axes": (
        packed(0, 1, 2, 0, 1) | {"position_ids": torch.tensor([[[0, 1, 2, 0, 1]]] * 3)},
        r"position_ids has shape \[3, 1, 5\], .* same on all axes: give position_ids\[0\]",
    ),
    "positions of documents in several rows": (
        {"input_ids": IDS, "position_ids": torch.arange(4).repeat(2, 2)},
        r"position_ids is given with input_ids \[2, 8\]; it says .* leave position_ids out",
    ),
    "positions and a mask": (
        packed(0, 1, 0, 1) | {"attention_mask": ONES[:1, :4]},
        r"with input_ids \[1, 4\] and attention_mask; .* leave the mask out, with all documents in one row",
    ),
    "no ids": ({"labels": IDS}, "it must have input_ids"),
    "an unknown entry": (
        {"input_ids": IDS, "token_type_ids": IDS},
        "say what its padding is: fill={'token_type_ids': 0}",
    ),
    "no dict": ([IDS], "batch is of type list; it must be a dict"),  # type: ignore[dict-item]
}
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown keyword": ({"padding": 3}, "got an unexpected keyword argument 'padding'"),
    "a padding id that is none": ({"pad_token_id": "0"}, "pad_token_id is '0'; it must be an integer"),
    "an entry that is filled already": ({"fill": {"labels": 0}}, "fill names 'labels', which shard_batch fills itself"),
    "an entry that is not there": ({"fill": {"weights": 0}}, "fill names 'weights', which batch does not have"),
    "a name that is none": ({"fill": {3: 0}}, "fill has 3; it must have names of tensors in batch"),
    "another padding id": ({"pad_token_id": 7}, "pad_token_id differs between rank . and rank .: . and"),
    "another flag": ({"shift_labels": False}, "shift_labels differs between rank . and rank .: "),
    "a name for names": ({"whole": "pixels"}, "whole is 'pixels'; it must be a list of names"),
    "a whole that is not there": ({"whole": ["pixels"]}, "whole names 'pixels', which batch does not have"),
    "a whole that is cut": ({"whole": ["input_ids"]}, "whole names 'input_ids', which shard_batch cuts or makes"),
    "a flag that is none": ({"shift_labels": 1}, "shift_labels is 1; it must be True or False"),
}


@pytest.mark.parametrize("padded", [False, True])
def test_positions_that_count_each_rows_tokens_change_nothing(padded: bool) -> None:
    """As collators give them beside a mask; what they have on padding is nobody's."""
    batch = with_mask([1, 1, 1, 0, 0]) if padded else {"input_ids": IDS}
    positions = torch.arange(batch["input_ids"].shape[1]).repeat(2, 1)
    if padded:
        positions[1, 3:] = 1

    def one(member: Any) -> list[dict[str, Any]]:
        context = cp_fast.ContextParallel(member)
        return [shard_tokens(given, cp=context) for given in (batch, batch | {"position_ids": positions})]

    for without, given in SimGroup(2).run(one):
        for name in ("input_ids", "position_ids"):
            assert torch.equal(without[name], given[name])


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_batch_on_one_rank_raises_on_all(which: str) -> None:
    batch, says = WRONG[which]

    def one(member: Any) -> str:
        given = batch if member.rank == 1 else {"input_ids": IDS}
        with pytest.raises((ValueError, TypeError)) as caught:
            shard_tokens(given, cp=cp_fast.ContextParallel(member))
        return str(caught.value)

    other, own = SimGroup(2).run(one)
    with pytest.raises(ValueError, match=says):
        raise ValueError(own)
    assert other.startswith("rank 1 refused its arguments")
    assert other.endswith(own)


@pytest.mark.parametrize("which", ODD)
def test_a_wrong_argument_on_one_rank_raises_on_all(which: str) -> None:
    odd, says = ODD[which]

    def one(member: Any) -> str:
        given = odd if member.rank == 1 else {}
        with pytest.raises((ValueError, TypeError), match=says) as caught:
            shard_tokens({"input_ids": IDS}, cp=cp_fast.ContextParallel(member), **given)
        return str(caught.value)

    assert re.match("rank 1 refused its arguments|.* differs between", SimGroup(2).run(one)[0])


@pytest.mark.parametrize("batch", [{"input_ids": IDS}, packed(0, 1, 2, 0, 1, 0, 1, 2)], ids=["rows", "packed"])
def test_labels_that_are_not_shifted_stay_where_they_are(batch: dict[str, torch.Tensor]) -> None:
    def one(member: Any) -> list[bool]:
        labels = 100 + batch["input_ids"]
        cp = cp_fast.ContextParallel(member)
        stay = shard_tokens(batch | {"labels": labels}, cp=cp, shift_labels=False)
        move = shard_tokens(batch | {"labels": labels}, cp=cp)
        real = stay["labels"] != -100
        assert "shift_labels" not in stay
        assert torch.equal(move["labels"], move["shift_labels"])
        assert int(stay["num_items_in_batch"]) == labels.numel()
        there = move["labels"] != -100
        return [
            torch.equal(stay["labels"][real], 100 + stay["input_ids"][real]),
            torch.equal(move["labels"][there], 101 + move["input_ids"][there]),
        ]

    assert SimGroup(2).run(one) == [[True, True]] * 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_labels_of_any_integers_are_those_of_cross_entropy(dtype: torch.dtype) -> None:
    def one(member: Any) -> list[int]:
        cp = cp_fast.ContextParallel(member)
        part = shard_tokens({"input_ids": IDS.to(dtype), "labels": IDS.to(dtype)}, cp=cp)
        assert part["labels"].dtype == torch.int64
        assert not is_dataclass(part["cp_batch"])  # fully_shard copies dataclasses by their fields
        assert "labels" not in shard_tokens({"input_ids": IDS.to(dtype)}, cp=cp)
        return part["labels"][1].tolist()

    assert SimGroup(2).run(one) == [[9, 10, 15, -100], [11, 12, 13, 14]]


def counts(over: str) -> list[int]:
    """Of both data parallel ranks together, whatever says who they are; unequal numbers of labels."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    everyone: dict[str, Callable[[], Any]] = {
        "mesh": lambda: mesh,
        "flattened": lambda: mesh._flatten("dp_cp"),
        "group": lambda: dist.group.WORLD,
        "context": lambda: cp_fast.ContextParallel(mesh["cp"]),
    }
    labels = IDS.clone()
    if mesh["dp"].get_local_rank():
        labels[0] = -100
    batch = {"input_ids": IDS, "labels": labels}
    given = shard_tokens(batch, cp=cp_fast.ContextParallel(mesh["cp"]), over=everyone[over]())
    assert given["cp_batch"].contexts == (1 if over == "context" else 2)
    return [int(given["num_items_in_batch"]), int((given["labels"] != -100).sum())]


@pytest.mark.parametrize("over", ["mesh", "flattened", "group", "context"])
def test_labels_are_counted_over_all_ranks_that_share_the_gradients(four: Processes, over: str) -> None:
    found = four.run(counts, over)
    every, mine = [n for n, _ in found], [m for _, m in found]
    assert every == ([14, 14, 7, 7] if over == "context" else [21] * 4)
    assert sum(mine) == 21


def wrong_over(how: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    over, batch = mesh, {"input_ids": IDS, "labels": IDS}
    if how == "data parallel ranks":
        over = mesh["dp"]
    elif dist.get_rank() == 2:
        batch = {"input_ids": IDS, "labels": IDS[:, 1:]}
    with pytest.raises(ValueError, match=r".") as caught:
        shard_tokens(batch, cp=cp_fast.ContextParallel(mesh["cp"]), over=over)
    return str(caught.value)


def test_what_is_wrong_in_one_batch_raises_on_all_ranks_of_over(four: Processes) -> None:
    own = "row 0 of labels has 7 entries for 8 tokens"
    found = four.run(wrong_over, "labels")
    assert found[2].startswith(own)
    assert all(own in said for said in found)
    for said in four.run(wrong_over, "data parallel ranks"):
        assert "over has global ranks" in said
        assert "it must have all ranks of cp" in said


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous", "balanced"])
def test_a_batch_without_tokens_has_no_labels(layout: Any) -> None:
    none = torch.zeros(1, 0, dtype=torch.int64)

    def one(member: Any) -> dict[str, Any]:
        return shard_tokens({"input_ids": none, "labels": none}, cp=cp_fast.ContextParallel(member, layout=layout))

    for part in SimGroup(2).run(one):
        assert part["labels"].shape == part["shift_labels"].shape == part["input_ids"].shape
        assert (part["labels"] == -100).all()
        assert part["num_items_in_batch"] == 0


@pytest.mark.parametrize("layout", ["dual_chunk", "contiguous", "balanced"])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_other_tensors_of_a_batch_are_cut_as_its_tokens(kind: str, layout: Any) -> None:
    ids = torch.arange(1, 31).view(1, 30) if kind == "packed" else torch.arange(1, 31).view(3, 10)
    positions = torch.cat([torch.arange(n) for n in (7, 12, 11)])[None]
    batch = {"input_ids": ids} | ({"position_ids": positions} if kind == "packed" else {})
    weights = torch.rand(*ids.shape, 2, dtype=torch.float64, requires_grad=True)

    def one(member: Any) -> None:
        part = shard_tokens(batch, cp=cp_fast.ContextParallel(member, layout=layout), pad_token_id=-1)
        sequences, mine = part["cp_batch"], part["input_ids"]
        assert torch.equal(sequences.shard(ids, fill_value=-1), mine)
        expected = torch.stack([weights.flatten(0, 1)[token - 1] * (token > 0) for token in mine.flatten().tolist()])
        found = sequences.shard(weights)
        assert torch.equal(found.flatten(0, 1), expected)
        (grad,) = torch.autograd.grad(found.sum(), weights)
        assert torch.equal(grad[..., 0].flatten() > 0, torch.isin(ids.flatten(), mine))
        with pytest.raises(ValueError, match=r"x has shape \[1, 2\]; it must begin with that of input_ids"):
            sequences.shard(torch.zeros(1, 2))

    SimGroup(4).run(one)


@pytest.mark.parametrize("layout", ["dual_chunk", "balanced"])
@pytest.mark.parametrize("kind", ["packed", "padded", "full"])
def test_tensors_that_fill_names_are_cut_and_gathered_again(kind: str, layout: Any) -> None:
    """Of any dtype and trailing axes; the plan cuts what has the batch's padding, and gradients come back."""
    rows = {"packed": packed(0, 1, 2, 0, 1, 0, 1, 2), "padded": with_mask([1, 1, 1, 0, 0]), "full": {"input_ids": IDS}}
    batch = rows[kind]
    shape = batch["input_ids"].shape
    more = {
        "weights": torch.rand(shape, dtype=torch.bfloat16),
        "seen": torch.rand(shape) > 0.5,
        "logits": torch.rand(*shape, 3, dtype=torch.float64).requires_grad_(),
    }
    fill = {"weights": -1.5, "seen": True, "logits": 7.0}

    def one(member: Any) -> torch.Tensor:
        cp = cp_fast.ContextParallel(member, layout=layout)
        part = shard_tokens(batch | more, cp=cp, fill=fill)
        sequences = part["cp_batch"]
        places = sequences.shard(torch.arange(1, 1 + shape.numel()).view(shape))
        for name, value in fill.items():
            mine, padding = part[name], part[name][places == 0]
            assert mine.dtype == more[name].dtype
            assert torch.equal(mine[places > 0], more[name].flatten(0, 1)[places[places > 0] - 1])
            assert torch.equal(padding, torch.full_like(padding, value))
        whole = sequences.unshard(part["logits"])
        assert torch.equal(whole, more["logits"])
        assert torch.equal(sequences.unshard(part["weights"]), more["weights"])
        mine = places[0] if kind == "packed" else places
        how: Any = {"cp": sequences.cp, "plan": sequences.plan}
        assert torch.equal(cp_fast.shard(cp_fast.unshard(mine, **how), **how), mine)
        assert cp_fast.roll(mine, -1, **how).shape == mine.shape
        with pytest.raises(ValueError, match=r"x has shape .* must begin with that of this rank's input_ids"):
            sequences.unshard(part["logits"][:, 1:])
        [grad] = torch.autograd.grad((whole * whole).sum() / cp.size, more["logits"])
        return grad

    torch.testing.assert_close(sum(SimGroup(2).run(one)), 2 * more["logits"].detach())


def test_shard_names_the_cure_for_a_batch() -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member, layout="balanced")
        sequences = shard_tokens({"input_ids": IDS}, cp=cp)["cp_batch"]
        for context in (cp, sequences.cp):
            with pytest.raises(ValueError, match=r"plan is None, .* cp_batch.shard\(x\) where shard_batch"):
                cp_fast.shard(IDS, cp=context)

    SimGroup(2).run(one)


def test_the_parts_add_up_to_the_mean() -> None:
    """With NaN where nothing counts, a rank that counts nothing, and gradients."""
    losses = torch.tensor([[1.0, 2.0, float("nan")], [float("nan")] * 3, [3.0, 4.0, 5.0]])
    counted = losses.isfinite()

    def one(member: Any) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        mine, cp = losses[member.rank].clone().requires_grad_(), cp_fast.ContextParallel(member)
        loss = token_mean(mine, counted[member.rank], over=cp, averaged_over=3)
        loss.backward()
        return loss.detach(), mine.grad, int(count_tokens(counted[member.rank], over=cp))

    parts = SimGroup(3).run(one)
    assert sum(float(loss) for loss, _, _ in parts) / 3 == pytest.approx(3.0)
    assert [count for _, _, count in parts] == [5, 5, 5]
    for (_, grad, _), seen in zip(parts, counted, strict=True):
        assert grad is not None
        torch.testing.assert_close(grad, seen.float() * 3 / 5)


def test_no_counted_token_is_no_loss() -> None:
    def one(member: Any) -> float:
        return token_mean(torch.ones(2), torch.zeros(2).bool(), over=cp_fast.ContextParallel(member)).item()

    assert SimGroup(2).run(one) == [0.0, 0.0]


def test_what_is_wrong_is_named() -> None:
    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        with pytest.raises(ValueError, match=r"counted is torch.int64 \[2\]; it must be bool \[2\]"):
            token_mean(torch.ones(2), torch.ones(2).long(), over=cp)
        with pytest.raises(TypeError, match="over is a SimMember"):
            count_tokens(torch.ones(2).bool(), over=member)

    SimGroup(1).run(one)


WRONG_LOSSES: dict[str, tuple[dict[str, Any], str]] = {
    "counted of another shape": ({"counted": torch.ones(3).bool()}, r"counted is torch.bool \[3\]; it must be bool \["),
    "losses of integers": ({"losses": torch.ones(2).long()}, "losses is of dtype torch.int64"),
    "losses that are no tensor": ({"losses": [1.0, 2.0]}, "losses is of type list"),
    "an average over nothing": ({"averaged_over": 0}, "averaged_over is 0; it must be at least 1"),
    "an average over a word": ({"averaged_over": "dp"}, "averaged_over is of type str; it must be a wrapped module"),
    "an unknown keyword": ({"average_over": 2}, "got an unexpected keyword argument 'average_over'"),
}


@pytest.mark.parametrize("which", WRONG_LOSSES)
def test_what_one_rank_refuses_raises_on_all(which: str) -> None:
    odd, says = WRONG_LOSSES[which]

    def one(member: Any) -> str:
        given: dict[str, Any] = {"losses": torch.ones(2), "counted": torch.ones(2).bool()}
        with pytest.raises((ValueError, TypeError), match=says) as caught:
            token_mean(**given | (odd if member.rank == 1 else {}), over=cp_fast.ContextParallel(member))
        return str(caught.value)

    assert SimGroup(2).run(one)[0].startswith("rank 1 refused its arguments")


def missing_on_one_rank() -> str:
    mesh = init_device_mesh("cpu", (2, 2))
    given = {} if dist.get_rank() == 2 else {"counted": torch.ones(2).bool()}
    with pytest.raises((ValueError, TypeError), match="missing a required argument: 'counted'") as caught:
        token_mean(torch.ones(2), **given, over=mesh)
    return str(caught.value)


def test_it_raises_on_all_ranks_of_a_mesh(four: Processes) -> None:
    for rank, said in enumerate(four.run(missing_on_one_rank)):
        assert said.startswith("token_mean() " if rank == 2 else "global rank 2 refused its arguments")


class Model(torch.nn.Module):
    """A layer of attention that is called with what `shard_batch` gives, as a model of transformers is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(20, 8)
        self.head = torch.nn.Linear(8, 20)

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss as a model of transformers gives it, and all losses [b, s/cp]."""
        x = self.embed(batch["input_ids"]).unflatten(-1, (2, 4))
        sequences = batch["cp_batch"]
        mask, lengths = ("causal", None) if sequences.cu_seqlens is None else ("padding_causal", sequences.cu_seqlens)
        logits = self.head(
            cp_fast.attention(x, x, x, cp=sequences.cp, attn_mask_type=mask, cu_seqlens_q=lengths).flatten(-2)
        )
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none", ignore_index=-100)
        return losses.sum() / batch["num_items_in_batch"], losses


WRAPPERS = ["nobody", "ddp over all", "ddp over data", "fsdp over all", "fsdp over data", "hsdp"]


def gradients(wrapper: str, equal: bool, by: str) -> list[str]:
    """Whose gradients on a mesh of data and context parallel ranks are not those of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    ids = torch.randint(20, (4, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    if not equal:
        labels[0, :9], labels[1] = -100, -100
    single = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    alone = Model()
    alone(shard_tokens({"input_ids": ids, "labels": labels}, cp=cp_fast.ContextParallel(single)))[0].backward()

    everyone, model = mesh._flatten("dp_cp"), Model()
    if wrapper == "ddp over all":
        model = DistributedDataParallel(model, process_group=everyone.get_group())
    elif wrapper == "ddp over data":
        model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    elif wrapper.startswith("fsdp"):
        fully_shard(model.head, mesh=everyone if wrapper.endswith("all") else mesh["dp"])
        fully_shard(model, mesh=everyone if wrapper.endswith("all") else mesh["dp"])
    elif wrapper == "hsdp":
        fully_shard(model, mesh=mesh)
    mine = slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2)
    batch = {"input_ids": ids[mine], "labels": labels[mine]}
    given = shard_tokens(batch, cp=cp_fast.ContextParallel(mesh["cp"]), over=mesh)
    part, losses = model(given)
    who = None if wrapper == "nobody" else model
    loss = loss_for_backward(part, averaged_over=who)
    mean = token_mean(losses, given["labels"] != -100, over=mesh, averaged_over=who)
    torch.testing.assert_close(mean, loss)
    (loss if by == "loss_for_backward" else mean).backward()
    wrong = []
    for weight, (name, want) in zip(model.parameters(), alone.named_parameters(), strict=True):
        assert weight.grad is not None
        assert want.grad is not None
        grad: Any = weight.grad
        if wrapper.endswith(("data", "nobody")):
            dist.all_reduce(grad.to_local() if hasattr(grad, "to_local") else grad, group=mesh["cp"].get_group())
        if wrapper == "nobody":
            dist.all_reduce(grad, group=mesh["dp"].get_group())
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        if not torch.allclose(grad, want.grad, rtol=1e-5, atol=1e-7):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("equal", [True, False], ids=["as many labels", "other numbers of labels"])
@pytest.mark.parametrize("by", ["loss_for_backward", "token_mean"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.one_in(5)
def test_gradients_are_those_of_one_process(four: Processes, wrapper: str, by: str, equal: bool) -> None:
    assert four.run(gradients, wrapper, equal, by) == [[]] * 4


def wrong_wrappers() -> list[str]:
    mesh, said = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), []
    two, hooked = Model(), DistributedDataParallel(Model())
    fully_shard(two.head, mesh=mesh["dp"])
    fully_shard(two, mesh=mesh._flatten("dp_cp"))
    hooked.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    for averaged_over in (Model(), two, hooked, "dp", True):
        with pytest.raises((ValueError, TypeError)) as caught:
            loss_for_backward(torch.tensor(1.0), averaged_over=averaged_over)
        said.append(str(caught.value))
    return said


def test_wrappers_that_say_nothing_are_refused(four: Processes) -> None:
    plain, two, hooked, word, flag = four.run(wrong_wrappers)[0]
    assert "is a Model that neither DistributedDataParallel nor fully_shard wraps" in plain
    assert "whose parts are averaged over [2, 4] ranks" in two
    assert "with a communication hook" in hooked
    assert "averaged_over is of type str" in word
    assert "averaged_over is True" in flag


def test_a_batch_of_any_strides() -> None:
    """Columns, every other token, and values that are expanded, of one row or of one token too."""

    def parts(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
        def one(member: Any) -> list[int]:
            batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
            return shard_tokens(batch, cp=cp_fast.ContextParallel(member))["input_ids"].flatten().tolist()

        return SimGroup(2).run(one)

    for ids in (IDS[:, :1], IDS[:1, :1], IDS[:1, ::2], IDS[:, ::2], IDS.t()[:, :1], IDS.t()[:2]):
        mask = torch.ones((), dtype=torch.int64).expand(ids.shape)
        assert parts(ids, mask) == parts(ids.contiguous().clone(), torch.ones(ids.shape, dtype=torch.int64))
