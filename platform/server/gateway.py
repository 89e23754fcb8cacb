"""Composition root of a gateway: opens stores, engines and HTTP application in order and closes them in reverse.

Invariant: everything that was opened is closed, however the start or the run ends.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
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
from loraplex.engine.messages import EngineInfo
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
from loraplex.platform.engines.startup import StartingEngines
from loraplex.platform.inference.dependencies import GatewayDependencies, ServingConfig
from loraplex.platform.inference.prompting.chat_template import PromptRenderer
from loraplex.platform.inference.prompting.token_text import TokenText
from loraplex.platform.inference.prompting.tokenizer import load_tokenizer
from loraplex.platform.inference.structured_output.build_task import AnalysisSetup
from loraplex.platform.inference.structured_output.compile_checks import CompileChecks
from loraplex.platform.inference.structured_output.request_analysis import RequestAnalysis
from loraplex.platform.inference.structured_output.value_validation import ValueValidation
from loraplex.platform.jobs.housekeeping import Housekeeping
from loraplex.platform.jobs.meter_export import MeterExporter, MeterFile, MeterSink, MeterUrl
from loraplex.platform.jobs.month_closing import MonthClosing
from loraplex.platform.jobs.receiver_client import ReceiverClient, ThreadedResolver
from loraplex.platform.jobs.tenant_erasure import StoredFiles, TenantErasure
from loraplex.platform.jobs.usage_reconciliation import UsageReconciliation
from loraplex.platform.jobs.webhook_delivery import AT_ONCE, WebhookDispatcher
from loraplex.platform.observability.exposition import MetricsExposition, metrics_router
from loraplex.platform.observability.health import Health, health_router
from loraplex.platform.observability.metrics import Metrics
from loraplex.platform.observability.request_record import RequestObserver
from loraplex.platform.parameters.json_object import BodyLimits
from loraplex.platform.server.base_model_file import BaseModelFacts, default_served_name, write_base_model
from loraplex.platform.server.bounded_stage import bounded_stage
from loraplex.platform.server.components import (
    adapter_limits,
    open_compile_checks,
    open_lifecycle,
    open_request_analysis,
    open_worker_pool,
    value_validation,
)
from loraplex.platform.server.request_observers import request_observers
from loraplex.platform.server.resources import (
    CheckedStores,
    GatewayResources,
    open_checked_stores,
    open_resources,
)
from loraplex.platform.server.secret import derive, tenant_namespace
from loraplex.platform.server.validated_adapters import report_other_fingerprints
from loraplex.platform.startup_errors import SettingsError
from loraplex.platform.web.app import create_app
from loraplex.platform.web.console_app import ConsoleOptions, add_console
from loraplex.platform.web.engine.health import upload_trouble
from loraplex.platform.web.transport.index import index_router
from loraplex.platform.workers.pool import WorkerPool
from loraplex.tenants.api_keys.last_used import writing_use
from loraplex.tenants.api_keys.networks import parse_network
from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.ledger.partitions import LedgerPartitions, LedgerRetention
from loraplex.tenants.ledger.serving_cost import AcceleratorPrice
from loraplex.tenants.retention import Retention
from loraplex.tenants.webhooks.encrypted_secrets import WebhookSecrets

OnStage = Callable[[str], None]
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
async def open_gateway(
    settings: Settings,
    model: str | None,
    engines: StartingEngines,
    on_stage: OnStage,
    *,
    accept_new_secret: bool = False,
) -> AsyncIterator[OpenGateway]:
    """Open a gateway beside the start of its engines, and wait for both. `model` is None when other processes run them.

    Raises `StartError`: that of whichever fails first. The caller ends the engines.
    """
    async with AsyncExitStack() as stack:
        opening = asyncio.create_task(_open(settings, model, engines, stack, on_stage, accept_new_secret))
        try:
            gateway, _ = await asyncio.gather(opening, engines.ready)
        except BaseException:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            raise
        _run_in_background(gateway.health.watch(), stack)
        yield gateway


async def _open(
    settings: Settings,
    model: str | None,
    engines: StartingEngines,
    stack: AsyncExitStack,
    on_stage: OnStage,
    accept_new_secret: bool,
) -> OpenGateway:
    addresses = await _open_stores(settings, stack, on_stage)
    with _as_settings_error():
        stores = await open_checked_stores(
            settings, addresses, stack, on_stage, accept_new_secret=accept_new_secret
        )
    await engines.described()
    return await _assemble(settings, model, stores, addresses, engines.pool, stack)


@contextmanager
def _as_settings_error() -> Iterator[None]:
    """Report a store's malformed address as the wrong setting that it is. Raises `SettingsError`."""
    try:
        yield
    except InvalidField as error:
        raise SettingsError(str(error)) from error


