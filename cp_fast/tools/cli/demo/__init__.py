"""`demo`: context-parallel attention on real documents over real processes, checked against the oracle."""

from cp_fast.tools.cli.demo import demo

__all__ = ["demo"]
