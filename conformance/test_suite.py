"""The tests that `pytest --pyargs conformance --cp-impl pkg.module` collects."""

from conformance.suite import *  # noqa: F403
