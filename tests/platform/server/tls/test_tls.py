"""TLS by settings: what stops the start, what clients without TLS and silent ones get, and renewal while the server runs."""

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import FastAPI
from starlette.requests import Request
from structlog.testing import capture_logs
from tests.platform.certificates import certificate_of

from loraplex.platform.config import PLAIN_HTTP, load_settings
from loraplex.platform.server import http_protocol, tls_listener
from loraplex.platform.server.certificate import ServerCertificate, read_certificate, reload_at_hangup
from loraplex.platform.server.connection_limiter import ConnectionLimiter
from loraplex.platform.server.listening import bind
from loraplex.platform.server.process_signals import Shutdown
from loraplex.platform.server.uvicorn_server import HttpListener, serving
from loraplex.platform.startup_errors import SettingsError
from loraplex.platform.web.console.security_headers import SecurityHeaders

LOCAL = "127.0.0.1"
LARGE = 3 << 20
REQUEST = b"GET /size/%d HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def application() -> FastAPI:
    app = FastAPI(openapi_url=None)
    app.add_middleware(SecurityHeaders)

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, object]:
        return {"scheme": request.url.scheme, "size": len(await request.body())}

    @app.post("/early")
    async def early() -> str:
        return "no"

    @app.get("/size/{size}")
    async def answer(size: int) -> str:
        return "a" * size

    return app


class Tls:
    """A server with a certificate of this machine's address."""

    def __init__(self, file: Path, limiter: ConnectionLimiter) -> None:
        self.file = file
        self.certificate = ServerCertificate(file, file)
        self.limiter = limiter
        self.port = 0

    @property
    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.file))

    async def connect(self, tls: ssl.SSLContext | None = None) -> Connection:
        return await asyncio.open_connection(LOCAL, self.port, ssl=tls)

    async def until_open(self, connections: int) -> None:
        async with asyncio.timeout(60):
            while self.limiter.open_connections != connections:
                await asyncio.sleep(0.01)


StartTls = Callable[..., Awaitable[Tls]]


@pytest.fixture
async def start_tls(tmp_path: Path) -> AsyncIterator[StartTls]:
    async with AsyncExitStack() as stack:

        async def start(connections: int = 100) -> Tls:
            tls = Tls(certificate_of("localhost", tmp_path, LOCAL), ConnectionLimiter(100, connections))
            bound = stack.enter_context(bind(LOCAL, 0))
            listener = HttpListener(bound, tls.limiter, tls.certificate)
            await stack.enter_async_context(serving(application(), listener, Shutdown()))
            tls.port = bound.getsockname()[1]
            async with asyncio.timeout(60):
                while not bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    await asyncio.sleep(0.01)
            return tls

        yield start


async def test_requests_of_a_connection_are_answered_as_over_http(start_tls: StartTls) -> None:
    tls = await start_tls()
    async with httpx.AsyncClient(verify=tls.trusting, base_url=f"https://{LOCAL}:{tls.port}") as client:
        for size in (0, 3, LARGE):
            answer = await client.post("/echo", content=b"a" * size)
            assert answer.json() == {"scheme": "https", "size": size}
            assert answer.headers["strict-transport-security"] == "max-age=31536000"
        assert len((await client.get(f"/size/{LARGE}")).json()) == LARGE
        assert tls.limiter.open_connections == 1
    await tls.until_open(0)


async def test_a_slow_reader_gets_all_of_an_answer_that_ends_its_connection(start_tls: StartTls) -> None:
    tls = await start_tls()
    reader, writer = await tls.connect(tls.trusting)
    writer.write(REQUEST % LARGE)
    read = b""
    while part := await reader.read(256 << 10):
        read += part
        await asyncio.sleep(0.01)
    assert read.endswith(b'a"') and len(read) > LARGE
    writer.close()
    await tls.until_open(0)


async def test_an_answer_before_the_end_of_a_body_arrives(
    start_tls: StartTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.1)
    tls = await start_tls()
    reader, writer = await tls.connect(tls.trusting)
    writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\na")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head
    assert await reader.read() == b'"no"'
    writer.close()
    await tls.until_open(0)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x80\x04\x95pickle", b"\0" * 64])
async def test_what_is_no_handshake_ends_its_connection_alone(start_tls: StartTls, sent: bytes) -> None:
    tls = await start_tls()
    reader, writer = await tls.connect()
    writer.write(sent)
    assert b"HTTP" not in await _read_to_the_end(reader)
    writer.close()
    await tls.until_open(0)
    async with httpx.AsyncClient(verify=tls.trusting) as client:
        assert (await client.get(f"https://{LOCAL}:{tls.port}/size/1")).json() == "a"


