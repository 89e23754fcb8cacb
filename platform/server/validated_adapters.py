"""Says in the log which adapters were validated by an engine that answered differently from this one."""

import structlog

from loraplex.tenants.database import Database
from loraplex.tenants.errors import StoreUnavailable
from loraplex.tenants.registry.versions import serving_by_fingerprint

LOG = structlog.get_logger("loraplex.lifecycle")


async def report_other_fingerprints(database: Database, system_fingerprint: str | None) -> None:
    """Log how many serving versions were validated under each fingerprint but this one: they are served, unprobed since."""
    try:
        async with database.as_operator() as session:
            counts = await serving_by_fingerprint(session)
    except StoreUnavailable as error:
        LOG.warning("the fingerprints of validated adapters are not known", reason=str(error))
        return
    for other, count in sorted(counts.items()):
        if other != system_fingerprint:
            LOG.warning(
                "adapters were validated under another fingerprint",
                adapter_versions=count,
                validated_under=other,
                system_fingerprint=system_fingerprint,
            )
