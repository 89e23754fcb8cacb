"""Composition root of a gateway: opens stores, engines and HTTP application in order and closes them in reverse.

Invariant: everything that was opened is closed, however the start or the run ends.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from fastapi import FastAPI

from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.garbage_collection import BlobGarbageCollector
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.platform.auth.client_address import ClientAddresses
from loraplex.platform.auth.identity_provider import IdentityProvider, ProviderOptions
from loraplex.platform.auth.mail import MailServer
from loraplex.platform.auth.mailed_links import MailedLinks
from loraplex.platform.config import Settings
from loraplex.platform.datastores.connections import (
    StoreAddresses,
    change_schema,
    open_stores,
    schema_revision,
)
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.evaluations.recording import RecordingWriter
from loraplex.platform.evaluations.suite_check import SuiteChecks
from loraplex.platform.inference.decisions.option_readers import OptionReaders
from loraplex.platform.inference.dependencies import GatewayDependencies, ServingConfig
from loraplex.platform.inference.prompting.chat_template import PromptRenderer
from loraplex.platform.inference.prompting.token_text import TokenText
from loraplex.platform.inference.prompting.tokenizer import load_tokenizer
from loraplex.platform.inference.structured_output.build_task import AnalysisSetup
from loraplex.platform.inference.structured_output.value_validation import (
    ValueValidation,
    value_validation_task,
)
from loraplex.platform.jobs.canary_watch import CanaryWatch
from loraplex.platform.jobs.engine_minutes import EngineMinuteWriter
from loraplex.platform.jobs.housekeeping import Housekeeping
from loraplex.platform.jobs.meter_export import MeterExporter, MeterFile, MeterSink, MeterUrl
from loraplex.platform.jobs.month_closing import MonthClosing
from loraplex.platform.jobs.receiver_client import ReceiverClient, ThreadedResolver
from loraplex.platform.jobs.tenant_erasure import StoredFiles, TenantErasure
from loraplex.platform.jobs.usage_reconciliation import UsageReconciliation
from loraplex.platform.jobs.webhook_delivery import AT_ONCE, WebhookDispatcher
from loraplex.platform.observability.exposition import MetricsExposition, metrics_router
from loraplex.platform.observability.health import Health, health_router
from loraplex.platform.observability.request_record import RequestObserver
from loraplex.platform.processes.environment import foreign_environment
from loraplex.platform.server.base_model_file import BaseModelFacts, default_served_name, write_base_model
from loraplex.platform.server.components import (
    adapter_limits,
    open_compile_checks,
    open_lifecycle,
    open_request_analysis,
    report_other_fingerprints,
)
from loraplex.platform.server.request_observers import request_observers
from loraplex.platform.server.resources import (
    CheckedStores,
    GatewayResources,
    open_checked_stores,
    open_resources,
)
from loraplex.platform.server.secret import derive, tenant_namespace
from loraplex.platform.server.start import GatewayStart, bounded_stage
from loraplex.platform.startup_errors import SettingsError
from loraplex.platform.web.app import create_app
from loraplex.platform.web.console_app import ConsoleOptions, add_console
from loraplex.platform.web.engine.health import upload_trouble
from loraplex.platform.web.transport.docs import index_router
from loraplex.platform.workers.pool import WorkerPool
from loraplex.tenants.api_keys.last_used import writing_use
from loraplex.tenants.api_keys.networks import parse_network
from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.evaluations.encrypted_contents import EncryptedContents
from loraplex.tenants.ledger.partitions import LedgerPartitions, LedgerRetention
from loraplex.tenants.ledger.serving_cost import AcceleratorPrice
from loraplex.tenants.retention import Retention
from loraplex.tenants.webhooks.encrypted_secrets import WebhookSecrets

KNOWN_NAMESPACES: Final = 4096
"""Tenants whose cache namespace is kept: deriving one takes 10 microseconds, several times in a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGateway:
    """A gateway that is ready to listen."""

    app: FastAPI
    exposition: MetricsExposition
    engines: EnginePool
    health: Health
    database: Database
    adapters: LocalAdapterStore
    served_model_name: str
    stores_lost: Future[str]
    """Gets the reason when embedded servers cannot be kept running."""


