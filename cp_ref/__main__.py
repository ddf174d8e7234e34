"""`python -m cp_ref`: a problem explained step by step, and two runs recorded and compared."""

from cp_ref.cli import app

if __name__ == "__main__":
    app(prog_name="python -m cp_ref")
