"""Logs: one JSON object per line on standard error, or readable lines on a terminal; never message content or keys."""

import logging
import sys

import structlog


def configure_logs(level: str) -> None:
    """Send structlog to standard error and quieten chatty libraries. Called once, by a process's entry point."""
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )
    for name in ("httpx", "uvicorn.access", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
