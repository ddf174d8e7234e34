"""Running a tier: draws cases with Hypothesis, counts, and keeps the smallest failing one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, Verbosity, given, settings

from conformance.capabilities import Capabilities
from conformance.case import Case
from conformance.implementation import Implementation
from conformance.reference import describe_error
from conformance.run import UnsupportedCase
from conformance.strategies import CP_SIZES, cases
from conformance.tiers import CASE_TIERS, errors

__all__ = ["PROFILES", "Failure", "Profile", "TierResult", "replay", "run_errors", "run_tier"]

_SHRINK_S = 30.0
_ERROR_PREFIX = "error "


@dataclass(frozen=True)
class Profile:
    """How many problems each tier draws, and whether they are the same ones every time."""

    max_examples: int
    derandomize: bool


PROFILES = {"quick": Profile(60, True), "ci": Profile(500, True), "nightly": Profile(5000, False)}


@dataclass(frozen=True)
class Failure:
    """A failing case as text that `--repro` takes, and what is wrong with it."""

    text: str
    findings: tuple[str, ...]


@dataclass
class TierResult:
    """A tier's counts. A drawn tier stops counting at its first failure, so its `failures` has at most one."""

    tier: str
    run: int = 0
    passed: int = 0
    unsupported: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    note: str = ""


class _Failed(AssertionError):
    """What the drawn test raises; the findings are kept beside it."""


def run_tier(
    impl: Implementation,
    tier_name: str,
    capabilities: Capabilities,
    profile: Profile,
    *,
    cp_sizes: Sequence[int] = CP_SIZES,
    shrink: bool = True,
    on_problem: Callable[[], None] = lambda: None,
) -> TierResult:
    """Draw cases until `profile.max_examples` have passed or one fails; then look for the smallest that fails.

    Args:
        tier_name: one of `CASE_TIERS`.
        shrink: whether to look for a smaller failing case, or to keep the first.
        on_problem: called after every problem, shrinking left out.
    """
    tier, result, began = CASE_TIERS[tier_name], TierResult(tier_name), time.monotonic()
    if not any(capabilities.has("dtype", dtype) for dtype in tier.dtypes):
        result.note = f"none of {', '.join(tier.dtypes)} is supported"
        return result
    failing: dict[str, tuple[str, ...]] = {}
    give_up_at = [float("inf")]

    @settings(
        max_examples=profile.max_examples,
        derandomize=profile.derandomize,
        deadline=None,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        verbosity=Verbosity.quiet,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(cases(capabilities, cp_sizes=cp_sizes, dtypes=tier.dtypes))
    def one_problem(case: Case) -> None:
        text = str(case)
        if text not in failing:
            if time.monotonic() > give_up_at[0]:  # enough shrinking: only what is known to fail still does
                return
            try:
                findings, refused = _findings(impl, tier_name, case, capabilities.device), False
            except UnsupportedCase:
                findings, refused = [], True
            if not failing:
                result.run += 1
                result.unsupported += refused
                result.passed += not findings and not refused
                on_problem()
            if not findings:
                return
            failing[text] = tuple(findings)
            give_up_at[0] = min(give_up_at[0], time.monotonic() + _SHRINK_S)
        result.failures = [Failure(text, failing[text])]
        raise _Failed

    try:
        one_problem()
    except Exception as error:
        if not result.failures:
            raise
        if not isinstance(error, _Failed):
            result.note = f"{type(error).__name__}: {error}"  # Hypothesis found it flaky, say
    result.seconds = time.monotonic() - began
    return result


def run_errors(
    impl: Implementation, capabilities: Capabilities, *, on_problem: Callable[[], None] = lambda: None
) -> TierResult:
    """The whole table of the tier `errors`; every failing entry is reported."""
    result, began = TierResult("errors"), time.monotonic()
    for entry_id in errors.error_ids(capabilities):
        findings = errors.check(impl, entry_id, capabilities.device)
        result.run += 1
        result.passed += not findings
        if findings:
            result.failures.append(Failure(_ERROR_PREFIX + entry_id, tuple(findings)))
        on_problem()
    result.seconds = time.monotonic() - began
    return result


def replay(impl: Implementation, text: str, tier_names: Sequence[str], device: str = "cpu") -> list[TierResult]:
    """Play one case again: `text` is what a failure printed, a `Case(...)` or "error ID".

    Returns:
        One result for each of the tiers (for an error case, the tier `errors` alone).

    Raises:
        ValueError: the text is neither.
    """
    if text.startswith(_ERROR_PREFIX):
        result = TierResult("errors", run=1)
        if findings := errors.check(impl, text.removeprefix(_ERROR_PREFIX).strip(), device):
            result.failures.append(Failure(text, tuple(findings)))
        result.passed = 1 - len(result.failures)
        return [result]
    case, results = Case.parse(text), []
    for name in tier_names:
        if name not in CASE_TIERS:
            continue
        began, result = time.monotonic(), TierResult(name, run=1)
        try:
            findings = _findings(impl, name, case, device)
            result.passed = int(not findings)
            if findings:
                result.failures.append(Failure(str(case), tuple(findings)))
        except UnsupportedCase as refusal:
            result.unsupported, result.note = 1, str(refusal)
        result.seconds = time.monotonic() - began
        results.append(result)
    return results


def _findings(impl: Implementation, tier_name: str, case: Case, device: str) -> list[str]:
    try:
        return CASE_TIERS[tier_name].check(impl, case, device)
    except UnsupportedCase:
        raise
    except Exception as error:  # the oracle refused what the strategies drew, or the suite itself is wrong
        return [f"the suite could not judge this case: {describe_error(error)}"]
