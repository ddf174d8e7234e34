"""Known bugs: what went wrong in other systems, as named problems, so that nobody makes it again."""

from conformance.known import frameworks, rings
from conformance.known import transformer_engine_reports as transformer_engine
from conformance.known.known_bug import Known

__all__ = ["KNOWN", "Known"]

KNOWN: dict[str, Known] = transformer_engine.REPORTS | rings.REPORTS | frameworks.REPORTS
