"""S1, S2, S12, S13 and S19 on a whole `loraplex serve` with TLS: where it listens, and what bytes of an attacker do there.

Invariant: one server for all tests of the file, and it serves in the end as it did in the beginning.
"""

import json
import os
import pickle  # noqa: TID251  # as an attack
import re
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psycopg
import pytest
import zmq
from tests.end_to_end.live_server import command_line, descendants
from tests.platform.certificates import certificate_of
from tests.platform.server.serve_process import Serve, make_key, model_folder, script, serving, until
from tests.platform.web.route_table import SCOPES
from tests.platform.web.test_route_roles import path_of
from tests.security.listening_sockets import Port, listening_paths, listening_ports

from loraplex.platform.server.http_protocol import MAX_HEAD_BYTES

__all__ = ["model_folder"]

LOCAL: Final = "127.0.0.1"
TIMEOUT_S: Final = 60.0
PUBLIC: Final = {
    "/livez",
    "/readyz",
    "/startupz",
    "/health",
    "/ping",
    "/version",
    "/openapi.json",
    "/docs",
    "/console/sign-in",
}
ENGINE_SOCKET: Final = re.compile(r"engine\.\d+\.\d+\.sock")


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


@dataclass(frozen=True)
class Attacked:
    """A running server, its ports, and a client's way in."""

    serve: Serve
    port: int
    metrics_port: int
    trusting: ssl.SSLContext
    key: str

    @property
    def pids(self) -> set[int]:
        return {self.serve.process.pid, *descendants(self.serve.process.pid)}

    @property
    def engine_pid(self) -> int:
        (pid,) = (pid for pid in self.pids if "engines.main" in command_line(pid))
        return pid

    def answers(self) -> bool:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
        with httpx.Client(verify=self.trusting, headers={"authorization": f"Bearer {self.key}"}) as client:
            answer = client.post(f"{self.serve.url}/v1/completions", json=body, timeout=TIMEOUT_S)
        return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3

    def encrypted(self) -> ssl.SSLSocket:
        connection = socket.create_connection((LOCAL, self.port), timeout=TIMEOUT_S)
        return self.trusting.wrap_socket(connection, server_hostname=LOCAL)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("attacked")
    file = certificate_of("localhost", folder, LOCAL)
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        metrics_port = probe.getsockname()[1]
    settings = {"tls_certificate": str(file), "tls_key": str(file), "metrics_port": str(metrics_port)}
    with serving(folder / "s", model_folder, script(), settings=settings) as serve:
        trusting = ssl.create_default_context(cafile=str(file))
        ready = f"{serve.url}/readyz"
        until(lambda: httpx.get(ready, verify=trusting).status_code == 200)
        key = make_key(services(serve)["database_url"])
        yield Attacked(serve, httpx.URL(serve.url).port or 0, metrics_port, trusting, key)


def services(serve: Serve) -> dict[str, Any]:
    """The addresses of its databases, with their passwords."""
    found: dict[str, Any] = json.loads((serve.folder / "data" / "embedded" / "services.json").read_text())
    return found


def test_s02_every_listening_socket_is_on_the_list(attacked: Attacked) -> None:
    """The two ports that the settings name, on loopback; all else are unix sockets that only their owner reaches."""
    assert listening_ports(attacked.pids) == {
        Port("tcp", LOCAL, attacked.port),
        Port("tcp", LOCAL, attacked.metrics_port),
    }
    paths = listening_paths(attacked.pids)
    (engine,) = (path for path in paths if ENGINE_SOCKET.fullmatch(path.name))
    assert {path.name for path in paths} == {".s.PGSQL.5432", "valkey.sock", engine.name}
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, path.parent