async def _open_stores(settings: Settings, stack: AsyncExitStack, on_stage: OnStage) -> StoreAddresses:
    if settings.database_url is None or settings.redis_url is None:
        on_stage(f"starting PostgreSQL and Valkey under {settings.data_dir}")
    addresses = await stack.enter_async_context(open_stores(settings))
    on_stage("checking the database's schema")
    embedded = addresses.embedded_database
    with _as_settings_error():
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TextComponents:
    """Components that depend on the model's tokens and grammars, and the processes that work on them."""

    prompts: PromptRenderer
    token_text: TokenText
    request_analysis: RequestAnalysis
    compile_checks: CompileChecks
    value_validation: ValueValidation


async def _assemble(
    settings: Settings,
    model: str | None,
    stores: CheckedStores,
    addresses: StoreAddresses,
    engines: EnginePool,
    stack: AsyncExitStack,
) -> OpenGateway:
    served_name = settings.served_model_name or default_served_name(model or engines.info().model_path)
    resources = await open_resources(settings, served_name, stores, addresses, engines, stack)
    _start_upkeep(resources, stack)
    dependencies = await _open_dependencies(settings, resources, stack)
    resources.health.storage_trouble = partial(upload_trouble, dependencies.uploads)
    stack.push_async_callback(dependencies.background_tasks.join)
    info = resources.info
    facts = BaseModelFacts(served_name, info.model_path, info.model_digest, info.system_fingerprint)
    write_base_model(settings.data_dir, facts)
    _run_in_background(report_other_fingerprints(resources.database, info.system_fingerprint), stack)
    _run_in_background(_housekeeping(settings, dependencies, resources).run(), stack)
    grace = timedelta(hours=settings.invoice_grace_hours)
    _run_in_background(MonthClosing(database=resources.database, grace=grace).run(), stack)
    _start_usage_reconciliation(resources, stack)
    _start_outbox(settings, dependencies, resources, stack)
    exposition = MetricsExposition(resources.metrics.render)
    return OpenGateway(
        app=await _create_app(
            settings,
            dependencies,
            resources.health,
            exposition,
            request_observers(settings, resources.metrics, stack),
        ),
        exposition=exposition,
        engines=engines,
        health=resources.health,
        database=resources.database,
        adapters=resources.blobs.local,
        served_model_name=served_name,
        stores_lost=addresses.lost,
    )


def _start_upkeep(resources: GatewayResources, stack: AsyncExitStack) -> None:
    blobs, database = resources.blobs, resources.database
    for job in (
        blobs.cleaner(database).run(),
        BlobGarbageCollector(database, blobs.adapters.delete).run(),
        blobs.adapters.run_eviction(),
    ):
        _run_in_background(job, stack)


def _start_usage_reconciliation(resources: GatewayResources, stack: AsyncExitStack) -> None:
    billing = resources.metrics.billing
    billing.watch_counters(lambda: resources.admissions.reconciliation.drifts_pico)
    _run_in_background(UsageReconciliation(database=resources.database, recorder=billing).run(), stack)


