"""Which cases a table of fields covers: known failures, and what an implementation claims.

A case matches if every field matches: a value, one value of a list, or a range {low = ..., high = ...}, both ends
included and either end optional. The fields are those of `Case` and `Problem` that hold one value, and

- `text`, what `--repro` takes;
- `causal`, `bottom_right`, `group_size`, `pairs`, `window_left`, `window_right`;
- `sequences`, their number, and `cross`: whether a sequence has unlike lengths of queries and keys;
- `shortest_q`, `longest_q`, `shortest_kv`, `longest_kv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from conformance.case import Case
from cp_ref.schedules.problem import Problem

__all__ = ["FIELDS", "field_values", "matches"]

_CASE = tuple(f.name for f in fields(Case) if f.name != "problem")
_PROBLEM = (
    *(f.name for f in fields(Problem) if f.name not in ("sequences", "window_size", "areas")),
    *("causal", "bottom_right", "group_size", "pairs"),
)
_ATTRIBUTES = {"group_size": "heads_per_kv"}  # of a problem, where the file has another word
_LENGTHS = ("sequences", "cross", "shortest_q", "longest_q", "shortest_kv", "longest_kv")
FIELDS = ("text", *_PROBLEM, "window_left", "window_right", *_LENGTHS, *_CASE)


def matches(values: Mapping[str, Any], match: Mapping[str, Any]) -> bool:
    """Whether the fields of a case (`field_values`) are those of a table.

    >>> values = field_values("Case(Problem(cp_size=4, sequences=[(8, 8, 8, 8)], cp_comm_type='p2p'))")
    >>> matches(values, {"cp_comm_type": ["p2p", "all_gather"], "cp_size": {"low": 3}})
    True
    """
    return all(name in values and _is(values[name], wanted) for name, wanted in match.items())


@lru_cache(maxsize=64)  # many entries ask for the same problem
def field_values(text: str) -> dict[str, Any]:
    """The fields of a "Case(...)" that `match` can name, without `text`; empty for any other text."""
    if not text.startswith("Case("):
        return {}
    case = Case.parse(text)
    p = case.problem
    queries, keys = [s.len_q for s in p.sequences], [s.len_kv for s in p.sequences]
    ends = (min(queries, default=0), max(queries, default=0), min(keys, default=0), max(keys, default=0))
    return {
        **{name: getattr(case, name) for name in _CASE},
        **{name: getattr(p, _ATTRIBUTES.get(name, name)) for name in _PROBLEM},
        **dict(zip(("window_left", "window_right"), p.window_size, strict=True)),
        **dict(zip(_LENGTHS, (len(p.sequences), queries != keys, *ends), strict=True)),
    }


def _is(value: Any, wanted: Any) -> bool:
    """Whether a field has a value, one of several, or one in a range. A range holds numbers only."""
    if isinstance(wanted, list):
        return any(_is(value, one) for one in wanted)
    if isinstance(wanted, dict):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and wanted.get("low", value) <= value <= wanted.get("high", value)
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)
