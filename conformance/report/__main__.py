"""`python -m conformance.report RECORD.json -o DIR`: the report of a run that was played before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conformance.report import read_record, write_report

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    record: Annotated[Path, typer.Argument(help="A record that a run wrote, or a report.json.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder for report.json and report.html.")],
) -> None:
    """Render the report of a run again."""
    try:
        read = read_record(record)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="RECORD") from error
    try:
        files = write_report(read, output)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--output") from error
    for file in files:
        typer.echo(str(file))


if __name__ == "__main__":
    app(prog_name="python -m conformance.report")
