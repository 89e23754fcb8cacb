"""The Valkey connection and every key name in it. Invariant: no call retries or waits beyond its timeouts, and all keys
of one tenant share a hash tag, so that one script may touch them together.
"""

from uuid import UUID

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from loraplex.tenants.errors import InvalidField, ValkeyUnavailable

SCHEMES = ("redis", "rediss", "unix")
CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 1.0
MAX_CONNECTIONS = 100


def open_valkey(url: str) -> Redis:
    """A client for a `redis://`, `rediss://` or `unix://` address; it connects on first use. Close it with `aclose`."""
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise InvalidField(
            "REDIS_URL", f"REDIS_URL begins with {scheme[:20]!r}; allowed: {', '.join(SCHEMES)}"
        )
    return Redis.from_url(
        url,
        socket_connect_timeout=CONNECT_SECONDS,
        socket_timeout=ANSWER_SECONDS,
        max_connections=MAX_CONNECTIONS,
        retry=Retry(NoBackoff(), 0),
    )


async def ping(client: Redis) -> None:
    """Raises `ValkeyUnavailable` unless Valkey answers within a second."""
    try:
        await client.ping()
    except RedisError as error:
        raise ValkeyUnavailable(f"Valkey did not answer: {error}") from error


def tenant_key(tenant_id: UUID, *parts: str) -> str:
    """The name of a tenant's key: `loraplex:{<tenant>}:<part>:…`."""
    return ":".join(("loraplex", f"{{{tenant_id}}}", *parts))