@asynccontextmanager
async def open_gateway(start: GatewayStart) -> AsyncIterator[OpenGateway]:
    """Open a gateway beside the start of its engines, and wait for both. Raises `StartError`: that of whichever fails first."""
    async with AsyncExitStack() as stack:
        opening = asyncio.create_task(_open(start, stack))
        try:
            gateway, _ = await asyncio.gather(opening, start.engines.ready)
        except BaseException:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            raise
        _run_in_background(gateway.health.watch(), stack)
        yield gateway


async def _open(start: GatewayStart, stack: AsyncExitStack) -> OpenGateway:
    with _as_settings_error():
        addresses = await _open_stores(start, stack)
        stores = await open_checked_stores(start, addresses, stack)
    await start.engines.described()
    return await _assemble(start, stores, addresses, stack)


@contextmanager
def _as_settings_error() -> Iterator[None]:
    """Report a store's malformed address as the wrong setting that it is. Raises `SettingsError`."""
    try:
        yield
    except InvalidField as error:
        raise SettingsError(str(error)) from error


async def _open_stores(start: GatewayStart, stack: AsyncExitStack) -> StoreAddresses:
    settings = start.settings
    if settings.database_url is None or settings.redis_url is None:
        start.on_stage(f"starting PostgreSQL and Valkey under {settings.data_dir}")
    addresses = await stack.enter_async_context(open_stores(settings))
    start.on_stage("checking the database's schema")
    embedded = addresses.embedded_database
    # A migration has bounds of its own, and may take long.
    async with bounded_stage("checking the database's schema"):
        revision = await asyncio.to_thread(schema_revision, addresses.database_url)
    await asyncio.to_thread(
        change_schema,
        addresses.database_url,
        revision,
        migrate=embedded,
        migrate_empty=True,
        embedded_in=settings.data_dir if embedded else None,
    )
    return addresses


async def _assemble(
    start: GatewayStart, stores: CheckedStores, addresses: StoreAddresses, stack: AsyncExitStack
) -> OpenGateway:
    settings, engines = start.settings, start.engines.pool
    served_name = settings.served_model_name or default_served_name(start.model or engines.info().model_path)
    resources = await open_resources(settings, served_name, stores, addresses, engines, stack)
    dependencies = await _open_dependencies(settings, resources, stack)
    resources.health.storage_trouble = partial(upload_trouble, dependencies.uploads)
    stack.push_async_callback(dependencies.background_tasks.join)
    info = resources.info
    facts = BaseModelFacts(served_name, info.model_path, info.model_digest, info.system_fingerprint)
    write_base_model(settings.data_dir, facts)
    for job in _jobs(settings, dependencies, resources, stack):
        _run_in_background(job, stack)
    exposition = MetricsExposition(resources.metrics.render)
    observers = request_observers(settings, resources.metrics, stack)
    app = await _create_app(settings, dependencies, resources.health, exposition, observers)
    _run_in_background(app.state.evaluations.run(), stack)
    return OpenGateway(
        app=app,
        exposition=exposition,
        engines=engines,
        health=resources.health,
        database=resources.database,
        adapters=resources.blobs.local,
        served_model_name=served_name,
        stores_lost=addresses.lost,
    )


