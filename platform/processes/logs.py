"""Logs on standard error: readable lines on a terminal, otherwise one JSON object per line, those of libraries too.

Invariant: no log line contains message content or a key.
"""

import logging
import sys

import structlog
from structlog.typing import EventDict, WrappedLogger

from loraplex.platform.processes.redaction import drop_sensitive_fields, redact

# Carriage return and "erase line": a spinner of this or of the parent process may be on the line, and is drawn again below.
ERASE_LINE = "\r\x1b[2K"


def configure_logs(level: str) -> None:
    """Send structlog to standard error and raise the level of verbose libraries. Entry points call it once."""
    on_terminal = sys.stderr.isatty()
    time_format = "%H:%M:%S" if on_terminal else "iso"
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt=time_format, utc=not on_terminal),
            structlog.processors.format_exc_info,
            drop_sensitive_fields,
            TerminalRenderer() if on_terminal else structlog.processors.JSONRenderer(),
            lambda logger, name, line: redact(str(line)),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )
    _take_over_libraries()
    for name in ("httpx", "uvicorn.access", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _take_over_libraries() -> None:
    root = logging.getLogger()
    if not any(isinstance(handler, LibraryLines) for handler in root.handlers):
        root.addHandler(LibraryLines())


class LibraryLines(logging.Handler):
    """Writes what libraries log with the standard library as lines like all others."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
        log.log(level, record.getMessage(), logger=record.name, exc_info=record.exc_info)


class TerminalRenderer:
    """Renders an event as one readable line: time, level, event, key=value."""

    def __init__(self) -> None:
        # `format_exc_info` has rendered the traceback already. Without this formatter structlog would warn, and print local
        # variables, which could show a key or a prompt, where that processor is missing.
        self._render = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> str:
        return f"{ERASE_LINE}{self._render(logger, name, event)}"