async def _open_dependencies(
    settings: Settings, resources: GatewayResources, stack: AsyncExitStack
) -> GatewayDependencies:
    info, engines, database = resources.info, resources.engines, resources.database
    blobs, metrics, admissions = resources.blobs, resources.metrics, resources.admissions
    limits = _limits(settings)
    pool = await stack.enter_async_context(open_worker_pool())
    text = await _open_text_components(settings, info, engines, limits, metrics, pool, stack)
    secret = resources.stores.secret
    namespace_of = lru_cache(KNOWN_NAMESPACES)(partial(_namespace_of, secret))
    lifecycle = await stack.enter_async_context(
        open_lifecycle(
            database,
            engines,
            blobs.adapters,
            blobs.local.root,
            namespace_of,
            pool,
            resources.served_model_name,
        )
    )
    return GatewayDependencies(
        served_model_name=resources.served_model_name,
        database=database,
        engine=engines,
        health=resources.health,
        poison_memory=engines.poison_memory,
        prompts=text.prompts,
        token_text=text.token_text,
        recorder=metrics,
        request_analysis=text.request_analysis,
        compile_checks=text.compile_checks,
        value_validation=text.value_validation,
        admission_controller=admissions,
        policy_publisher=admissions,
        currency_of=partial(_currency_of, resources.prices),
        fast_forward=settings.grammar_fast_forward,
        namespace_of=namespace_of,
        derive_key=partial(derive, secret),
        adapter_path=partial(_adapter_path, blobs.adapters),
        config=limits,
        addresses=ClientAddresses(tuple(map(parse_network, settings.trusted_proxies))),
        key_use=await stack.enter_async_context(writing_use(database)),
        identity_provider=_identity_provider(settings, stack),
        mailed_links=_mailed_links(settings, database),
        uploads=blobs.uploads(database, lifecycle, await asyncio.to_thread(adapter_limits, settings, info)),
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


async def _open_text_components(
    settings: Settings,
    info: EngineInfo,
    engines: EnginePool,
    limits: ServingConfig,
    metrics: Metrics,
    pool: WorkerPool,
    stack: AsyncExitStack,
) -> TextComponents:
    tokenizer = await asyncio.to_thread(load_tokenizer, info.model_path)
    prompts = PromptRenderer(tokenizer)
    setup = AnalysisSetup(limits.body, limits.grammar, frozenset(prompts.special_tokens))
    compile_checks = open_compile_checks(
        pool, settings, info, tokenizer.backend_tokenizer.to_str(), metrics, engines.wait_ready
    )
    return TextComponents(
        prompts=prompts,
        token_text=TokenText(tokenizer),
        request_analysis=await stack.enter_async_context(open_request_analysis(pool, setup)),
        compile_checks=await stack.enter_async_context(compile_checks),
        value_validation=value_validation(pool),
    )


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
    retention = Retention(
        audit=timedelta(days=settings.audit_retention_days),
        quota_events=timedelta(days=settings.quota_event_retention_days),
    )
    ledger_retention = LedgerRetention(
        ledger_months=settings.ledger_retention_months, phases_days=settings.phases_retention_days
    )
    return Housekeeping(
        database=dependencies.database,
        erasure=erasure,
        retention=retention,
        partitions=LedgerPartitions(dependencies.database.url, ledger_retention),
    )


def _start_outbox(
    settings: Settings, dependencies: GatewayDependencies, resources: GatewayResources, stack: AsyncExitStack
) -> None:
    resolver = ThreadedResolver(AT_ONCE + 1)
    stack.callback(resolver.close)
    client = ReceiverClient(resolver, allow_private=settings.webhook_allow_private)
    database, metrics = resources.database, resources.metrics.webhooks
    secrets = WebhookSecrets(dependencies.derive_key)
    delivery = WebhookDispatcher(database=database, client=client, secrets=secrets, metrics=metrics)
    _run_in_background(delivery.run(), stack)
    sink = _meter_sink(settings, client)
    if sink is not None:
        _run_in_background(MeterExporter(database=database, sink=sink, metrics=metrics).run(), stack)


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


def _limits(settings: Settings) -> ServingConfig:
    return ServingConfig(
        body=BodyLimits(max_bytes=settings.max_body_bytes),
        max_buffered_body_bytes=settings.max_buffered_body_bytes,
        max_in_flight=settings.max_requests_in_flight,
        queue_timeout_s=settings.queue_timeout_s,
        first_token_timeout_s=settings.first_token_timeout_s,
        total_timeout_s=settings.total_timeout_s,
        reader_stall_s=settings.reader_stall_s,
        allowed_origins=settings.allowed_origins,
        known_caller_s=settings.known_caller_s,
        idempotency_s=settings.idempotency_hours * 3600.0,
        webhook_allow_private=settings.webhook_allow_private,
        audit_retention_days=settings.audit_retention_days,
        accelerator_price=_accelerator_price(settings),
    )


def _accelerator_price(settings: Settings) -> AcceleratorPrice | None:
    price = settings.accelerator_price_per_hour
    return None if price is None else AcceleratorPrice(price, settings.currency)
