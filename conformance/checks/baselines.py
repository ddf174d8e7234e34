"""Two references in low precision, whose errors are the units of budgets: plain PyTorch, and what no production kernel
can do better than."""

from __future__ import annotations

import torch

from conformance.case import Case, wide_dtype
from conformance.scores import PLAIN, CaseScores, PairPlaces, scores_of
from conformance.tensors import GlobalTensors, scopes
from cp_ref.schedules.problem import Problem, ScoreSpec

__all__ = ["RoundedScope", "eager_attention", "rounded_results"]

# ---- the baseline


_Extra = tuple[CaseScores, PairPlaces]


def eager_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    problem: Problem,
    softmax_offset: torch.Tensor | None = None,
    case_scores: CaseScores = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute attention of global tensors, eagerly, in their own dtype; differentiable in q, k, v and softmax_offset,
    and through lse.

    Args:
        q: bshd [b, s_q, h_q, d_qk], sbhd [s_q, b, h_q, d_qk], thd [t_q, h_q, d_qk] (a tail allowed); k, v likewise.
            What stands in padding is not read.
        problem: masks, lengths and the options of scores; its cp_size and layout play no part.
        softmax_offset: [h_q], for softmax_type "learnable".
        case_scores: what scores depend on besides.

    Returns:
        out like q with d_v; lse [b, h_q, s_q] or [h_q, t_q], float32 (float64 for float64); max_logit [h_q], in lse's
        dtype.
    """
    wide = wide_dtype(q.dtype)
    max_logit = torch.full((problem.heads_q,), -torch.inf, dtype=wide, device=q.device)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = torch.full(_lse_shape(q, problem.qkv_format), -torch.inf, dtype=wide, device=q.device)
    for rows, keys, lse_rows, visible, places in scopes(problem, q.device):
        part = _one_scope(q[rows], k[keys], v[keys], problem, visible, softmax_offset, wide, (case_scores, places))
        out[rows], lse[lse_rows] = part[:2]
        max_logit = torch.maximum(max_logit, part[2])
    return out, lse, max_logit


def _lse_shape(q: torch.Tensor, qkv_format: str) -> tuple[int, ...]:
    sizes = dict(zip(qkv_format, q.shape, strict=True))
    return tuple(sizes[letter] for letter in ("ht" if qkv_format == "thd" else "bhs"))


def _one_scope(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    visible: torch.Tensor,
    softmax_offset: torch.Tensor | None,
    wide: torch.dtype,
    extra: _Extra,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """visible [n, m], q [n, h_q, d], k, v [m, h_kv, d] -> out [n, h_q, d_v], lse [h_q, n], max_logit [h_q]."""
    hidden = ~visible
    k, v = (x.repeat_interleave(problem.heads_per_kv, dim=1) for x in (k, v))
    scores = _scores(q, k, hidden, problem, extra)
    case_scores, places = extra
    weights = _softmax(scores, problem, softmax_offset) * case_scores.dropout(problem.heads_q, places, q.dtype)
    out = torch.einsum("hnm,mhd->nhd", weights, v)
    columns = _with_sink(_scores(q.to(wide), k.to(wide), hidden, problem, extra), problem, softmax_offset)
    if columns.shape[-1] == 0:
        lse = columns.new_full(columns.shape[:2], -torch.inf)
    else:
        empty = (columns == -torch.inf).all(-1)
        lse = torch.logsumexp(columns.masked_fill(empty[..., None], 0.0), dim=-1).masked_fill(empty, -torch.inf)
    largest = scores.detach().to(wide).flatten(1)
    none = largest.new_full((problem.heads_q, 1), -torch.inf)
    return out, lse, torch.cat([largest, none], dim=1).amax(dim=1)


def _scores(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, problem: Problem, extra: _Extra) -> torch.Tensor:
    """[h, n, m], -inf where hidden."""
    scores, _ = scores_of(torch.einsum("nhd,mhd->hnm", q, k), problem.scores)
    case_scores, places = extra
    return case_scores.modified(scores, places).masked_fill(hidden, -torch.inf)


def _with_sink(scores: torch.Tensor, problem: Problem, softmax_offset: torch.Tensor | None) -> torch.Tensor:
    """The scores and, with a sink, its logit as one more column."""
    if problem.softmax_type == "vanilla":
        return scores
    sink = scores.new_zeros(problem.heads_q) if softmax_offset is None else softmax_offset.to(scores.dtype)
    return torch.cat([scores, sink[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)


def _softmax(scores: torch.Tensor, problem: Problem, softmax_offset: torch.Tensor | None) -> torch.Tensor:
    """The keys' weights [h, n, m]; 0 in a row that sees nothing."""
    keys = scores.shape[-1]
    columns = _with_sink(scores, problem, softmax_offset)
    if columns.shape[-1] == 0:
        return columns
    empty = (columns == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(columns.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    return weights[..., :keys]


# ---- the rounded reference
#
# A second reference in low precision: float32 inside, rounded where production kernels round. Good code cannot do
# better.
#
# The reference rounds where every production kernel rounds:
#
# - scores, softmax and sums are float32, block by block with a running maximum;
# - weights and score gradients are rounded to the input dtype before a product (matrix units take only that dtype);
# - delta is computed from the rounded output;
# - everything else is rounded once, at the end.
#
# The allowances of the budgets come from its errors (`python -m tests.meta.calibration`), and not from the judged code.


_BLOCK = 32  # keys


def rounded_results(case: Case, tensors: GlobalTensors) -> dict[str, torch.Tensor]:
    """out, lse, max_logit, dq, dk, dv, and d_offset where there is one, under the oracle's names and in its shapes.

    Gradients are those of the case's loss. Results have the dtypes that an implementation's would have.
    """
    p = case.problem
    clean = {n: getattr(tensors, n).nan_to_num(0.0, 0.0, 0.0) for n in ("q", "k", "v", "dout", "dlse")}
    wide = tensors.dlse.dtype
    dout = clean["dout"] if "out" in case.loss else torch.zeros_like(clean["dout"])
    dlse = clean["dlse"] if "lse" in case.loss else torch.zeros_like(clean["dlse"])
    results = {"out": torch.zeros_like(dout), "lse": torch.full_like(tensors.dlse, -torch.inf)}
    results["max_logit"] = tensors.dlse.new_full((p.heads_q,), -torch.inf)
    results |= {f"d{n}": torch.zeros_like(clean[n]) for n in ("q", "k", "v")}
    sink = _sink(p, tensors)
    d_offset = torch.zeros(p.heads_q, dtype=wide, device=dout.device)
    case_scores = CaseScores.of(case, dout.device)
    for rows, keys, lse_rows, visible, places in scopes(p, dout.device):
        block = clean["q"][rows], clean["k"][keys], clean["v"][keys]
        one = RoundedScope(p.scores, visible, *block, wide, case_scores, places)
        out, lse, largest = one.forward(sink)
        results["out"][rows], results["lse"][lse_rows] = out, lse
        results["max_logit"] = torch.maximum(results["max_logit"], largest)
        grads = one.backward(dout[rows], dlse[lse_rows], out, lse, sink)
        results["dq"][rows], results["dk"][keys], results["dv"][keys] = grads[:3]
        d_offset += grads[3]
    if tensors.softmax_offset is not None:
        results["d_offset"] = d_offset
    return results


def _sink(p: Problem, tensors: GlobalTensors) -> torch.Tensor | None:
    if p.softmax_type == "vanilla":
        return None
    return tensors.dlse.new_zeros(p.heads_q) if tensors.softmax_offset is None else tensors.softmax_offset


class RoundedScope:
    """Queries and keys that see none besides: visible [n, m], q [n, h, d], k and v [m, h_kv, d] in the input dtype;
    everything inside is [h, n, m] in float32.
    """

    def __init__(
        self,
        options: ScoreSpec,
        visible: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        wide: torch.dtype,
        case_scores: CaseScores = PLAIN,
        places: PairPlaces | None = None,
    ):
        self.options, self.seen, self.dtype, self.group = options, visible, q.dtype, q.shape[1] // k.shape[1]
        self.q, self.k, self.v = (x.to(wide).transpose(0, 1) for x in (q, k, v))
        self.k, self.v = (x.repeat_interleave(self.group, dim=0) for x in (self.k, self.v))
        self.case_scores, self.places, heads = case_scores, places, q.shape[1]
        self.kept = 1.0 if places is None else case_scores.dropout(heads, places, wide)
        self.blocks = [slice(n, min(n + _BLOCK, len(k))) for n in range(0, len(k), _BLOCK)]

    def scores(self, block: slice) -> tuple[torch.Tensor, torch.Tensor | float]:
        s, slope = scores_of(self.q @ self.k[:, block].mT, self.options)
        if self.places is not None:
            places = self.places._replace(kv_idx=self.places.kv_idx[block])
            s, more = self.case_scores.with_slope(s, places)
            slope = slope * more
        return s.masked_fill(~self.seen[:, block], -torch.inf), slope

    def dropped(self, x: torch.Tensor, block: slice) -> torch.Tensor:
        """Probabilities of a block, or their gradients, after dropout."""
        return x * self.kept[:, :, block] if isinstance(self.kept, torch.Tensor) else x

    def narrow(self, x: torch.Tensor) -> torch.Tensor:
        """Round as a matrix unit does."""
        return x.to(self.dtype).to(x.dtype)

    def forward(self, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h, n = self.q.shape[:2]
        top = self.q.new_full((h, n, 1), -torch.inf)
        total, mix = torch.zeros_like(top), self.q.new_zeros(h, n, self.v.shape[-1])
        largest = self.q.new_full((h,), -torch.inf)
        for block in self.blocks:
            s, _ = self.scores(block)
            new = torch.maximum(top, s.amax(-1, keepdim=True)) if s.numel() else top
            base = new.clamp_min(torch.finfo(s.dtype).min)
            weights, shrink = torch.exp(s - base), torch.exp(top - base)
            total = total * shrink + weights.sum(-1, keepdim=True)
            mix = mix * shrink + self.narrow(self.dropped(weights, block)) @ self.v[:, block]
            top = new
            largest = torch.maximum(largest, s.flatten(1).amax(1)) if s.numel() else largest
        if sink is not None:
            new = torch.maximum(top, sink[:, None, None].to(top.dtype))
            total = total * torch.exp(top - new) + torch.exp(sink[:, None, None] - new)
            mix, top = mix * torch.exp(top - new), new
        nothing = total == 0
        out = (mix / total.masked_fill(nothing, 1.0)).transpose(0, 1).to(self.dtype)
        return out, (top + total.log()).squeeze(-1).masked_fill(nothing.squeeze(-1), -torch.inf), largest

    def backward(
        self, dout: torch.Tensor, dlse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        dout, out = (x.to(self.q.dtype).transpose(0, 1) for x in (dout, out))
        delta = (dout * out).sum(-1) - dlse  # [h, n], of the rounded output
        norm = lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]
        dq = torch.zeros_like(self.q)
        dk, dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        for block in self.blocks:
            s, slope = self.scores(block)
            weights = torch.exp(s - norm)
            dv[:, block] = self.narrow(self.dropped(weights, block)).mT @ dout
            dp = self.dropped(dout @ self.v[:, block].mT, block)
            ds = self.narrow((weights * (dp - delta[..., None]) * slope).masked_fill(weights == 0, 0.0))
            dq += ds @ self.k[:, block] * self.options.scale
            dk[:, block] = ds.mT @ self.q * self.options.scale
        d_sink = delta.new_zeros(delta.shape[0])
        if sink is not None:
            d_sink = -(torch.exp(sink[:, None] - lse) * delta).sum(-1)
        dk, dv = (x.unflatten(0, (-1, self.group)).sum(1) for x in (dk, dv))
        grads = (x.transpose(0, 1).to(self.dtype) for x in (dq, dk, dv))
        return (*grads, d_sink)  # pyright: ignore[reportReturnType]
