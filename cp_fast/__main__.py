"""`python -m cp_fast`, or `cp-attention`: a demonstration, a look at this machine, and the plan of any problem."""

from cp_fast.tools.cli import app, command_line
from cp_ref.show.cli.lazy_commands import start


def main() -> None:
    """The console script `cp-attention`."""
    start(command_line(completion=True), "cp-attention")


if __name__ == "__main__":
    start(app, "python -m cp_fast")
