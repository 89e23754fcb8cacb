"""An OTLP receiver over HTTP: parses what exporters send and keeps the spans."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class ReceivedSpan:
    """Ids are hex digits; `parent` is empty for a root. Times in nanoseconds since 1970."""

    name: str
    trace: str
    span: str
    parent: str
    kind: int
    began: int
    ended: int
    failed: bool
    attributes: dict[str, Any]


@dataclass
class Received:
    """`raw`: the bodies as they came."""

    url: str
    paths: list[str] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    spans: list[ReceivedSpan] = field(default_factory=list)

    def keep(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        self.raw.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(values(group.resource.attributes))
            self.spans += [received(span) for scope in group.scope_spans for span in scope.spans]

    def children(self, parent: ReceivedSpan) -> dict[str, ReceivedSpan]:
        return {span.name: span for span in self.spans if span.parent == parent.span}


def received(span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        failed=span.status.code == 2,
        attributes=values(span.attributes),
    )


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: value(each.value) for each in attributes}


def value(given: Any) -> Any:
    kind = given.WhichOneof("value")
    return (
        [value(each) for each in given.array_value.values] if kind == "array_value" else getattr(given, kind)
    )


@contextmanager
def receiving() -> Iterator[Received]:
    """A receiver on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.keep(self.path, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the test looks at what came."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Received(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
