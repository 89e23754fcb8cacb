"""OpenTelemetry traces, sent as OTLP over HTTP: one span per request by the conventions for generative AI, with its phases as
children. A child has the operation, the model, its tokens by the same conventions, and its causes as `loraplex.<phase>.<cause>`.

Invariants: no message content; a request never waits for the collector, whose failures only lose traces. Imported where traces are
exported only: it needs the extra `otel`.
"""

import time
from collections.abc import Iterator
from typing import Final, TypeAlias

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from loraplex.platform.observability.access_log import PROBES
from loraplex.platform.observability.request_id import response_headers_of
from loraplex.platform.observability.request_record import FinishedRequest, InferenceCall, RequestRecord
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.tenants.quotas.reservation import PhaseCauses

PATH: Final = "/v1/traces"
PROVIDER: Final = "loraplex"
EXPORT_TIMEOUT_S: Final = 5
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
SPAN_NAMES: Final = {"admission": "quota"}
"""Spans whose name is not that of their phase."""
OF_EACH_PHASE: Final = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
OF_PHASE: Final = {
    "prefill": ("gen_ai.usage.input_tokens", "gen_ai.usage.cache_read.input_tokens"),
    "decode": ("gen_ai.usage.output_tokens", "gen_ai.usage.reasoning.output_tokens", FINISH_REASONS),
}
"""Attributes of the request that its phases have, too."""
ADAPTER_HEADER: Final = "x-loraplex-adapter"
Attributes: TypeAlias = dict[str, str | int | float | list[str]]


class RequestTraces:
    """An observer of requests. `endpoint` is the collector's address without a path; `OTEL_*` variables of the SDK apply."""

    def __init__(self, endpoint: str, version: str) -> None:
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + PATH, timeout=EXPORT_TIMEOUT_S)
        resource = Resource.create({SERVICE_NAME: PROVIDER, SERVICE_VERSION: version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("loraplex.gateway", version)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, finished: FinishedRequest) -> None:
        """Make the spans of a request; probes have none."""
        if finished.handler in PROBES:
            return
        call, phases = finished.record.call, dict(_phases(finished))
        # Phases are on the monotonic clock.
        epoch_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            _name(finished, call),
            context=self._parent(finished),
            kind=SpanKind.SERVER,
            attributes=_attributes(finished),
            start_time=epoch_ns + int(finished.began * 1e9),
        )
        if span.is_recording():
            finished.record.trace_id = format_trace_id(span.get_span_context().trace_id)
        if finished.status is None or finished.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        context = set_span_in_context(span, Context())
        known, causes = _phase_facts(finished.record)
        for name, (begin, end) in phases.items():
            child = self._tracer.start_span(
                SPAN_NAMES.get(name, name),
                context=context,
                attributes=_phase_attributes(name, known, causes.get(name, {})),
                start_time=epoch_ns + int(begin * 1e9),
            )
            child.end(epoch_ns + int(end * 1e9))
        span.end(epoch_ns + int(finished.ended * 1e9))

    def close(self) -> None:
        """Send what waits, for at most some seconds."""
        self._provider.shutdown()

    def _parent(self, finished: FinishedRequest) -> Context:
        """The caller's span, from a valid `traceparent`."""
        names = ("traceparent", "tracestate")
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in finished.scope["headers"]
        }
        return self._propagator.extract({name: headers[name] for name in names if name in headers}, Context())


def _phases(finished: FinishedRequest) -> Iterator[tuple[str, tuple[float, float]]]:
    stats = finished.record.stats
    if stats is None:
        phases = [(name, *span) for name, span in finished.record.phases.items()]
    else:
        phases = [*stats.phases(), ("settlement", stats.finished, finished.ended)]
    for name, began, ended in phases:
        if ended > began:
            yield name, (began, ended)


def _name(finished: FinishedRequest, call: InferenceCall | None) -> str:
    """A model's name only where there is such a model: names of spans are from closed sets."""
    if call is None:
        return f"{finished.method} {finished.handler}"
    return call.operation if finished.record.stats is None else f"{call.operation} {call.model}"


def _attributes(finished: FinishedRequest) -> Attributes:
    record = finished.record
    attributes: Attributes = {
        "http.request.method": finished.method,
        "http.route": finished.handler,
        "loraplex.request.id": finished.request_id,
    }
    if finished.status is not None:
        attributes["http.response.status_code"] = finished.status
    if finished.tenant_id is not None:
        attributes["loraplex.tenant.id"] = str(finished.tenant_id)
    if record.call is not None:
        attributes |= _request_attributes(record.call)
    if record.stats is not None:
        attributes |= _response_attributes(record.stats)
        served = response_headers_of(finished.scope).get(ADAPTER_HEADER)
        attributes["gen_ai.response.model"] = served or str(attributes.get("gen_ai.request.model"))
    error = _error_type(finished)
    return attributes if error is None else attributes | {"error.type": error}


def _phase_facts(record: RequestRecord) -> tuple[Attributes, dict[str, PhaseCauses]]:
    """What the phases of a request tell: attributes of the request, and causes by phase."""
    call, stats = record.call, record.stats
    if call is None or stats is None:
        return {}, {}
    return _request_attributes(call) | _response_attributes(stats), dict(stats.phase_causes())


def _phase_attributes(phase: str, known: Attributes, causes: PhaseCauses) -> Attributes:
    own = {name: known[name] for name in (*OF_EACH_PHASE, *OF_PHASE.get(phase, ())) if name in known}
    return own | {f"loraplex.{phase}.{cause}": value for cause, value in causes.items()}


def _error_type(finished: FinishedRequest) -> str | None:
    """What went wrong: a status, or how the generation ended."""
    if finished.status is None or finished.status >= 400:
        return "disconnected" if finished.status is None else str(finished.status)
    stats = finished.record.stats
    return stats.finish_reason if stats is not None and stats.finish_reason in ("abort", "error") else None


def _request_attributes(call: InferenceCall) -> Attributes:
    given: Attributes = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": call.model,
        "gen_ai.response.id": call.response_id,
        "gen_ai.request.choice.count": call.choices,
    }
    for name in ("max_tokens", "temperature", "top_p"):
        value = getattr(call, name)
        if value is not None:
            given[f"gen_ai.request.{name}"] = value
    return given


def _response_attributes(stats: RequestStats) -> Attributes:
    given: Attributes = {
        FINISH_REASONS: [stats.finish_reason],
        "gen_ai.usage.input_tokens": stats.prompt_tokens,
        "gen_ai.usage.output_tokens": stats.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": stats.cached_tokens,
    }
    if stats.thought_counter is not None:
        given["gen_ai.usage.reasoning.output_tokens"] = stats.reasoning_tokens
    if stats.engine is not None:
        given["loraplex.engine.id"] = stats.engine
    return given
