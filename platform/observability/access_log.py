"""One line per request: its ids, who sent it, what became of it, and how long it took. Invariant: no content, no name, no path
that a client wrote, and no secret. What is not known of a request is left out, besides its tenant and its status.
"""

from typing import Final

import structlog

from loraplex.platform.observability.request_record import FinishedRequest
from loraplex.platform.observability.request_stats import RequestStats

LOG: Final = structlog.get_logger("loraplex.access")
PROBES: Final = frozenset(("/livez", "/readyz", "/startupz", "/health", "/metrics"))


def log_request(finished: FinishedRequest) -> None:
    """Write the line: at level info, and at debug for probes, which would fill the log."""
    handler, tenant_id = finished.handler, finished.tenant_id
    write = LOG.debug if handler in PROBES else LOG.info
    record = finished.record
    known = {
        "key_id": finished.key_id,
        "code": record.error_code,
        "adapter_id": None if record.adapter_id is None else str(record.adapter_id),
        "adapter_version": record.adapter_version,
        "engine": None if record.stats is None else record.stats.engine,
        "resumed": None if record.stats is None else record.stats.resumed or None,
        "trace_id": record.trace_id,
    }
    write(
        "request",
        request_id=finished.request_id,
        tenant_id=None if tenant_id is None else str(tenant_id),
        method=finished.method,
        handler=handler,
        status=finished.status,
        duration_ms=_milliseconds(finished.ended - finished.began),
        **{name: value for name, value in known.items() if value is not None},
        **({} if record.stats is None else _inference(record.stats)),
    )


def _inference(stats: RequestStats) -> dict[str, int | float | str | None]:
    first = stats.first_token
    return {
        "finish_reason": stats.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "queue_ms": None if stats.queue_s is None else _milliseconds(stats.queue_s),
        "ttft_ms": None if first is None else _milliseconds(first - stats.arrival),
    }


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)
