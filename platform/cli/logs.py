"""`loraplex logs`: what the processes of a data directory have logged, merged by time. Lines are JSON objects."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from heapq import nlargest
from pathlib import Path
from typing import Annotated, Final, TextIO

import typer

from loraplex.platform.cli.command_context import DataDir, exit_codes
from loraplex.platform.config import load_settings
from loraplex.platform.processes.log_files import FOLDER
from loraplex.platform.startup_errors import DependencyFailed

POLL_S: Final = 0.3


def logs_command(
    lines: Annotated[int, typer.Option(min=1, help="The newest lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with new lines until Ctrl-C.")] = False,
    process: Annotated[str, typer.Option(help="Only of this process, such as engine or gateway.")] = "*",
    data_dir: DataDir = None,
) -> None:
    """Print the newest log lines of the processes that serve, oldest first."""
    folder, opened = load_settings({"data_dir": data_dir}).data_dir / FOLDER, dict[int, TextIO]()
    # Each line begins with its time.
    newest = nlargest(lines, _new_lines(folder, process, opened))
    with exit_codes():
        if not opened:
            raise DependencyFailed(f"{folder} has no {process}.log: `loraplex serve` writes it")
    typer.echo("".join(reversed(newest)), nl=False)
    while follow:
        time.sleep(POLL_S)
        for line in _new_lines(folder, process, opened):
            typer.echo(line, nl=False)


def _new_lines(folder: Path, process: str, opened: dict[int, TextIO]) -> Iterator[str]:
    """What was not read yet. `opened`: files by their inode, which stays when a full one is renamed."""
    for number, file in [*opened.items()]:
        if os.fstat(file.fileno()).st_nlink == 0:
            opened.pop(number).close()
    # Of one process the oldest first: `engine.log.1` before `engine.log`.
    for path in sorted(folder.glob(f"{process}.log*"), reverse=True):
        # A process may rename or delete it meanwhile.
        with suppress(FileNotFoundError):
            if (number := path.stat().st_ino) not in opened:
                opened[number] = path.open(encoding="utf-8", errors="replace")
            yield from opened[number]
