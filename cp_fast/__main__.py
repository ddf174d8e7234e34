"""`python -m cp_fast`: a demonstration that checks itself, a look at this machine, and the plan of any problem."""

from cp_fast.tools.cli import app

if __name__ == "__main__":
    app(prog_name="python -m cp_fast")
