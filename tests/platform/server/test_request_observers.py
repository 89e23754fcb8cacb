"""Traces cost nothing where they are off, and ask for their extra where they are on."""

import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.platform.engines.managed_engine import Managed

from loraplex.platform.config import Settings
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.access_log import log_request
from loraplex.platform.observability.metrics import Metrics
from loraplex.platform.server.request_observers import load_tracing, request_observers
from loraplex.platform.startup_errors import SettingsError

ROOT = Path(__file__).parents[3]
FOLDERS = ("adapters", "engine", "grammar", "platform", "tenants")
TRACING = "loraplex.platform.observability.tracing"


async def test_only_log_and_metrics_see_requests_by_default() -> None:
    async with AsyncExitStack() as stack:
        metrics = Metrics("m", "1.2.3", 4096, EnginePool([Managed()]))
        counted = [log_request, metrics.http.record, metrics.usage.record, metrics.minutes.observe]
        assert request_observers(Settings(), metrics, stack) == counted


async def test_an_endpoint_adds_traces() -> None:
    async with AsyncExitStack() as stack:
        metrics = Metrics("m", "1.2.3", 4096, EnginePool([Managed()]))
        first, *others = request_observers(Settings(otlp_endpoint="http://127.0.0.1:9"), metrics, stack)
        assert len(others) == 4 and first.__qualname__ == "RequestTraces.record"


def test_without_the_extra_a_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, TRACING, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    with pytest.raises(
        SettingsError, match=r"`otlp_endpoint`: opentelemetry.* is missing: .*loraplex\[otel\]"
    ):
        load_tracing()


def test_nothing_imports_what_exports_traces_before_it_is_asked_for() -> None:
    def mentioning(text: str) -> set[str]:
        files = (each for folder in FOLDERS for each in (ROOT / folder).rglob("*.py"))
        return {file.name for file in files if text in file.read_text()}

    assert mentioning("import opentelemetry") | mentioning("from opentelemetry") == {"tracing.py"}
    assert mentioning("observability.tracing") == {"request_observers.py"}
