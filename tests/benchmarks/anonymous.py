"""What clients without credentials cost a gateway: every route of its application, flooded, and sign-ins begun beside `/v1`.

Invariant: the routes are those of the running application, so that a new one is measured when it is added. A route of an unknown
kind ends the run.
"""

import asyncio
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from itertools import count, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import httpx
import msgspec
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.routing import BaseRoute, Mount
from tests.benchmarks.checkout import CHECKOUT
from tests.benchmarks.gateway import cpu_seconds
from tests.benchmarks.open_loop_client import OpenLoopClient, OpenLoopResult, encode_request
from tests.benchmarks.throughput import CONNECTIONS, ThroughputShape, body_of, create_keys
from tests.platform.conftest import build_tokenizer
from tests.platform.free_ports import free_ports

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.platform.auth.failure_buckets import BURST
from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.local_server import LocalServer
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.bench.workload import arrival_offsets
from loraplex.platform.web.console_app import ConsoleRoute

CPU: Final = ("cpu_ms", "cpu_ms_networks", "cpu_ms_first")
COLUMNS: Final = (*CPU, "statuses", "outbound", "p99_ms", "p99_ms_without")
MAX_CPU_MS: Final = 5.0
MAX_P99_RATIO: Final = 1.2
START, CALLBACK = "/console/oidc/start", "/console/oidc/callback"
COME_BACK: Final = f"GET {CALLBACK} after its start"
"""The only GET that asks the provider by design: each time for another code."""
HASHING: Final = frozenset(f"POST {area}/console/sign-in" for area in ("", "/operator"))
"""The first tries of an account are compared with a hash of a password, which is dear on purpose: `cpu_ms_first` has no bound."""
STARTED: Final = "303"
ENGINE_MS: Final = 50.0
FIRST: Final = BURST + 4
"""Requests of a network before its flood is counted: then it has used up what a network may try."""
FIRST_NETWORK: Final = int(IPv4Address("10.0.0.1"))
TIMEOUT_S: Final = 30.0
FORM: Final = {"password": "a password of nobody", "token": "a", "code": "1"}
PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")
NO_LETTER: Final = re.compile(r"[^a-z]+")
STATIC: Final = re.compile(r'(?:src|href)="(/[^"]*/static/[^"]+)"')
WITH_STATIC: Final = ("/docs", "/console/sign-in")
"""Pages that name the files of which a browser loads them: a route of files answers for them alone."""


class Route(msgspec.Struct, frozen=True):
    method: str
    path: str

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def filled(self) -> str:
        """The path with ids of nothing."""
        return PARAMETER.sub(lambda name: str(UUID(int=1)) if name[1].endswith("id") else "1", self.path)

    @property
    def form(self) -> dict[str, str]:
        """What a form sends, for an account of its own: its tries are those of no other route."""
        return {"email": f"{NO_LETTER.sub('-', self.path).strip('-')}@example.com", **FORM}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnonymousShape:
    """`requests` to each route over `connections`, from one client network and then from as many networks as requests. `part`: of
    the names of the routes to flood.

    Before them `starts` of sign-ins at the identity provider, each from a network of its own, beside `rate` completions per second, in
    `rounds` turns of `seconds` each.
    """

    part: str = ""

    requests: int = 64
    connections: int = 4
    starts: int = 200
    rate: float = 50.0
    seconds: float = 1.0
    rounds: int = 20


@dataclass(slots=True)
class Provider:
    """An identity provider that counts what it is asked for, by path."""

    issuer: str
    asked: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Flooded:
    """What a flood of one route came to. `first_cpu_ms`: of each request before it is counted."""

    cpu_ms: float
    first_cpu_ms: float
    statuses: Counter[int]
    outbound: int


def routes_of(app: FastAPI) -> list[Route]:
    """Every route of an application and of what is in it. Raises `BenchFailed` for a kind that is not known here."""
    return sorted(set(_walk(app.routes)), key=lambda route: (route.path, route.method))


