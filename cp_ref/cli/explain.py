from __future__ import annotations
from cp_ref.cli.problem import Request, with_problem


@with_problem
def explain(request: Request) -> None:
    """E."""
    print(request.plan)