def _jobs(
    settings: Settings, dependencies: GatewayDependencies, resources: GatewayResources, stack: AsyncExitStack
) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield what a gateway does beside its requests."""
    blobs, database, billing = resources.blobs, resources.database, resources.metrics.billing
    yield blobs.cleaner(database).run()
    yield BlobGarbageCollector(database, blobs.adapters.delete).run()
    yield blobs.adapters.run_eviction()
    yield report_other_fingerprints(database, resources.info.system_fingerprint)
    yield _housekeeping(settings, dependencies, resources).run()
    yield MonthClosing(database=database, grace=timedelta(hours=settings.invoice_grace_hours)).run()
    yield EngineMinuteWriter(database=database, minutes=resources.metrics.minutes).run()
    yield CanaryWatch(database=database, publisher=resources.admissions).run()
    billing.watch_counters(lambda: resources.admissions.reconciliation.drifts_pico)
    yield UsageReconciliation(database=database, recorder=billing).run()
    contents = EncryptedContents(dependencies.derive_key)
    yield RecordingWriter(database=database, queue=dependencies.recordings, contents=contents).run()
    yield from _outbox(settings, dependencies, resources, stack)


async def _open_dependencies(
    settings: Settings, resources: GatewayResources, stack: AsyncExitStack
) -> GatewayDependencies:
    info, engines, database = resources.info, resources.engines, resources.database
    blobs, metrics, admissions = resources.blobs, resources.metrics, resources.admissions
    limits, secret = serving_config(settings), resources.stores.secret
    namespace_of = lru_cache(KNOWN_NAMESPACES)(partial(_namespace_of, secret))
    pool = await stack.enter_async_context(WorkerPool())
    tokenizer = await asyncio.to_thread(load_tokenizer, info.model_path)
    prompts = PromptRenderer(tokenizer)
    setup = AnalysisSetup(limits.body, limits.grammar, frozenset(prompts.special_tokens))
    analysis = await stack.enter_async_context(open_request_analysis(pool, setup))
    serialized, token_text = tokenizer.backend_tokenizer.to_str(), TokenText(tokenizer)
    OptionReaders(prompts.continuation_ids, token_text).warn_of_unread()
    checks = open_compile_checks(pool, info, serialized, metrics, engines.wait_ready)
    compile_checks = await stack.enter_async_context(checks)
    served_name = resources.served_model_name
    lifecycle = await stack.enter_async_context(
        open_lifecycle(database, engines, blobs.adapters, blobs.local.root, namespace_of, pool, served_name)
    )
    return GatewayDependencies(
        served_model_name=served_name,
        database=database,
        engine=engines,
        health=resources.health,
        poison_memory=engines.poison_memory,
        prompts=prompts,
        token_text=token_text,
        recorder=metrics,
        request_analysis=analysis,
        compile_checks=compile_checks,
        value_validation=ValueValidation(pool, value_validation_task(foreign_environment())),
        suite_checks=SuiteChecks(pool, foreign_environment()),
        admission_controller=admissions,
        policy_publisher=admissions,
        currency_of=partial(_currency_of, resources.prices),
        namespace_of=namespace_of,
        derive_key=partial(derive, secret),
        adapter_path=partial(_adapter_path, blobs.adapters),
        config=limits,
        addresses=ClientAddresses(tuple(map(parse_network, settings.trusted_proxies))),
        key_use=await stack.enter_async_context(writing_use(database)),
        identity_provider=_identity_provider(settings, stack),
        mailed_links=_mailed_links(settings, database),
        uploads=blobs.uploads(database, lifecycle, await asyncio.to_thread(adapter_limits, info)),
    )


async def _create_app(
    settings: Settings,
    dependencies: GatewayDependencies,
    health: Health,
    exposition: MetricsExposition,
    observers: Sequence[RequestObserver],
) -> FastAPI:
    """Create the application and render its OpenAPI document, so that no request waits for that."""
    routers = [health_router(health)]
    if settings.metrics_port is None:
        routers.append(metrics_router(exposition))
    app = create_app(dependencies, routers, observers)
    if settings.console:
        options = ConsoleOptions(settings.public_url, settings.is_local, settings.demo)
        add_console(app, dependencies, options)
    app.include_router(index_router(console=settings.console))
    await asyncio.to_thread(lambda: app.rendered_document)
    return app


def _run_in_background(work: Coroutine[Any, Any, None], stack: AsyncExitStack) -> None:
    """Run `work` as a task until the gateway closes."""
    stack.callback(asyncio.create_task(work).cancel)


def _housekeeping(
    settings: Settings, dependencies: GatewayDependencies, resources: GatewayResources
) -> Housekeeping:
    erasure = TenantErasure(
        database=dependencies.database,
        valkey=resources.stores.valkey_client,
        engine=dependencies.engine,
        namespace_of=dependencies.namespace_of,
        files=StoredFiles(resources.blobs.adapters, resources.blobs.parts),
    )
    return Housekeeping(
        database=dependencies.database,
        erasure=erasure,
        retention=Retention(audit=timedelta(days=settings.audit_retention_days)),
        partitions=LedgerPartitions(
            dependencies.database.url, LedgerRetention(ledger_months=settings.ledger_retention_months)
        ),
    )


def _outbox(
    settings: Settings, dependencies: GatewayDependencies, resources: GatewayResources, stack: AsyncExitStack
) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield the delivery of webhooks, and the export of meter events where a setting names a sink."""
    resolver = ThreadedResolver(AT_ONCE + 1)
    stack.callback(resolver.close)
    client = ReceiverClient(resolver, allow_private=settings.webhook_allow_private)
    database, metrics = resources.database, resources.metrics.webhooks
    secrets = WebhookSecrets(dependencies.derive_key)
    yield WebhookDispatcher(database=database, client=client, secrets=secrets, metrics=metrics).run()
    sink = _meter_sink(settings, client)
    if sink is not None:
        yield MeterExporter(database=database, sink=sink, metrics=metrics).run()


