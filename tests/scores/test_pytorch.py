"""ALiBi and score_mod against PyTorch's own attention in float64: SDPA with a bias, and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cp_ref
from conformance.case import SCORE_MODS, aux_tensors
from cp_ref import SimGroup
from cp_ref.calls.scores import kept_by_dropout
from cp_ref.schedules.problem import Problem, Sequence

B, S, H, D = 2, 16, 4, 8
GENERATOR = torch.Generator().manual_seed(3)
Q, K, V, DOUT = (torch.randn(B, S, H, D, generator=GENERATOR, dtype=torch.float64) for _ in range(4))
PROBLEM = Problem(1, (Sequence(S, S, S, S),) * B, heads_q=H, heads_kv=H, dtype="float64")
SLOPES = torch.rand(B, H, generator=GENERATOR) - 0.2
PLACES = tuple(torch.arange(n).view(-1, *[1] * axes) for axes, n in ((3, B), (2, H), (1, S), (0, S)))  # b, h, i, j


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, by_distance: Any) -> Any:
    return score + by_distance[h, (q_idx - kv_idx).clamp(-8, 8) + 8]


def independent(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Has no derivative."""
    return torch.cos(0.1 * (q_idx - 2 * kv_idx + h + b).to(score.dtype)).expand(score.shape)


Mod = tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]  # and its captured tensors
OF_FLEX: dict[str, Mod] = {
    name: (score_mod, aux_tensors(replace(PROBLEM, score_mod=name)) or {})
    for name, score_mod in SCORE_MODS.items()
    if name != "hidden"  # rows that see nothing are NaN there
}
OF_FLEX["relative"] = relative, {"by_distance": torch.randn(H, 17, generator=GENERATOR, dtype=torch.float64)}
OF_FLEX["independent"] = independent, {}


def results_and_gradients(attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    out = attend(*(x.transpose(1, 2) for x in leaves)).transpose(1, 2)
    out.backward(DOUT)
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def over_ranks(size: int, **arguments: Any) -> list[torch.Tensor]:
    def one(member: Any) -> list[torch.Tensor]:
        cp = cp_ref.ContextParallel(member)
        leaves = [cp_ref.shard(x, cp=cp).clone().requires_grad_() for x in (Q, K, V)]
        out = cp_ref.attention(*leaves, cp=cp, **arguments)
        out.backward(cp_ref.shard(DOUT, cp=cp))
        return [cp_ref.unshard(x, cp=cp) for x in (out.detach(), *(x.grad for x in leaves if x.grad is not None))]

    return SimGroup(size).run(one)[0]


def dense(**arguments: Any) -> list[torch.Tensor]:
    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in tensors)
        return cp_ref.dense_attention(q, k, v, **arguments)[0].transpose(1, 2)

    return results_and_gradients(attend)


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all((x - y).abs().max() < 1e-12 for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", ["h", "bh"])
def test_alibi_is_a_bias_of_sdpa(rows: str, causal: bool) -> None:
    slopes = SLOPES if rows == "bh" else SLOPES[0]
    distance = (torch.arange(S)[:, None] - torch.arange(S)[None]).abs().double()
    bias = -(slopes.double() if rows == "bh" else slopes.double().expand(B, H))[..., None, None] * distance
    if causal:
        bias = bias.masked_fill(torch.ones(S, S).triu(1).bool(), float("-inf"))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    wanted = results_and_gradients(attend)
    given: dict[str, Any] = {"alibi_slopes": slopes, "attn_mask_type": "causal" if causal else "no_mask"}
    assert close(dense(**given), wanted)
    assert close(over_ranks(4, **given), wanted)


def test_alibi_is_aligned_to_the_last_key() -> None:
    """Where there are more keys than queries, the distance is 0 at the bottom right, as in flash-attn."""
    q, k = Q[:, :6], K
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
    i, j = torch.arange(6)[:, None], torch.arange(S)[None]
    scores = scores - SLOPES[0].double()[:, None, None] * (i + S - 6 - j).abs()
    wanted = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), V)
    found, _, _ = cp_ref.dense_attention(q, k, V, alibi_slopes=SLOPES[0], attn_mask_type="no_mask")
    assert (found - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", OF_FLEX)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.one_in(3)
def test_score_mod_is_that_of_flex_attention(name: str, causal: bool) -> None:
    score_mod, tables = OF_FLEX[name]

    def of_flex(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score_mod(score, b, h, q_idx, kv_idx, **tables)

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """FlexAttention on a CPU has no backward pass: the same, written with softmax."""
        scores = score_mod(q @ k.transpose(-1, -2) * D**-0.5, *PLACES, **tables)
        return (scores.masked_fill(~visible(*PLACES), float("-inf")) if causal else scores).softmax(-1) @ v

    mask = create_block_mask(visible, None, None, S, S, device="cpu")
    wanted = results_and_gradients(attend)
    if causal:  # each call compiles
        by_flex: Any = flex_attention(*(x.transpose(1, 2) for x in (Q, K, V)), score_mod=of_flex, block_mask=mask)
        assert (by_flex.transpose(1, 2) - wanted[0]).abs().max() < 1e-12
    given: dict[str, Any] = {"score_mod": score_mod, "aux_tensors": tables}
    given["attn_mask_type"] = "causal" if causal else "no_mask"
    assert close(dense(**given), wanted)
    assert close(over_ranks(2, **given), wanted)


def test_dropout_is_that_of_dropped_probabilities() -> None:
    """softmax, then zeros and a factor, by PyTorch."""
    b, h, i, j = PLACES
    mask = kept_by_dropout(b, h, i, j, torch.tensor(9), 0.25)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1)
        return (weights * mask / 0.75) @ v

    wanted = results_and_gradients(attend)
    given: dict[str, Any] = {"dropout_p": 0.25, "dropout_seed": 9, "attn_mask_type": "no_mask"}
    assert close(dense(**given), wanted)
    assert close(over_ranks(2, **given), wanted)
