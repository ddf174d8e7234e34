"""`python -m conformance`; `python -m conformance step` has a separate command line."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["step"]:
        from conformance.step.step_command import app as step_app

        sys.argv = [sys.argv[0], *sys.argv[2:]]
        step_app(prog_name="python -m conformance step")
    try:
        from conformance.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "hypothesis":
            raise
        sys.exit("python -m conformance needs Hypothesis, which the extra 'test' has: pip install 'cp-attention[test]'")
    app(prog_name="python -m conformance")
