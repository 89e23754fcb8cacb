"""Who sees each request when it has ended: the access log, metrics, and traces where they are exported."""

import asyncio
from contextlib import AsyncExitStack
from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from loraplex.platform.config import Settings
from loraplex.platform.observability.access_log import log_request
from loraplex.platform.observability.metrics import Metrics
from loraplex.platform.observability.request_record import RequestObserver
from loraplex.platform.startup_errors import SettingsError


def request_observers(settings: Settings, metrics: Metrics, stack: AsyncExitStack) -> list[RequestObserver]:
    """The observers that the settings ask for; `stack` closes them. Raises `SettingsError` as `load_tracing`."""
    observers: list[RequestObserver] = []
    if settings.otlp_endpoint is not None:
        traces = load_tracing().RequestTraces(settings.otlp_endpoint, version("loraplex"))
        stack.push_async_callback(asyncio.to_thread, traces.close)
        observers.append(traces.record)
    # The access line has the id that the trace got.
    return [*observers, log_request, metrics.http.record, metrics.usage.record, metrics.minutes.observe]


def load_tracing() -> ModuleType:
    """Import what exports traces, which nothing else does. Raises `SettingsError` without the extra `otel`."""
    try:
        return import_module("loraplex.platform.observability.tracing")
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"setting `otlp_endpoint`: {error.name} is missing: pip install 'loraplex[otel]'"
        ) from None
