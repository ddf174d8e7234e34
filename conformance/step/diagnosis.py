"""From what was seen to a cause: each function knows one kind of evidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.step.first_module import of_modules, title_of
from conformance.step.judge import factor_of, judge, norm_of, weighed
from conformance.step.report import Evidence, Finding
from conformance.step.tokens import of_losses

__all__ = ["diagnose"]

_EXACT = 3e-4  # of a ratio of two counts
_UNEVEN = 0.02  # smaller differences between weights are not reported
_LEFT = 0.02  # the largest part of a gradient that its weights may leave unexplained


def diagnose(found: Any, loss: str, dtype: Any, vanishes: Callable[[str], bool]) -> Evidence:
    """Explain the differences of a step that was looked at (`conformance.step.runs.Measured`).

    The first kind of evidence that explains them ends the search: what comes later in a step follows from it.

    Args:
        loss, dtype: as in `compare_step`. vanishes: runs the step without a part, and says whether it is right then.
    """
    dtype = dtype or found.dtype
    findings = _of_finiteness(found) or _of_ties(found) or _of_passes(found)
    done = Evidence(findings, notes=[found.unmatched] if found.unmatched else [])
    if done.findings:
        return done
    inside = of_modules(found, dtype)
    done.first, done.modules = inside.first, inside.modules
    done.findings += _of_reduction(found, dtype)
    if done.findings and not inside.first:
        return done
    done.findings = []
    if "random" in _parts(found) and vanishes("random"):
        text = "without dropout and random numbers the step is right"
        masks = [each["look"]["masks"] for each in found.ranks]
        if len(masks) > 1 and any(masks[0]) and all(mask == masks[0] for mask in masks):
            text += ", and all ranks draw equal numbers: dropout drops the same places of each slice"
        done.findings.append(Finding("random", text))
    elif any(finding.cause in ("positions", "leak") for finding in inside.findings):
        done.findings += inside.findings
    elif inside.first and "positions" in _parts(found) and vanishes("positions"):
        done.findings.append(Finding("positions", "where every angle of the rotary embedding is 0 the step is right"))
    else:
        done.findings += inside.findings
    if done.findings or inside.first:
        return done
    by_loss = of_losses(found)
    done.findings, done.first = by_loss.findings, by_loss.first
    if not done.findings:
        done.findings = _of_weights(found, vanishes)
    if not done.findings:
        done.findings = _of_loss(found, loss, dtype)
    if not done.findings:
        done.findings = _of_buffers(found, dtype) or _of_terms(found)
    return done


def _of_finiteness(found: Any) -> list[Finding]:
    """NaN or infinite losses or gradients, or steps that some ranks skip: the place where this begins."""
    ranks = [(f"rank {number}", each) for number, each in enumerate(found.ranks)]
    skips = [(who, each["skipped"]) for who, each in [*ranks, ("the one process", found.one)]]
    everyone = [*ranks, ("one process", found.one)]
    of_loss = [who for who, each in everyone if _bad_loss(each)]
    odd = of_loss or [who for who, each in everyone if _bad_gradient(found, each)]
    if not odd:
        odd = [who for who, steps in skips if steps]
        if all(steps == skips[0][1] for _, steps in skips):
            return []
        return [Finding("not-finite", f"{_listed(odd)} alone skip{'s' * (len(odd) == 1)} the first optimizer step")]
    begins = {who: _begins(each) for who, each in everyone}
    where = [who for who in begins if begins[who]]
    if of_loss and where:
        text = f"the loss is NaN or infinite on {_listed(where)}, first {begins[where[0]]}"
    elif of_loss:
        own = [who for who, each in everyone if any(not x["each"].isfinite().all() for x in each["look"]["losses"])]
        text = f"the loss is NaN or infinite on {_listed(own or odd)}; the outputs of all modules are finite"
    else:
        names = [who for who, each in everyone if _bad_share(each)]
        first = next((_bad_share(each) for _, each in everyone if _bad_share(each)), "")
        text = f"gradients are NaN or infinite on {_listed(names or odd)}" + f", first that of {first}" * bool(first)
        text += f"; {_listed(where)}: first {begins[where[0]]}" if where else "; the loss is finite"
    return [Finding("not-finite", text)]


def _listed(names: list[str]) -> str:
    ranks = [name.removeprefix("rank ") for name in names if name.startswith("rank ")]
    words = [f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"] if ranks else []
    return " and in ".join(words + [name for name in names if not name.startswith("rank ")])


def _bad_loss(each: Any) -> bool:
    return not all(torch.isfinite(torch.tensor(loss)) for loss in each["losses"])


def _bad_gradient(found: Any, each: Any) -> bool:
    grads = each["grads"] if each is found.one else found.of_rank("grads", each["rank"])
    return any(grad is not None and not grad.isfinite().all() for grad in grads.values())


def _bad_share(each: Any) -> str:
    """The first parameter in the backward pass whose gradient is not finite before it is reduced."""
    shares = each["look"]["shares"]
    return next((name for name, parts in shares.items() if any(not x.isfinite().all() for x in parts)), "")


def _begins(each: Any) -> str:
    """The first module whose output is not finite while its inputs are."""
    for record in each["look"]["modules"]:
        if record["out"] is None or record["out"].isfinite().all():
            continue
        given = [x for x in record["inputs"].values() if x is not None]
        return f"{'before' if any(x.isnan().any() for x in given) else 'after'} {title_of(record)}"
    return ""


def _of_ties(found: Any) -> list[Finding]:
    """Weights that are one parameter on one side, and several on the other."""
    odd = sorted(set(found.one["grads"]) ^ set(found.ranks[0]["grads"]))
    if not odd:
        return []
    here, there = (
        ("in one process", "on the ranks") if odd[0] in found.one["shared"] else ("on the ranks", "in one process")
    )
    first = {**found.one["shared"], **found.ranks[0]["shared"]}[odd[0]]
    return [Finding("tied", f"{odd[0]} is {first} {here}, and a weight of its own {there}")]


def _of_passes(found: Any) -> list[Finding]:
    """Ranks that run fewer forward passes than others."""
    counts = [rank["look"]["forwards"] for rank in found.ranks]
    few = [f"rank {number}" for number, count in enumerate(counts) if count < max(counts)]
    if not few:
        return []
    return [Finding("micro-batches", f"{_listed(few)} run {min(counts)} forward passes, others {max(counts)}")]


def _of_terms(found: Any) -> list[Finding]:
    """A loss of several terms, where everything before it agrees."""
    terms = sorted({term for each in (found.one, *found.ranks) for term in each["look"]["terms"]})
    others = [term for term in terms if "nllloss" not in term]
    if found.unmatched or not others or len(terms) == len(others):
        return []
    text = "all modules, labels and weights of cross_entropy agree, and the loss's gradients do not: look at its other "
    return [Finding("term", f"{text}term{'s' * (len(others) > 1)}, {', '.join(others)}")]


def _of_buffers(found: Any, dtype: torch.dtype) -> list[Finding]:
    """Buffers, and weights without a gradient, that the step changed otherwise than in one process, where everything
    else agrees.
    """
    changed = {name for each in (found.one, *found.ranks) for name in each["changed"]}
    learnt = {name for name, grad in found.one["grads"].items() if grad is not None}
    wrong = []
    for what, names in (("buffers", changed), ("params", set(found.one["params"]) - learnt)):
        every = [found.of_rank(what, rank) for rank in range(len(found.ranks))]
        for name, value in found.one[what].items():
            noise = [x[what][name] for x in found.noisy]
            alike = all(name in x and x[name].shape == value.shape for x in every)
            if name in names and alike and not all(judge(name, x[name], value, noise, dtype).ok for x in every):
                wrong.append((what, name))
    if not wrong:
        return []
    unlike = any(name in rank[f"unlike_{what}"] for rank in found.ranks for what, name in wrong)
    said = {"buffers": "the buffer", "params": "without a gradient, the weight"}[wrong[0][0]] + "s" * (len(wrong) > 1)
    shown = ", ".join(name for _, name in wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    text = f"{said} {shown} {'are not those' if len(wrong) > 1 else 'is not that'}"
    return [Finding("buffers", f"{text} of one process{', and not the same on all ranks' * unlike}")]


def _parts(found: Any) -> set[str]:
    return {part for each in (found.one, *found.ranks) for part in each["look"]["parts"]}


def _wrong(found: Any, dtype: torch.dtype, rank: int = 0) -> dict[str, float]:
    """The factor of each wrong gradient, NaN where no factor fits."""
    factors = {}
    mine = found.of_rank("grads", rank)
    for name, one in found.one["grads"].items():
        if name not in mine:
            continue
        got, noise = mine[name], [x["grads"][name] for x in found.noisy]
        if judge(name, got, one, noise, dtype).ok:
            continue
        if got is None or one is None:
            factors[name] = float("nan")
            continue
        factor = factor_of(got, one)
        fits = abs(factor) > 1e-3 and judge(name, got.double() / factor, one, noise, dtype).ok
        factors[name] = factor if fits else float("nan")
    return factors


def _of_reduction(found: Any, dtype: torch.dtype) -> list[Finding]:
    """Gradients that are not the same on all ranks, or off by a factor, or missing."""
    unlike = sorted({name for rank in found.ranks for name in rank["unlike_grads"]})
    unlike = [n for n in unlike if any(n in _wrong(found, dtype, r) for r in range(len(found.ranks)))]
    if unlike:
        clipped = _clipped_apart(found)
        if clipped:
            return [clipped]
        return [Finding("reduction", f"{_named(unlike, found)} not the same on all ranks after the step")]
    factors = _wrong(found, dtype)
    gone = [n for n in factors if (found.of_rank("grads", 0)[n] is None) != (found.one["grads"][n] is None)]
    if gone:
        who = "one process" if found.of_rank("grads", 0)[gone[0]] is None else "the ranks"
        return [Finding("reduction", f"{_named(gone, found)} there in {who} alone: frozen, or not used")]
    if not factors or any(f != f for f in factors.values()):
        return []
    low, high = min(factors.values()), max(factors.values())
    if high - low > _UNEVEN * abs(high):
        return [Finding("reduction", f"{_named(list(factors), found)} off by factors from {low:.4g} to {high:.4g}")]
    factor = (low + high) / 2
    most = sum(grad is not None for grad in found.one["grads"].values())
    if _all_fit(factor, found, dtype):  # in low precision some agree with one process too
        factors = dict.fromkeys([name for name, grad in found.one["grads"].items() if grad is not None], factor)
    offsets = set(found.ranks[0]["look"]["offsets"])
    by_counts = _counted(factor, found, max(_EXACT, (high - low) / abs(high)))
    if by_counts and not _meaning(factor, found) and len(factors) >= 0.9 * most:
        return [Finding("padding", f"all gradients are off by the factor {factor:.4g}: {by_counts}")]
    words = f"off by the factor {factor:.4g}{_meaning(factor, found)}"
    if set(factors) <= offsets and len(factors) < most:
        return [Finding("sinks", f"only {_named(list(factors), found)} {words}")]
    if len(factors) < 0.9 * most:
        shared = set(factors) & set(found.ranks[0]["shared"].values())
        why = "; several modules share it" * bool(shared)
        return [Finding("reduction", f"only {_named(list(factors), found)} {words}{why}")]
    forwards = found.ranks[0]["look"]["forwards"]
    sizes = {found.cp_size, found.dp_size, len(found.ranks)} - {1}
    of_batches = forwards > 1 and _near(factor, forwards) and not any(_near(factor, size) for size in sizes)
    return [Finding("micro-batches" if of_batches else "factor", f"all gradients are {words}")]


def _meaning(factor: float, found: Any) -> str:
    """The numbers of the run that a factor is equal to, by name."""
    numbers = {"cp_size": found.cp_size, "dp_size": found.dp_size, "all ranks": len(found.ranks)}
    numbers["micro-batches"] = found.ranks[0]["look"]["forwards"]
    names = []
    for name, number in numbers.items():
        if number > 1:
            squares = [(name, number), (f"1 / {name}", 1 / number), (f"{name} squared", number**2)]
            names += [word for word, value in squares if abs(factor / value - 1) < _UNEVEN]
    return f" ({', '.join(names)})" if names else ""


def _all_fit(factor: float, found: Any, dtype: torch.dtype) -> bool:
    """Whether every gradient is its own in one process times a factor."""
    mine = found.of_rank("grads", 0)
    return abs(factor) > 1e-3 and all(
        one is not None
        and mine[name] is not None
        and judge(name, mine[name].double() / factor, one, [x["grads"][name] for x in found.noisy], dtype).ok
        for name, one in found.one["grads"].items()
        if one is not None or mine[name] is not None
    )


def _counted(factor: float, found: Any, within: float) -> str:
    """The counts of labels and tokens whose ratio a factor is, up to a relative difference."""
    losses = [loss for rank in found.ranks for loss in rank["look"]["losses"]]
    alone = found.one["look"]["losses"]
    counts = {
        "labels": sum(int(loss["counted"].sum()) for loss in alone),
        "tokens": sum(int(each.places.lengths.sum()) for each in found.passes.values()),
        "tokens and padding of the ranks": sum(loss["targets"].numel() for loss in losses),
        "tokens and padding of one process": sum(loss["targets"].numel() for loss in alone),
    }
    pairs = [(a, b) for a in counts for b in counts if counts[a] and counts[b] and counts[a] != counts[b]]
    apart = {(a, b): abs(factor * counts[b] / counts[a] - 1) for a, b in pairs}
    if not apart or min(apart.values()) > within:
        return ""
    a, b = min(apart, key=lambda pair: apart[pair])
    return f"{counts[a]} {a} / {counts[b]} {b}, so one side counts other tokens in its denominator"


def _near(factor: float, number: int) -> bool:
    return abs(factor / number - 1) < _UNEVEN or abs(factor * number - 1) < _UNEVEN


def _named(names: list[str], found: Any) -> str:
    if len(names) == sum(grad is not None for grad in found.one["grads"].values()):
        return "the gradients of all parameters are"
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"the gradient{'s' * (len(names) > 1)} of {shown} {'are' if len(names) > 1 else 'is'}"


def _shares(found: Any) -> list[list[dict[str, torch.Tensor]]]:
    """Gradients of each rank and micro-batch before anything was reduced; [] where they cannot be seen (FSDP)."""
    counts = {len(x) for rank in found.ranks for x in rank["look"]["shares"].values()}
    names = [set(rank["look"]["shares"]) for rank in found.ranks]
    if len(counts) != 1 or any(n != names[0] for n in names) or not names[0]:
        return []
    how_many = counts.pop()
    return [
        [{name: x[k] for name, x in rank["look"]["shares"].items()} for k in range(how_many)] for rank in found.ranks
    ]


def _added(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([part[name].double() for part in parts]).sum(0) for name in parts[0]}


def _explained(target: dict[str, Any], parts: list[dict[str, torch.Tensor]]) -> list[float] | None:
    """The weights of the parts in the target, relative to their mean; None where they do not make it up."""
    names = [name for name in parts[0] if target.get(name) is not None]
    weights, left = weighed({n: target[n] for n in names}, [{n: part[n] for n in names} for part in parts])
    mean = sum(weights) / len(weights)
    return None if left > _LEFT or mean == 0 else [weight / mean for weight in weights]


def _uneven(weights: list[float] | None) -> bool:
    return weights is not None and max(weights) - min(weights) > _UNEVEN


def _of_weights(found: Any, vanishes: Callable[[str], bool]) -> list[Finding]:
    """Ranks or micro-batches that enter the gradient with different weights."""
    if "clipping" in _parts(found) and vanishes("clipping"):
        return [Finding("clipping", "without clipping of gradients the step is right")]
    shares = _shares(found)
    if not shares:
        return []
    by_batch = [_added([rank[k] for rank in shares]) for k in range(len(shares[0]))]
    by_rank = [_added(rank) for rank in shares]
    final = found.of_rank("grads", 0)
    for parts, cause, words in (
        (by_batch, "micro-batches", "micro-batches"),
        (by_rank, "clipping", "ranks"),
    ):
        weights = _explained(final, parts) if len(parts) > 1 else None
        if _uneven(weights):
            return [Finding(cause, f"{words} enter the gradient with the weights {_numbers(weights)}")]
    return []


def _numbers(weights: list[float] | None) -> str:
    return ", ".join(f"{weight:.3g}" for weight in weights or [])


def _clipped_apart(found: Any) -> Finding | None:
    """Whether the ranks' gradients differ by one factor for each rank."""
    norms = [norm_of(found.of_rank("grads", rank)) for rank in range(len(found.ranks))]
    first = found.of_rank("grads", 0)
    for rank in range(1, len(found.ranks)):
        _, left = weighed(
            {n: x for n, x in found.of_rank("grads", rank).items() if x is not None},
            [{n: x for n, x in first.items() if x is not None}],
        )
        if left > 1e-3:
            return None
    if max(norms) - min(norms) <= _UNEVEN * max(norms):
        return None
    return Finding("clipping", f"gradients are scaled on each rank by a number of its own: norms {_numbers(norms)}")


def _of_loss(found: Any, loss: str, dtype: torch.dtype) -> list[Finding]:
    """A wrong loss with right gradients."""
    if _wrong(found, dtype):
        return []
    mine, one = [rank["losses"][0] for rank in found.ranks], found.one["losses"][0]
    total, tiny = sum(mine), 0.001 * abs(one)
    factor = (total if loss == "sum" else mine[0]) / one if one else float("nan")
    if all(abs(x - one) <= tiny for x in mine):
        return []
    if loss == "mean" and abs(total - one) <= tiny:
        return [Finding("factor", "gradients are right, but step returns each rank's share of the loss")]
    if loss == "mean" and abs(total / len(mine) - one) <= tiny:
        return [Finding("mean-per-rank", "gradients are right, but step returns each rank's own mean of the loss")]
    if meaning := _meaning(factor, found):
        return [Finding("factor", f"gradients are right, but the loss is off by the factor {factor:.4g}{meaning}")]
    return []
