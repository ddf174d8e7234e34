"""cp_ref and cp_fast have the same public names and signatures, so that a user debugs by swapping the import."""

from __future__ import annotations

import inspect

import pytest

import cp_fast
import cp_ref

ONLY_REFERENCE = {"SimGroup", "Trace", "compare", "dense_attention", "trace"}


def test_names() -> None:
    assert set(cp_ref.__all__) - ONLY_REFERENCE == set(cp_fast.__all__)


@pytest.mark.parametrize("name", ["attention", "make_plan", "supports", "shard", "unshard", "position_ids"])
def test_signatures(name: str) -> None:
    one, other = (inspect.signature(getattr(module, name)) for module in (cp_ref, cp_fast))
    assert str(one).replace("cp_ref", "cp_fast") == str(other)


@pytest.mark.parametrize("name", cp_ref.thd.__all__)
def test_helpers(name: str) -> None:
    assert cp_ref.thd.__all__ == cp_fast.thd.__all__
    one, other = (inspect.signature(getattr(module.thd, name)) for module in (cp_ref, cp_fast))
    assert str(one).replace("cp_ref", "cp_fast") == str(other)


def test_context_signatures() -> None:
    one, other = (inspect.signature(module.ContextParallel) for module in (cp_ref, cp_fast))
    assert str(one) == str(other)
    expected = "(group: 'Any', cp_comm_type: 'str' = 'p2p', *, layout: 'str' = 'dual_chunk', backend: 'str' = 'auto',"
    assert str(other).startswith(expected)


def test_one_exception() -> None:
    assert cp_ref.Unsupported is cp_fast.Unsupported
    assert issubclass(cp_fast.Unsupported, NotImplementedError)


def test_plans_have_the_same_attributes() -> None:
    for attribute in ("problem", "schedule", "position_ids", "rank", "device"):
        assert hasattr(cp_ref.Plan, attribute) or attribute in cp_ref.Plan.__annotations__
        assert hasattr(cp_fast.Plan, attribute) or attribute in cp_fast.Plan.__annotations__
