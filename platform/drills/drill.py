"""Runs a drill: traffic of its own tenant, a fault, the wait for recovery, and the comparison of what it cost.

Invariant: whatever ends it, the fault is taken back and the tenant ended, by this process or by its watchdog.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final
from uuid import UUID

import psutil
import psycopg

from loraplex.platform.drills.drill_tenant import DrillTenant, DrillTenantTerms, create_drill_tenant
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults.fault import Fault, Observed
from loraplex.platform.drills.ledger_drift import LedgerDrift, measure_drift
from loraplex.platform.drills.report import DrillReport, Promise
from loraplex.platform.drills.traffic import TIMEOUT_S, DrillLoad, Traffic, recovery_s
from loraplex.platform.drills.undo import EndTenant, Undo
from loraplex.platform.drills.watchdog import DrillWatchdog
from loraplex.platform.processes.progress import Progress
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.counter_drift import compare_counters, opened_counters
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.errors import StoreUnavailable, TenantsError
from loraplex.tenants.ledger.usage_ledger import UsageLedger

WARM_UP: Final = 5
"""Requests that must be answered before the fault."""
WARM_UP_S: Final = 60.0
STEADY_S: Final = 1.0
"""Recovered is what had no error for so long."""
SHIPPED_S: Final = 120.0
RELEASED_S: Final = 2 * AdmissionConfig().lease_s + 30.0
"""Until the reservations of a killed gateway are free: a lease, and the time in which others look for such."""
SPARE_S: Final = 120.0
POLL_S: Final = 0.1
QUOTA_POLL_S: Final = 0.5
QUOTAS: Final = "quota counters agree with the ledger, and nothing stays reserved"
FAILURES: Final = (psutil.Error, psycopg.Error, TenantsError, OSError)
"""What a fault or its undo raises where the system does not let it."""


async def run_drill(fault: Fault, load: DrillLoad, progress: Progress) -> DrillReport:
    """Run the drill of a fault that was checked. Raises `DrillImpossible`, `NameTaken` while another one runs, and what the
    stores raise before the fault.
    """
    longest_s = _longest_s(fault, load)
    database = Database(fault.installation.database_url, pool_size=2)
    try:
        async with DrillWatchdog(longest_s) as watchdog, AsyncExitStack() as stack:
            tenants = [
                await stack.enter_async_context(_tenant(database, fault, terms, longest_s, watchdog))
                for terms in fault.tenants(load, longest_s)
            ]
            tenant = tenants[0]
            model = await fault.installation.base_model(tenant.api_key)
            load = await fault.prepare(tenants, model, load)
            progress(f"sending {load.rate_per_s:.3g} requests per second to {model}")
            traffic = Traffic(
                *(fault.installation.base_urls, tenant.api_key, model, load.rate_per_s, load.max_tokens),
                stream_share=load.stream_share,
            )
            async with traffic:
                await _warm_up(traffic)
                await watchdog.ready()
                began_s, ended_s = await _inject_fault(fault, watchdog, traffic, progress)
                progress("waiting until no request fails")
                await _recover(traffic, ended_s, load.recover_s)
            progress("comparing the ledger and the quota counters with what clients know")
            drift = await _measure(database, tenant, traffic)
            quotas = await check_quotas(database, fault.installation.redis_url, tenant.tenant_id, RELEASED_S)
            return await _report(fault, traffic, Observed(traffic.outcomes, began_s, ended_s, drift), quotas)
    finally:
        await database.close()


async def _measure(database: Database, tenant: DrillTenant, traffic: Traffic) -> LedgerDrift | None:
    """None if the ledger cannot be read, which breaks a promise."""
    try:
        return await measure_drift(database, tenant.tenant_id, traffic.outcomes, SHIPPED_S)
    except StoreUnavailable:
        return None


async def check_quotas(database: Database, redis_url: str, tenant_id: UUID, timeout_s: float) -> Promise:
    """Compare until they agree and no reservation is open, at most `timeout_s` seconds: leases of a killed gateway end late."""
    deadline = time.monotonic() + timeout_s
    async with opened_counters(database, redis_url) as (ledger, counters):
        while True:
            try:
                found = await _difference(ledger, counters, tenant_id)
            except StoreUnavailable as error:
                found = str(error)
            if found is None:
                return Promise(QUOTAS, True, "exact")
            if time.monotonic() >= deadline:
                return Promise(QUOTAS, False, found)
            await asyncio.sleep(QUOTA_POLL_S)


async def _difference(ledger: UsageLedger, counters: Counters, tenant_id: UUID) -> str | None:
    """What is wrong with the counters now; None if nothing is."""
    counted = await counters.settled(tenant_id)
    if counted is None:
        return "the counters are lost"
    if counted.open:
        return f"{len(counted.open)} requests are still reserved"
    drift = await compare_counters(ledger, tenant_id, counted)
    if drift is None:
        return None
    behind = ", ".join(
        f"{use.period}: {use.tokens:+d} tokens, {use.amount_nano:+d} nano-units" for use in drift.behind
    )
    return f"the ledger less the counters of epoch {counted.epoch}: {behind}"


def _longest_s(fault: Fault, load: DrillLoad) -> float:
    """Beyond every wait of a drill: then the watchdog acts, whatever the drill does."""
    own_s = fault.seconds + fault.more_s
    return WARM_UP_S + own_s + load.recover_s + TIMEOUT_S + SHIPPED_S + RELEASED_S + SPARE_S


@asynccontextmanager
async def _tenant(
    database: Database, fault: Fault, terms: DrillTenantTerms, longest_s: float, watchdog: DrillWatchdog
) -> AsyncIterator[DrillTenant]:
    """A tenant of the drill as long as the block runs."""
    tenant = await create_drill_tenant(database, terms, longest_s)
    end = EndTenant(fault.installation.database_url, tenant.tenant_id)
    async with _undone(end, watchdog):
        yield tenant


@asynccontextmanager
async def _undone(undo: Undo | None, watchdog: DrillWatchdog) -> AsyncIterator[None]:
    """Undo at the end of the block. Where that fails, the watchdog goes on trying, and `DrillImpossible` is raised."""
    if undo is None:
        yield
        return
    number = watchdog.add(undo)
    try:
        yield
    finally:
        try:
            await undo.run()
        except FAILURES as error:
            reason = f"the drill's watchdog goes on with {type(undo).__name__}, which failed: {error}"
            raise DrillImpossible(reason) from error
        watchdog.drop(number)


async def _warm_up(traffic: Traffic) -> None:
    """Wait until the gateways know the key and requests are answered. Raises `DrillImpossible`."""
    deadline = time.monotonic() + WARM_UP_S
    while sum(each.complete for each in traffic.outcomes) < WARM_UP:
        if traffic.errors or time.monotonic() > deadline:
            errors = dict(traffic.errors) or f"too few responses within {WARM_UP_S:g} s"
            raise DrillImpossible(f"requests are not served even without a fault: {errors}")
        await asyncio.sleep(POLL_S)


async def _inject_fault(
    fault: Fault, watchdog: DrillWatchdog, traffic: Traffic, progress: Progress
) -> tuple[float, float]:
    """Make the fault and take it back; return when it began and ended. Raises `DrillImpossible`."""
    async with _undone(fault.undo(), watchdog):
        progress(f"{fault.name}: the fault begins")
        began_s = time.monotonic()
        try:
            await fault.begin()
        except FAILURES as error:
            raise DrillImpossible(f"the fault could not be made: {error}") from error
        await fault.last(traffic.outcomes)
    ended_s = time.monotonic()
    progress(f"{fault.name}: the fault is over after {ended_s - began_s:.1f} s")
    return began_s, ended_s


async def _recover(traffic: Traffic, ended_s: float, limit_s: float) -> None:
    """Wait until a request that began after the fault is answered and none has failed for a while, at most `limit_s`."""
    while (now := time.monotonic()) < ended_s + limit_s:
        is_served = any(each.complete and each.started_s > ended_s for each in traffic.outcomes)
        failed = max((each.ended_s for each in traffic.outcomes if not each.complete), default=ended_s)
        if is_served and now - max(failed, ended_s) > STEADY_S:
            return
        await asyncio.sleep(POLL_S)


async def _report(fault: Fault, traffic: Traffic, observed: Observed, quotas: Promise) -> DrillReport:
    report = DrillReport(
        fault=fault.name,
        fault_s=observed.ended_s - observed.began_s,
        requests=len(observed.outcomes),
        completed=sum(each.complete for each in observed.outcomes),
        errors=dict(traffic.errors),
        recovery_s=recovery_s(observed.outcomes, observed.began_s),
        drift=observed.drift,
        notes=fault.notes,
    )
    unexpected = {code: count for code, count in traffic.errors.items() if code not in fault.allowed_errors}
    allowed = ", ".join(sorted(fault.allowed_errors)) or "none"
    report.promises += [
        Promise(f"clients get no errors but: {allowed}", not unexpected, str(unexpected or "no other")),
        Promise("requests are served again", report.recovery_s is not None, _seconds(report.recovery_s)),
        *_of_ledger(observed.drift, charges_all=fault.charges_all),
        quotas,
        *await fault.promises(observed),
    ]
    if observed.drift is not None and not observed.drift.amount_pico:
        report.notes.append("requests have no price here: tokens were compared, amounts of money are zero")
    return report


def _seconds(value: float | None) -> str:
    return "not yet" if value is None else f"after {value:.2f} s"


def _of_ledger(drift: LedgerDrift | None, *, charges_all: bool) -> list[Promise]:
    if drift is None:
        return [Promise("the ledger can be read afterwards", False, f"not within {SHIPPED_S:g} s")]
    found = f"{drift.drift_pico} pico-units, {drift.drift_tokens} tokens"
    lost = (
        f"{drift.missing} lost, {drift.duplicated} twice, {drift.unexpected} of no request, {drift.open} open"
    )
    promises = [
        Promise("the ledger has what responses say: drift 0", drift.is_exact, found),
        Promise("each response has one row, and nothing stays open", drift.is_complete, lost),
    ]
    if charges_all:
        all_charged = drift.unbilled_tokens == 0
        found = f"{drift.unbilled_tokens} tokens received but not charged"
        promises.append(Promise("a response that broke off is charged as delivered", all_charged, found))
    return promises