def test_s01_pickle_on_every_socket_does_nothing(attacked: Attacked, tmp_path: Path) -> None:
    """On every port and unix socket, bare, by TLS and HTTP, and as a message of the engine's protocol."""
    before, engine = attacked.pids, attacked.engine_pid
    payloads = [pickle.dumps(Payload(tmp_path / f"made-{version}"), version) for version in range(6)]
    for payload in payloads:
        for port in listening_ports(before):
            send(socket.AF_INET, (port.address, port.number), payload)
        for path in listening_paths(before):
            send(socket.AF_UNIX, reachable(path), payload)
        send_message(engine_socket(attacked), payload)
        headers = {"authorization": f"Bearer {attacked.key}", "content-type": "application/python-pickle"}
        with httpx.Client(verify=attacked.trusting, headers=headers) as client:
            for path_name in ("/v1/chat/completions", "/v1/completions", "/v1/tokenize", "/tenant/v1/keys"):
                answer = client.post(f"{attacked.serve.url}{path_name}", content=payload)
                assert answer.status_code in (400, 403), answer.text
    assert list(tmp_path.iterdir()) == []
    assert attacked.answers() and attacked.engine_pid == engine


def reachable(path: Path) -> str:
    """A path short enough for a unix socket."""
    folder = os.open(path.parent, os.O_PATH)
    return f"/proc/self/fd/{folder}/{path.name}"


def engine_socket(attacked: Attacked) -> Path:
    return next(path for path in listening_paths(attacked.pids) if ENGINE_SOCKET.fullmatch(path.name))


def send(family: int, address: Any, payload: bytes) -> None:
    """Send bytes and read until the server closes, or says nothing for a moment."""
    with socket.socket(family) as connection:
        connection.settimeout(0.2)
        connection.connect(address)
        try:
            connection.sendall(payload)
            while connection.recv(4096):
                pass
        except (TimeoutError, ConnectionError):
            return


def send_message(path: Path, payload: bytes) -> None:
    """Send a message of ZeroMQ that is a pickle, and one whose second frame is."""
    context = zmq.Context()
    with context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 1000)
        peer.connect(f"ipc://{path}")
        peer.send(payload)
        peer.send_multipart([b"Submit", payload])
    context.term()


def test_s02_the_stores_refuse_who_has_no_password(attacked: Attacked) -> None:
    found = services(attacked.serve)
    database, _, query = found["database_url"].partition("?")
    name = database.rpartition("/")[2]
    for user in ("postgres", "loraplex", "loraplex_server"):
        with pytest.raises(psycopg.OperationalError, match="password|role"):
            psycopg.connect(f"postgresql://{user}@/{name}?{query}")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed|role"):
            psycopg.connect(f"postgresql://{user}:guess@/{name}?{query}")
    path = found["redis_url"].partition("@")[2].partition("?")[0]
    for command, answer in (
        (b"GET key\r\n", b"-NOAUTH"),
        (b"CONFIG GET requirepass\r\n", b"-NOAUTH"),
        (b"AUTH guess\r\n", b"-WRONGPASS"),
    ):
        assert answered(path, command).startswith(answer)


