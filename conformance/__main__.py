"""`python -m conformance`, or `cp-conformance`. Its command `step` runs where there is no Hypothesis too."""

import sys

__all__ = ["main"]


def main(name: str = "cp-conformance", completion: bool = True) -> None:
    """Run the command line as this process, by the name that its help shows."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a folder's name may be no UTF-8
    if sys.argv[1:2] == ["step"]:
        from conformance.step_command import app as step_app

        step_app(sys.argv[2:], prog_name=f"{name} step")
    try:
        from conformance.cli import command_line
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "hypothesis":
            raise
        sys.exit(f"{name} needs Hypothesis, and Jinja for its report: pip install hypothesis jinja2")
    command_line(completion)(prog_name=name)


if __name__ == "__main__":
    main("python -m conformance", completion=False)
