"""`loraplex logs`: what the processes of a data directory have logged, merged by time. Lines are JSON objects."""

import os
import time
from collections import deque
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer

from loraplex.platform.cli.command_context import DataDir, exit_codes
from loraplex.platform.config import load_settings
from loraplex.platform.processes.log_files import FOLDER, OLDER_FILES
from loraplex.platform.startup_errors import DependencyFailed

POLL_S: Final = 0.3


def logs_command(
    lines: Annotated[int, typer.Option(min=0, help="The newest lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with new lines until Ctrl-C.")] = False,
    process: Annotated[str, typer.Option(help="Only of this process, such as engine or gateway.")] = "*",
    data_dir: DataDir = None,
) -> None:
    """Print the newest log lines of the processes that serve, oldest first."""
    folder = load_settings({"data_dir": data_dir}).data_dir / FOLDER
    with exit_codes():
        paths = sorted(folder.glob(f"{process}.log"))
        if not paths:
            raise DependencyFailed(f"{folder} has no {process}.log: `loraplex serve` writes it")
    # Each line begins with its time.
    newest = sorted(line for path in paths for line in _newest(path, lines))
    for line in newest[max(0, len(newest) - lines) :]:
        typer.echo(line, nl=False)
    if follow:
        _follow(folder, process)


def _newest(path: Path, lines: int) -> deque[str]:
    kept = deque[str](maxlen=lines)
    for file in (*(Path(f"{path}.{age}") for age in range(OLDER_FILES, 0, -1)), path):
        if file.exists():
            with file.open(encoding="utf-8", errors="replace") as opened:
                kept.extend(opened)
    return kept


def _follow(folder: Path, process: str) -> None:
    """Print what is added, also to files that are new or took the place of a full one."""
    files: dict[Path, BinaryIO] = {}
    is_first = True
    while True:
        for path in folder.glob(f"{process}.log"):
            file = files.get(path)
            # Asked before the rest of a full file is read, to which nothing is added then.
            is_new = file is None or os.fstat(file.fileno()).st_ino != path.stat().st_ino
            if file is not None:
                _print_rest(file)
            if is_new:
                files[path] = path.open("rb")
                files[path].seek(0, os.SEEK_END if is_first else os.SEEK_SET)
                _print_rest(files[path])
        is_first = False
        time.sleep(POLL_S)


def _print_rest(file: BinaryIO) -> None:
    for line in file:
        typer.echo(line, nl=False)
