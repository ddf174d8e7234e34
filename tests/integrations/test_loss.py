"""A mean over the tokens of all ranks."""

from __future__ import annotations

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
from cp_fast.integrations.token_batches import shard_batch
from cp_ref import SimGroup
from tests.dist.workers import Processes


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


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "counted of another shape": ({"counted": torch.ones(3).bool()}, r"counted is torch.bool \[3\]; it must be bool \["),
    "losses of integers": ({"losses": torch.ones(2).long()}, "losses is of dtype torch.int64"),
    "losses that are no tensor": ({"losses": [1.0, 2.0]}, "losses is of type list"),
    "an average over nothing": ({"averaged_over": 0}, "averaged_over is 0; it must be at least 1"),
    "an average over a word": ({"averaged_over": "dp"}, "averaged_over is of type str; it must be a wrapped module"),
    "an unknown keyword": ({"average_over": 2}, "got an unexpected keyword argument 'average_over'"),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_one_rank_refuses_raises_on_all(which: str) -> None:
    odd, says = WRONG[which]

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
    alone(shard_batch({"input_ids": ids, "labels": labels}, cp=cp_fast.ContextParallel(single)))[0].backward()

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
    given = shard_batch(batch, cp=cp_fast.ContextParallel(mesh["cp"]), over=mesh)
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