def _meter_sink(settings: Settings, client: ReceiverClient) -> MeterSink | None:
    if settings.meter_export is None:
        return None
    if settings.meter_export_secret is None:
        return MeterFile(Path(settings.meter_export))
    return MeterUrl(client, settings.meter_export, settings.meter_export_secret.get_secret_value())


def _identity_provider(settings: Settings, stack: AsyncExitStack) -> IdentityProvider | None:
    if settings.oidc_issuer is None or settings.oidc_client_id is None:
        return None
    secret = settings.oidc_client_secret
    options = ProviderOptions(
        issuer=settings.oidc_issuer,
        client_id=settings.oidc_client_id,
        client_secret=None if secret is None else secret.get_secret_value(),
        name=settings.oidc_name,
        allowed_domains=tuple(domain.lower() for domain in settings.oidc_allowed_domains),
    )
    provider = IdentityProvider(options)
    stack.push_async_callback(provider.close)
    return provider


def _mailed_links(settings: Settings, database: Database) -> MailedLinks | None:
    if settings.smtp_url is None or settings.smtp_from is None or settings.public_url is None:
        return None
    server = MailServer.parse(settings.smtp_url.get_secret_value(), settings.smtp_from)
    return MailedLinks(database, server, settings.public_url)


def _namespace_of(secret: bytes, tenant_id: UUID) -> bytes:
    return tenant_namespace(secret, str(tenant_id))


def _currency_of(prices: PriceBook, tenant_id: UUID) -> str:
    return prices.table.currency(tenant_id, datetime.now(UTC))


async def _adapter_path(blobs: BlobStore, tenant_id: UUID, digest: str) -> str:
    return str(await blobs.ensure_local(tenant_id, digest))


def serving_config(settings: Settings) -> ServingConfig:
    """The bounds of requests that these settings give."""
    price = settings.accelerator_price_per_hour
    return ServingConfig(
        fast_forward=settings.grammar_fast_forward,
        max_in_flight=settings.max_requests_in_flight,
        queue_timeout_s=settings.queue_timeout_s,
        first_token_timeout_s=settings.first_token_timeout_s,
        total_timeout_s=settings.total_timeout_s,
        engine_restart_s=settings.engine_restart_s,
        allowed_origins=settings.allowed_origins,
        known_caller_s=settings.known_caller_s,
        webhook_allow_private=settings.webhook_allow_private,
        audit_retention_days=settings.audit_retention_days,
        accelerator_price=None if price is None else AcceleratorPrice(price, settings.currency),
    )
