"""`python -m conformance`."""

import sys

if __name__ == "__main__":
    try:
        from conformance.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "hypothesis":
            raise
        sys.exit("python -m conformance needs Hypothesis, which the extra 'test' has: pip install 'cp-attention[test]'")
    app(prog_name="python -m conformance")
