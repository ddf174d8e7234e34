"""Linear and sparse layers of cp_fast inside torch.compile, over one rank: Dynamo is not made for the threads of a
simulated group.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

import cp_fast
from cp_ref.reference.simulator import RankScheduler, SimMember
from tests.layers.layer_table import CU, LAYERS, PADDED, ROWS, SIZES, Tensors

MEMBER = SimMember(0, 1, RankScheduler(1))
SHAPES = {"thd": (ROWS,), "bshd": (2, ROWS // 2), "sbhd": (ROWS // 2, 2)}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def planned(comm: Any = "all_gather", fmt: str = "thd", **more: Any) -> tuple[cp_fast.ContextParallel, cp_fast.Plan]:
    cp = cp_fast.ContextParallel(MEMBER, comm)
    batch: dict[str, Any] = {"cu_seqlens_q": CU, "cu_seqlens_q_padded": PADDED}
    batch = batch if fmt == "thd" else {"batch_size": 2, "seqlen_q": ROWS // 2}
    how = SIZES | {"dtype": torch.float64, "qkv_format": fmt} | batch | more
    return cp, cp_fast.make_plan(cp=cp, **how)


def inputs(fmt: str = "thd") -> Tensors:
    """The tensors of the layers below, in a format: leaves."""
    names = {"l": "gated_delta_rule", "c": "causal_conv1d", "s": "sparse_attention", "i": "select_keys"}
    found: Tensors = {}
    for short, name in names.items():
        layer = LAYERS[name]
        for each, x in layer.inputs(torch.float64).items():
            x = x[: 2 if fmt != "thd" else 3] if each == "initial_state" else x
            found[f"{short}_{each}"] = x.reshape(*SHAPES[fmt], *x.shape[1:]) if each in layer.rows else x
    del found["s_indices"], found["s_v"]
    return {name: x.requires_grad_() for name, x in found.items()}


def model(cp: cp_fast.ContextParallel, plan: cp_fast.Plan, x: Tensors, top_k: int = 4) -> torch.Tensor:
    """A convolution, two linear layers with states in and out, and sparse attention in its latent form."""
    how: dict[str, Any] = {"cp": cp, "plan": plan}
    mixed = cp_fast.causal_conv1d(2 * x["c_x"], x["c_weight"], x["c_bias"], activation="silu", **how)
    rest = {"q": x["l_q"], "k": x["l_k"], "g": x["l_g"], "beta": x["l_beta"]}
    once, state = cp_fast.linear_attention(**rest, v=mixed.unflatten(-1, (2, 3)), output_final_state=True, **how)
    linear = cp_fast.linear_attention(**rest, v=once + x["l_v"], initial_state=state * x["l_initial_state"], **how)
    indexer = x["i_q_index"], x["i_k_index"], x["i_weights"]
    indices = cp_fast.select_keys(*indexer, top_k=top_k, **how)
    keys = 2 * x["s_k"]
    out, lse = cp_fast.sparse_attention(x["s_q"], keys, keys[..., :4], indices, return_lse=True, **how)
    loss = cp_fast.index_loss(*indexer, lse.detach(), x["s_q"], keys, indices, **how)
    finite = lse.masked_fill(lse.isinf(), 0)
    return linear.square().sum() + out.square().sum() + loss.sum() + finite.sum()


@pytest.mark.parametrize("fmt", SHAPES)
@pytest.mark.one_in(3)
def test_layers_are_one_graph(fmt: str) -> None:
    """Another plan, and another schedule, is no new graph."""
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, example)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for comm, more in (("all_gather", {}), ("a2a", {}), ("all_gather", {"window_size": (3, 0)})):
        cp, plan = planned(comm, fmt, **more)
        found: list[list[torch.Tensor | None]] = []
        for call in (model, compiled):
            mine = inputs(fmt)
            result = call(cp, plan, mine)
            result.backward()
            found.append([result.detach(), *(x.grad for x in mine.values())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
    assert len(graphs) == 1


def test_in_a_graph_errors_are_those_of_a_call() -> None:
    cp, plan = planned(max_sequences=4, max_tokens_q=ROWS)
    compiled, given = torch.compile(model, fullgraph=True, backend="aot_eager"), inputs()
    with pytest.raises(ValueError, match=r"weights has shape \[20, 2\]; its last sizes must be \[3\]"):
        compiled(cp, plan, given | {"i_weights": given["i_weights"][:, :2]})
    out = compiled(cp, plan, given)
    plan.update(cp=cp, cu_seqlens_q=torch.tensor([0, 3, 12]))
    with pytest.raises(RuntimeError, match="of a plan that was updated since"):
        out.backward()
    no_plan: Any = None
    with pytest.raises(Exception, match="give local tensors"):  # what no graph can have is said in plain words
        torch.compile(lambda x: cp_fast.select_keys(x, x, x, cp=cp, plan=no_plan, top_k=4), fullgraph=True)(
            given["s_q"]
        )
