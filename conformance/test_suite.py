"""The tests that `pytest --pyargs conformance --impl pkg.module` collects."""

from conformance.suite import *  # noqa: F403