def answered(path: str, command: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(path)
        connection.sendall(command)
        return connection.recv(4096)


def test_s12_no_spelling_opens_a_route(attacked: Attacked) -> None:
    """Every route of the planes, on the assembled server, without a key."""
    opened = []
    with httpx.Client(verify=attacked.trusting, base_url=attacked.serve.url) as client:
        for route in SCOPES:
            method, path = path_of(route)
            for host in ("", "localhost", "x/../livez", "x#@/docs", "127.0.0.1/livez?"):
                answer = client.request(method, path, headers={"host": host})
                if answer.status_code not in (400, 401):
                    opened.append((route, host, answer.status_code))
            for spelled in (
                f"/{path}",
                f"/livez/..{path}",
                f"/docs/static/..{path}",
                path.replace("v1", "%76%31"),
            ):
                target = httpx.URL(attacked.serve.url).copy_with(raw_path=spelled.encode())
                answer = client.request(method, target)
                if answer.status_code not in (401, 404, 405):
                    opened.append((route, spelled, answer.status_code))
        without_a_key = {path for path in PUBLIC if client.get(path).status_code == 200}
        assert client.get("/metrics").status_code == 404
    assert opened == []
    assert without_a_key == PUBLIC


HEAD: Final = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(
            HEAD + b"X: " + b"a" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n", b"400", id="header of 128 KiB"
        ),
        pytest.param(
            b"GET /" + b"a" * (2 * MAX_HEAD_BYTES) + b" HTTP/1.1\r\n\r\n", b"400", id="address of 128 KiB"
        ),
        pytest.param(HEAD + b"X: y\r\n" * 40_000 + b"\r\n", b"400", id="40,000 headers"),
        pytest.param(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n", b"401", id="chunked without a key"
        ),
        pytest.param(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", b"40", id="chunk of 16 EiB"
        ),
        pytest.param(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40, b"40", id="chunk size of 40 digits"
        ),
        pytest.param(
            HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", b"400", id="length beyond 64 bits"
        ),
        pytest.param(HEAD + b"Content-Length: -1\r\n\r\n", b"400", id="negative length"),
        pytest.param(
            HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"40",
            id="two lengths",
        ),
        pytest.param(
            HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400", id="lengths that differ"
        ),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400", id="HTTP/2 preface"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nX\0Y: z\r\n\r\n", b"400", id="zero byte in a name"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n", b"40", id="folded header"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 200, b"40", id="200 requests in one read"),
    ],
)
def test_s13_what_is_no_request_costs_one_connection(attacked: Attacked, sent: bytes, status: bytes) -> None:
    with attacked.encrypted() as connection:
        try:
            connection.sendall(sent)
            answer = connection.recv(4096)
        except ConnectionError:
            answer = b""
    assert not answer or answer.startswith(b"HTTP/1.1 " + status), answer[:200]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        pytest.param("GET {0} HTTP/1.1\r\nHost: localhost", "200", id="localhost"),
        pytest.param("GET {0} HTTP/1.1\r\nHost: evil.example", "421", id="another name"),
        pytest.param(
            "GET {0} HTTP/1.1\r\nHost: evil.example\r\nX-Forwarded-Host: localhost\r\nForwarded: host=localhost",
            "421",
            id="forwarded by nobody",
        ),
        pytest.param("GET https://localhost{0} HTTP/1.1\r\nHost: evil.example", "421", id="absolute form"),
        pytest.param("GET {0} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example", "421", id="two names"),
        pytest.param("GET {0} HTTP/1.1\r\nHost: localhost, evil.example", "421", id="two names in one"),
        pytest.param("GET {0} HTTP/1.0", "421", id="no name"),
        pytest.param("GET {0} HTTP/1.1\r\nHost:", "421", id="an empty name"),
        pytest.param("GET {0} HTTP/1.1\r\nHost: [::1", "421", id="an address that does not end"),
        pytest.param("GET /%63onsole/sign-in HTTP/1.1\r\nHost: evil.example", "421", id="an escaped path"),
        pytest.param("GET /livez HTTP/1.1\r\nHost: 10.0.0.7:8000", "200", id="probe by address"),
        pytest.param("GET /readyz HTTP/1.1\r\nHost: loraplex.svc", "200", id="probe by name"),
    ],
)
def test_s19_the_console_is_asked_by_its_names(attacked: Attacked, head: str, status: str) -> None:
    """As bytes of a connection, before any parser; probes are asked by any."""
    with attacked.encrypted() as connection:
        connection.sendall((head.format("/console/sign-in") + "\r\n\r\n").encode())
        answer = connection.recv(4096)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]


def test_s13_all_of_it_left_the_server_as_it_was(attacked: Attacked) -> None:
    assert attacked.answers()
    log = (attacked.serve.folder / "stderr").read_text()
    assert "Traceback" not in log


def test_s13_every_port_is_encrypted(attacked: Attacked) -> None:
    with httpx.Client(verify=attacked.trusting) as client:
        metrics = client.get(f"https://{LOCAL}:{attacked.metrics_port}/metrics")
        page = client.get(f"{attacked.serve.url}/console/sign-in")
    assert "vllm:" in metrics.text
    assert page.headers["strict-transport-security"]
    for port in (attacked.port, attacked.metrics_port):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{LOCAL}:{port}/livez")
