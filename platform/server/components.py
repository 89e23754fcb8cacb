"""Opens a gateway's admissions: their own clients of Valkey, and the upkeep that runs beside all requests."""

import asyncio
from contextlib import AsyncExitStack
from uuid import uuid4

from loraplex.platform.config import Settings
from loraplex.platform.observability.admission_metrics import AdmissionMetrics
from loraplex.tenants import valkey
from loraplex.tenants.admission.controller import Admissions, AdmissionSettings
from loraplex.tenants.database import Database


async def open_admissions(
    settings: Settings,
    redis_url: str,
    database: Database,
    metrics: AdmissionMetrics,
    stack: AsyncExitStack,
) -> Admissions:
    """Closed by `stack`, upkeep first. What requests wait for is given up sooner than what counts all of a tenant anew: by
    admission itself, which can tell a Valkey that hangs from a loop that is late.
    """
    fast = valkey.open_valkey(redis_url)
    stack.push_async_callback(fast.aclose)
    patient = valkey.open_valkey(redis_url)
    stack.push_async_callback(patient.aclose)
    times = AdmissionSettings(
        lease_s=settings.admission_lease_s,
        heartbeat_s=settings.admission_heartbeat_s,
        valkey_s=settings.valkey_timeout_s,
    )
    admissions = Admissions(database, fast, settings.price, uuid4(), times, patient=patient)
    stack.push_async_callback(admissions.close)
    metrics.watch(admissions)
    upkeep = asyncio.create_task(admissions.run())
    stack.push_async_callback(_ended, upkeep)
    return admissions


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
