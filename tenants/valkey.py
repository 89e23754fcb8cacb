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
CLUSTER_SCHEMES = ("redis+cluster", "rediss+cluster")
CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 1.0
# For calls that requests wait for: a hanging Valkey must not block requests.
COMMAND_SECONDS = 0.05
MAX_CONNECTIONS = 100
SCAN_COUNT = 1000
ERASE_BATCH = 500

# Errors of a client without a good reply; system errors are outside the library's error hierarchy.
FAILURES = (RedisError, OSError)


def open_valkey(url: str, *, command_s: float = ANSWER_SECONDS, connect_s: float = CONNECT_SECONDS) -> Redis:
    """A client for a `redis://`, `rediss://` or `unix://` address of one server.

    It connects on first use; close it with `aclose`. `command_s` bounds the wait for each reply. Raises `InvalidField`.
    """
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        found = "names a cluster, but all counters are on one server" if scheme in CLUSTER_SCHEMES else ""
        found = found or f"begins with {scheme[:20]!r}"
        raise InvalidField("REDIS_URL", f"REDIS_URL {found}; allowed: {', '.join(SCHEMES)}")
    return Redis.from_url(
        url,
        socket_connect_timeout=connect_s,
        socket_timeout=command_s,
        max_connections=MAX_CONNECTIONS,
        retry=Retry(NoBackoff(), 0),
    )


async def ping(client: Redis) -> None:
    """Raises `ValkeyUnavailable` unless Valkey answers within its timeout."""
    try:
        await client.ping()
    except FAILURES as error:
        raise ValkeyUnavailable(f"Valkey did not answer: {error}") from error


def tenant_key(tenant_id: UUID, *parts: str) -> str:
    """The name of a tenant's key: `loraplex:{<tenant>}:<part>:…`."""
    return ":".join(("loraplex", f"{{{tenant_id}}}", *parts))


async def forget_all_tenants(client: Redis) -> int:
    """Delete every key of every tenant, each tenant's in one step; return the number of tenants. Raises `ValkeyUnavailable`.

    This is a loss of all counters, not an erasure: what is written meanwhile may stay. The state goes with any key of its
    tenant, because counters that are missing below a living state would be zeros.
    """
    names: dict[bytes, set[bytes]] = {}
    try:
        async for name in client.scan_iter(match="loraplex:{*}:*", count=SCAN_COUNT):
            tenant = name[: name.index(b"}") + 1]
            names.setdefault(tenant, {tenant + b":state"}).add(name)
        for keys in names.values():
            await client.unlink(*keys)
    except FAILURES as error:
        raise ValkeyUnavailable(f"Valkey did not answer: {error}") from error
    return len(names)


async def erase_tenant(client: Redis, tenant_id: UUID) -> int:
    """Delete every key of a tenant and return their number. Keys written meanwhile may stay. Raises `ValkeyUnavailable`."""
    erased, names = 0, []
    try:
        async for name in client.scan_iter(match=tenant_key(tenant_id, "*"), count=SCAN_COUNT):
            names.append(name)
            if len(names) == ERASE_BATCH:
                erased += await client.unlink(*names)
                names = []
        return erased + (await client.unlink(*names) if names else 0)
    except FAILURES as error:
        raise ValkeyUnavailable(f"Valkey did not answer: {error}") from error
