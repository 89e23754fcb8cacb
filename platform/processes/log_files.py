"""Copies of log lines in files: `gateway.log`, `engine.log`, `engine-2.log` …, each of at most 5 x 10 MiB, for `loraplex logs`.

Invariant: one process writes a file while it holds its lock; files are for their owner alone (0600 in 0700).
"""

import fcntl
import os
from datetime import UTC, datetime
from io import TextIOWrapper
from itertools import count
from logging import LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import structlog
from structlog.typing import EventDict, WrappedLogger

from loraplex.platform.processes.redaction import redact

FOLDER: Final = "logs"
MAX_BYTES: Final = 10 << 20
OLDER_FILES: Final = 4
LOG = structlog.get_logger("loraplex.log_files")


class LogFile(RotatingFileHandler):
    """A processor of structlog that writes each event as a line of JSON, and passes it on. Lines begin with their time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=OLDER_FILES, encoding="utf-8")
        self._process = path.stem
        self._render = structlog.processors.JSONRenderer()

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        began = {"timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"), "process": self._process}
        line = redact(str(self._render(logger, name, began | {**event, **began})))
        self.handle(LogRecord(name, 0, "", 0, line, None, None))
        return event

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=_open_private)

    def handleError(self, record: LogRecord) -> None:
        """Write nothing where the disk is full: the line is on standard error, too."""


def also_log_to(data_dir: Path, role: str) -> None:
    """Copy further log lines of this process, to the first file of its role that no other one writes.

    There is none in a folder that cannot be written, such as that of an engine with a read-only root, which logs a warning.
    """
    folder = data_dir / FOLDER
    names: Any = (role if number == 1 else f"{role}-{number}" for number in count(1))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = LogFile(folder / next(f"{name}.log" for name in names if _locked(folder / f".{name}.lock")))
    except OSError as error:
        LOG.warning("log lines go to standard error alone", reason=str(error))
        return
    *before, renderer, redaction = structlog.get_config()["processors"]
    structlog.configure(processors=[*before, file, renderer, redaction])


def _locked(path: Path) -> bool:
    """Lock a file until this process ends, unless another process has."""
    descriptor = _open_private(str(path), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    return True


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
