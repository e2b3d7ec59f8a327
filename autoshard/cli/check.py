"""`autoshard check`."""

import pathlib
from typing import Annotated

import rich.box
import rich.console
import rich.table
import rich.text
import typer

from autoshard.cli.common import Traceback, errors_shown

EPILOG = (
    "Examples:\n\n"
    "    autoshard check runs/quickstart\n\n"
    "    autoshard check runs/quickstart --json checked.json\n\n"
    "Every file of every checkpoint is read and compared with its checksum in the manifest beside it, also of those "
    "that were set aside as damaged. Nothing is changed. The exit status is 1 if any is damaged."
)


def check(
    folder: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="The output folder of a run.")],
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Write what was found to this file.")
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Check all checkpoints of a run against their checksums."""
    with errors_shown(traceback):
        import json

        from autoshard.checkpoints.checking import check_run
        from autoshard.files import write_text_atomically

        console = rich.console.Console()
        with console.status("Reading checkpoints"):
            checked = check_run(folder)
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
        for name in ("step", "files", "MB"):
            table.add_column(name, justify="right")
        table.add_column("checkpoint")
        table.add_column("found", overflow="fold")
        for one in checked:
            first = str(one.faults[0]) if one.faults else "sound"
            more = f" (and {len(one.faults) - 1} more)" if len(one.faults) > 1 else ""
            table.add_row(
                str(one.step), str(one.num_files), f"{one.size_bytes / 1e6:.1f}", one.path.name,
                rich.text.Text(first + more, "bold red" if one.faults else "green"),
            )  # fmt: skip
        console.print(table)
        damaged = sum(bool(one.faults) for one in checked)
        console.print(f"{len(checked) - damaged} of {len(checked)} checkpoints are sound.", highlight=False)
        if json_file is not None:
            records = [
                {
                    "path": str(one.path), "step": one.step, "num_files": one.num_files, "size_bytes": one.size_bytes,
                    "faults": [{"file": fault.file, "why": fault.why} for fault in one.faults],
                }
                for one in checked
            ]  # fmt: skip
            write_text_atomically(json_file, json.dumps(records, indent=1) + "\n")
        if damaged:
            raise typer.Exit(1)
