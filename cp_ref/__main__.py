"""`python -m cp_ref`: a problem explained step by step, and two runs recorded and compared."""

from cp_ref.cli import app
from cp_ref.show.cli.lazy_commands import start

if __name__ == "__main__":
    start(app, "python -m cp_ref")
