"""The end of running requests: of a tenant, a key, an adapter or a version, on every gateway.

Invariant: it is committed with the change that ends them, as a fence, which every gateway reads (`admission/fences.py`).
"""

from typing import Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.database import writing

# One fence at a time until its commit: a gateway that sees one has seen all earlier ones.
LOCK_FENCES: Final = text("SELECT pg_advisory_xact_lock(hashtextextended('loraplex admission fences', 0))")
FIRE_TRIGGERS: Final = text("SET CONSTRAINTS ALL IMMEDIATE")
# The fence by which running requests end: of the whole tenant, or of one key, or on an adapter or one version of it. None where
# the tenant's have ended already.
END_RUNNING: Final = text("""
WITH raised AS (
    INSERT INTO admission_epochs AS e (tenant_id, epoch, fence, ended_policy_epoch)
    SELECT id, 0, nextval('admission_fence'), CASE WHEN :whole THEN policy_epoch ELSE 0 END
    FROM tenants WHERE id = :tenant_id
    ON CONFLICT (tenant_id) DO UPDATE SET fence = excluded.fence,
        ended_policy_epoch = greatest(e.ended_policy_epoch, excluded.ended_policy_epoch)
    WHERE NOT :whole OR e.ended_policy_epoch < excluded.ended_policy_epoch
    RETURNING fence
), ended_keys AS (
    UPDATE api_keys SET ended_fence = fence FROM raised WHERE tenant_id = :tenant_id AND id = :api_key_id
), ended_versions AS (
    UPDATE adapter_versions SET ended_fence = fence FROM raised WHERE tenant_id = :tenant_id
        AND adapter_id = :adapter_id AND (CAST(:version AS integer) IS NULL OR version = :version)
)
SELECT fence FROM raised
""")


async def end(
    session: AsyncSession,
    tenant_id: UUID,
    *,
    api_key_id: UUID | None = None,
    adapter_id: UUID | None = None,
    version: int | None = None,
) -> bool:
    """End what runs of the tenant, or only of the key, the adapter or its version, on every gateway, once the session commits.

    A late change of its transaction: no other fence is raised until that ends. Return False where all of the tenant's had ended.
    """
    parameters = {
        "tenant_id": tenant_id,
        "api_key_id": api_key_id,
        "adapter_id": adapter_id,
        "version": version,
        "whole": api_key_id is None and adapter_id is None,
    }
    # Deferred triggers lock the tenant's row, and its holder may wait for the lock of fences.
    await session.execute(FIRE_TRIGGERS)
    async with writing(session):
        await session.execute(LOCK_FENCES)
        return (await session.execute(END_RUNNING, parameters)).one_or_none() is not None