async def _read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_tls_1_1_is_refused(start_tls: StartTls) -> None:
    tls = await start_tls()
    old = tls.trusting
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await tls.connect(old)


async def test_connections_without_a_handshake_count(start_tls: StartTls) -> None:
    tls = await start_tls(connections=2)
    silent = [await tls.connect() for _ in range(2)]
    await tls.until_open(2)
    third, _ = await tls.connect()
    assert await _read_to_the_end(third) == b""
    assert tls.limiter.open_connections == 2
    for _, writer in silent:
        writer.close()
    await tls.until_open(0)


async def test_a_connection_that_ends_before_its_handshake_leaves_its_place(start_tls: StartTls) -> None:
    """As a reset does: the system refuses the options of its socket."""
    tls = await start_tls()
    client, without_options = socket.socketpair()
    with client, socket.socket() as bound:
        listener = tls_listener.TlsListener(
            bound, tls.certificate, tls.limiter, lambda place: asyncio.Protocol()
        )
        listener._begin(without_options, LOCAL)
        assert tls.limiter.open_connections == 1
        await tls.until_open(0)
        client.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_a_handshake_has_a_time_limit(start_tls: StartTls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 0.1)
    tls = await start_tls()
    reader, _ = await tls.connect()
    assert await _read_to_the_end(reader) == b""
    await tls.until_open(0)


async def test_a_renewed_certificate_is_served_after_a_signal(start_tls: StartTls, tmp_path: Path) -> None:
    tls = await start_tls()
    reload_at_hangup(tls.certificate)
    before = tls.trusting
    certificate_of("localhost", tmp_path, LOCAL)
    await _hang_up_and_log("the certificate was reloaded")
    with pytest.raises(ssl.SSLCertVerificationError):
        await tls.connect(before)
    now = tls.trusting
    tls.file.write_text("none")
    await _hang_up_and_log("the certificate was not reloaded; the earlier one stays")
    _, writer = await tls.connect(now)
    writer.close()


async def _hang_up_and_log(event: str) -> None:
    with capture_logs() as logs:
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(60):
            while not logs:
                await asyncio.sleep(0.01)
    assert [each["event"] for each in logs] == [event]


@pytest.mark.parametrize(
    ("certificate", "key", "named"),
    [
        ("missing", "good", "setting `tls_certificate`: .*missing: No such file"),
        ("good", "missing", "setting `tls_key`: .*missing: No such file"),
        ("good", "other", "settings `tls_certificate` and `tls_key`: .* must be the server's certificate"),
        ("text", "good", "settings `tls_certificate` and `tls_key`"),
        ("good", "text", "settings `tls_certificate` and `tls_key`"),
        ("good", "locked", "its key without a password"),
    ],
)
def test_files_that_cannot_be_served_stop_the_start(
    tmp_path: Path, certificate: str, key: str, named: str
) -> None:
    for name in ("good", "other"):
        certificate_of(name, tmp_path).rename(tmp_path / name)
    (tmp_path / "text").write_text("no certificate")
    (tmp_path / "locked").write_bytes(locked_key())
    settings = load_settings({"tls_certificate": tmp_path / certificate, "tls_key": tmp_path / key})
    with pytest.raises(SettingsError, match=named):
        read_certificate(settings)


def locked_key() -> bytes:
    """A private key that needs a password."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )


@pytest.mark.parametrize(("given", "named"), [("tls_key", "tls_key"), ("tls_certificate", "tls_key")])
def test_both_files_or_neither(tmp_path: Path, given: str, named: str) -> None:
    with pytest.raises(
        SettingsError, match=f"setting `{named}`.*must be given exactly if `tls_certificate` is"
    ):
        load_settings({given: tmp_path / "file"})
    assert read_certificate(load_settings()) is None


def test_only_what_nothing_encrypts_is_warned_of(tmp_path: Path) -> None:
    tls = {"tls_certificate": tmp_path / "a", "tls_key": tmp_path / "b"}
    for flags, exposed, local, scheme in (
        ({"host": "0.0.0.0"}, True, False, "http"),
        ({"host": "0.0.0.0", **tls}, False, False, "https"),
        ({"host": "0.0.0.0", "trusted_proxies": "10.0.0.0/8"}, False, False, "http"),
        ({"host": "gateway.internal"}, True, False, "http"),
        ({"host": "::1"}, False, True, "http"),
        ({"host": "localhost", **tls}, False, True, "https"),
    ):
        settings = load_settings(flags)
        seen = (PLAIN_HTTP in settings.exposures, settings.is_local, settings.scheme)
        assert seen == (exposed, local, scheme)
