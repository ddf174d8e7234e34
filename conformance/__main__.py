"""`python -m conformance`."""

from conformance.cli import app

if __name__ == "__main__":
    app(prog_name="python -m conformance")
