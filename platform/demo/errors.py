"""Errors that stop `serve --demo` before it serves.

DemoError                  a start error: one clear line, exit code 1
├── StageFailed            a child process (pip, the conversion) failed: its last lines are quoted
├── DemoModelUnavailable   the demo model could not be fetched, is not the pinned one, or does not fit the disk
└── TenantIsNotTheDemos    a tenant with a name of the demo exists and was not created by it
"""

from loraplex.platform.startup_errors import StartError


class DemoError(StartError):
    """Base of all errors of the demo."""


class StageFailed(DemoError):
    pass


class DemoModelUnavailable(DemoError):
    def __init__(self, reason: str) -> None:
        super().__init__(f"demo model: {reason} (serve a model of your own with --model PATH)")


class TenantIsNotTheDemos(DemoError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"a tenant named {name!r} exists and was not created by the demo; give the demo another database "
            "(DATABASE_URL) or data directory (--data-dir)"
        )