def _walk(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[Route]:
    for context in iter_route_contexts(routes):
        original = context.original_route
        if isinstance(original, ConsoleRoute):
            yield from _walk(original._console.routes)
        elif isinstance(original, Mount):
            yield from _walk(original.routes, f"{prefix}{original.path}")
        elif context.path is None:
            raise BenchFailed(f"{type(original).__name__} is a route without a path")
        else:
            for method in (context.methods or {"GET"}) - {"HEAD"}:
                yield Route(method, f"{prefix}{context.path}")


def serve_noting_routes(file: str) -> None:
    """Run the command line as a process of a gateway, which writes its routes into `file` before it listens."""
    from loraplex.platform.cli.main import main
    from loraplex.platform.server import serve_gateway
    from loraplex.platform.server.uvicorn_server import serve_until_stopped

    async def noting(app: FastAPI, *rest: Any, **times: Any) -> None:
        Path(file).write_bytes(msgspec.json.encode(routes_of(app)))
        await serve_until_stopped(app, *rest, **times)

    with patch.object(serve_gateway, "serve_until_stopped", noting):
        main()


async def measure_anonymous(shape: AnonymousShape, progress: Callable[[str], None]) -> Report:
    """Flood every route, then begin sign-ins beside completions. Raises `BenchFailed`."""
    report = Report("anonymous", COLUMNS)
    with provider() as asked:
        async with serving(asked) as (server, routes), client_of(server) as client:
            flood = Flood(server, asked, shape, client)
            sends = await flood.sends(routes)
            await measure_starts(server, asked, shape, report, progress)
            await flood_routes(flood, sends, report, progress)
    return report


async def flood_routes(
    flood: "Flood", sends: Mapping[str, "Send"], report: Report, progress: Callable[[str], None]
) -> None:
    """Flood each route twice. The dearest comes first in the report."""
    cases = list[Case]()
    for name, send in sends.items():
        one = await flood.run(send, from_one_network=True)
        many = await flood.run(send, from_one_network=False)
        times = f"{one.first_cpu_ms:.2f}, then {one.cpu_ms:.2f} ms, of networks {many.cpu_ms:.2f} ms"
        progress(f"{name}: {times}; {dict(one.statuses)}")
        figure = {
            "cpu_ms": one.cpu_ms,
            "cpu_ms_networks": many.cpu_ms,
            "cpu_ms_first": one.first_cpu_ms,
            "statuses": " ".join(f"{status}x{number}" for status, number in sorted(one.statuses.items())),
            "outbound": one.outbound,
            "outbound_networks": many.outbound,
        }
        cases.append(Case(name, asdict(flood.shape), figure))
    cases.sort(key=highest_cpu_ms, reverse=True)
    report.cases += cases
    report.ratios += bounds(cases)


def highest_cpu_ms(case: Case) -> float:
    """The CPU time of a request in the worst of the floods that have a bound."""
    bounded = [name for name in CPU if case.name not in HASHING or name != "cpu_ms_first"]
    return max(float(case.figure[name]) for name in bounded)


def bounds(cases: Sequence[Case]) -> list[Ratio]:
    """What the floods must keep."""
    dearest = max(cases, key=highest_cpu_ms)
    found = [
        Ratio(f"ms of CPU of the dearest: {dearest.name}", highest_cpu_ms(dearest), MAX_CPU_MS, "at most")
    ]
    pages = [case for case in cases if case.name.startswith("GET ") and case.name != COME_BACK]
    for kind in ("outbound", "outbound_networks"):
        found.append(Ratio(f"{kind} calls of all floods", float(sum(case.figure[kind] for case in cases))))
        # The provider's documents grow old during a run, and one fetch renews them for all.
        calls = float(sum(case.figure[kind] for case in pages))
        found.append(Ratio(f"{kind} calls of GET, but for {COME_BACK}", calls, 1.0, "at most"))
    return found


Send = Callable[[httpx.AsyncClient, Mapping[str, str]], Awaitable[httpx.Response]]
"""Sends one request with these headers."""


class Flood:
    """Floods one server. Every request names a client network, as the proxy does that the server trusts."""

    def __init__(
        self, server: LocalServer, provider: Provider, shape: AnonymousShape, client: httpx.AsyncClient
    ) -> None:
        self._server, self._provider, self.shape, self._client = server, provider, shape, client
        self._networks = networks()

    async def run(self, send: Send, *, from_one_network: bool) -> Flooded:
        """Send the requests of one flood; from one network, after `FIRST` that are counted apart."""
        sources = repeat(next(self._networks)) if from_one_network else self._networks
        asked = self._provider.asked.total()
        _, first_s = await self._send(send, sources, FIRST) if from_one_network else (None, 0.0)
        statuses, cpu_s = await self._send(send, sources, self.shape.requests)
        outbound = self._provider.asked.total() - asked
        return Flooded(1000 * cpu_s / self.shape.requests, 1000 * first_s / FIRST, statuses, outbound)

    async def _send(
        self, send: Send, sources: Iterator[Mapping[str, str]], number: int
    ) -> tuple[Counter[int], float]:
        """Return the answers by status, and the CPU seconds of the gateway."""
        statuses, left, before_s = Counter[int](), iter(range(number)), cpu_seconds(self._server.pid)

        async def one() -> None:
            for _ in left:
                statuses[(await send(self._client, next(sources))).status_code] += 1

        await asyncio.gather(*(one() for _ in range(self.shape.connections)))
        return statuses, cpu_seconds(self._server.pid) - before_s

    def sender(self, route: Route) -> Send:
        """What sends requests to a route: a form to a page of the console, an object to the API."""
        is_form = "/console" in route.path
        body = {"data": route.form} if is_form else {"json": {}}

        async def send(client: httpx.AsyncClient, headers: Mapping[str, str]) -> httpx.Response:
            sent = {} if route.method == "GET" else body
            own = {"origin": self._server.base_url, **headers}
            return await client.request(route.method, route.filled, headers=own, **sent)  # type: ignore[arg-type]

        return send

    async def come_back(self, client: httpx.AsyncClient, headers: Mapping[str, str]) -> httpx.Response:
        """Begin a sign-in, and come back with a code that the provider never gave."""
        begun = await client.get(START, headers=headers)
        if begun.status_code != httpx.codes.SEE_OTHER:
            return begun
        (state,) = parse_qs(urlsplit(begun.headers["location"]).query)["state"]
        cookie = "; ".join(f"{name}={value}" for name, value in begun.cookies.items())
        return await client.get(
            CALLBACK, params={"state": state, "code": "none"}, headers={**headers, "cookie": cookie}
        )

    async def sends(self, routes: Sequence[Route]) -> dict[str, Send]:
        """What sends to each route that the shape names. Raises `BenchFailed` when it names none."""
        found = {route.name: self.sender(route) for route in (*routes, *await self.files())}
        found[COME_BACK] = self.come_back
        if chosen := {name: send for name, send in found.items() if self.shape.part in name}:
            return chosen
        raise BenchFailed(f"no route of {len(found)} has {self.shape.part!r} in METHOD /path")

    async def files(self) -> list[Route]:
        """The files that pages without credentials name."""
        pages = [await self._client.get(path) for path in WITH_STATIC]
        return [
            Route("GET", path)
            for path in sorted({each for page in pages for each in STATIC.findall(page.text)})
        ]


async def measure_starts(
    server: LocalServer,
    provider: Provider,
    shape: AnonymousShape,
    report: Report,
    progress: Callable[[str], None],
) -> None:
    """Send the same completions alone and with starts beside them, in short turns; what else the machine does meets both."""
    key, *_ = await create_keys(server.data_dir)
    completion = encode_request("/v1/completions", key, body_of(ThroughputShape(route="completions")))
    address, sources = urlsplit(server.base_url), networks(1 << 16)
    completing, starting = (
        OpenLoopClient(address.hostname or "", address.port or 0, CONNECTIONS) for _ in range(2)
    )
    per_turn = max(1, round(shape.starts / shape.rounds))

    async def complete(number: int) -> OpenLoopResult:
        count = max(1, round(shape.rate * shape.seconds))
        return await completing.send_at([completion], arrival_offsets(count, shape.rate, number))

    async def start(number: int) -> None:
        requests = [start_request(address.netloc, next(sources)) for _ in range(per_turn)]
        offsets = arrival_offsets(per_turn, per_turn / shape.seconds, number)
        answers = (await starting.send_at(requests, offsets)).errors
        if answers != {STARTED: per_turn}:
            raise BenchFailed(f"{per_turn} starts were answered with {dict(answers)}")

    asked_before = provider.asked.total()
    await asyncio.gather(complete(0), start(0))
    alone, beside, cpu_s = list[OpenLoopResult](), list[OpenLoopResult](), [0.0, 0.0]
    for number in range(shape.rounds):
        begun_s = cpu_seconds(server.pid)
        alone.append(await complete(number))
        between_s = cpu_seconds(server.pid)
        beside.append((await asyncio.gather(complete(number), start(number)))[0])
        cpu_s = [cpu_s[0] + between_s - begun_s, cpu_s[1] + cpu_seconds(server.pid) - between_s]
    completing.close()
    starting.close()
    starts = per_turn * shape.rounds
    figure = {
        "cpu_ms": 1000 * (cpu_s[1] - cpu_s[0]) / starts,
        "outbound": provider.asked.total() - asked_before,
        "p99_ms": p99_ms(beside),
        "p99_ms_without": p99_ms(alone),
        "errors": sum(each.errors.total() for each in beside),
        "errors_without": sum(each.errors.total() for each in alone),
    }
    progress(
        f"{starts} starts: p99 {figure['p99_ms']:.1f} ms beside them, {figure['p99_ms_without']:.1f} alone"
    )
    report.cases.append(Case(f"{starts} starts beside {shape.rate:g} completions/s", asdict(shape), figure))
    report.ratios += [
        Ratio(
            "p99 of completions beside starts / alone",
            figure["p99_ms"] / figure["p99_ms_without"],
            MAX_P99_RATIO,
            "at most",
        ),
        Ratio(
            "completions that failed beside starts, more than alone",
            figure["errors"] - figure["errors_without"],
            0.0,
            "at most",
        ),
        Ratio("ms of CPU of a start", figure["cpu_ms"], MAX_CPU_MS, "at most"),
        Ratio(f"fetches of {starts + per_turn} starts", figure["outbound"], 1.0, "at most"),
    ]


def p99_ms(results: Sequence[OpenLoopResult]) -> float:
    return 1000 * percentile([each for result in results for each in result.latencies], 99)


def start_request(host: str, source: Mapping[str, str]) -> bytes:
    """A start as the client encodes it that costs little: a browser would share the event loop that measures."""
    headers = "".join(f"{name}: {value}\r\n" for name, value in {"host": host, **source}.items())
    return f"GET {START} HTTP/1.1\r\n{headers}\r\n".encode()


def networks(first: int = 0) -> Iterator[dict[str, str]]:
    """The header of a client in a network that no other one is in."""
    return ({"x-forwarded-for": str(IPv4Address(FIRST_NETWORK + number))} for number in count(first))


def client_of(server: LocalServer) -> httpx.AsyncClient:
    """A client that keeps no cookie: no request is made by a browser that another one began in."""
    return httpx.AsyncClient(
        base_url=server.base_url,
        timeout=TIMEOUT_S,
        limits=httpx.Limits(max_connections=CONNECTIONS),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
    )


@asynccontextmanager
async def serving(asked: Provider) -> AsyncIterator[tuple[LocalServer, list[Route]]]:
    """Start a server with every kind of sign-in, and a scripted engine; yield the routes of its application too."""
    with TemporaryDirectory(prefix="loraplex-bench-") as name:
        folder = Path(name)
        build_tokenizer().save_pretrained(folder / "model")
        info = msgspec.structs.replace(DEFAULT_INFO, vocab_size=400)
        script = FakeScript(info=info, start_delay_s=ENGINE_MS / 1000, tokens_per_delta=4)
        (folder / "script.json").write_bytes(msgspec.json.encode(script))
        (port,) = free_ports(1)
        settings = {
            "fake_engine": str(folder / "script.json"),
            "oidc_issuer": asked.issuer,
            "oidc_client_id": "loraplex",
            "oidc_client_secret": "a secret of the client",
            "port": str(port),
            "public_url": f"http://127.0.0.1:{port}",
            "smtp_url": f"smtp://127.0.0.1:{urlsplit(asked.issuer).port}",
            "smtp_from": "loraplex <no-reply@example.com>",
            "trusted_proxies": "127.0.0.1",
        }
        noting = f"from tests.benchmarks.anonymous import serve_noting_routes as serve; serve({str(folder / 'routes')!r})"
        program = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); {noting}"
        server = LocalServer(folder, str(folder / "model"), settings, program)
        try:
            await server.start()
            yield server, msgspec.json.decode((folder / "routes").read_bytes(), type=list[Route])
        finally:
            await server.stop()


@contextmanager
def provider() -> Iterator[Provider]:
    """Run an identity provider on a free port, which refuses every code."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.asked[self.path] += 1
            self.answer(200, {"issuer": asked.issuer, **endpoints})

        def do_POST(self) -> None:
            asked.asked[self.path] += 1
            self.answer(400, {"error": "invalid_grant"})

        def answer(self, status: int, document: Mapping[str, str]) -> None:
            body = msgspec.json.encode(document)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    asked = Provider(f"http://127.0.0.1:{server.server_address[1]}")
    paths = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "jwks"}
    endpoints = {name: f"{asked.issuer}/{path}" for name, path in paths.items()}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
