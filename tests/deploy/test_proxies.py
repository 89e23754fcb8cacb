"""The reverse proxies, each run with its own file: streams are not buffered, inner paths are not public, no client writes another's
address, and a gateway that is away is passed over.
"""

import asyncio
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DEPLOY = Path(__file__).parents[2] / "deploy"
NGINX, CADDY = shutil.which("nginx") or "/usr/sbin/nginx", shutil.which("caddy") or "/usr/bin/caddy"
INNER = ("/metrics", "/health", "/ping", "/operator/v1/tenants", "/operator/console", "/readyz", "/startupz")


@dataclass
class Gateway:
    """An upstream that answers a stream of two chunks: the second when `release` is set."""

    release: asyncio.Event = field(default_factory=asyncio.Event)
    heads: list[str] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        if "/readyz" not in head:
            self.heads.append(head)
            writer.write(b"data: 1\n\n")
            await writer.drain()
            await self.release.wait()
        writer.write(b"data: 2\n\n")
        writer.close()


@dataclass(frozen=True)
class Proxied:
    """A proxy that runs: its address, and the gateway behind it."""

    url: str
    gateway: Gateway

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url, verify=False, timeout=60, headers={"host": "llm.example.com"}
        )


def nginx(folder: Path, gateway: int, free: Callable[[], int]) -> tuple[list[str], dict[str, str], str]:
    """The site as nginx includes it, with other ports and a certificate of this test. The first gateway is away."""
    port = free()
    certificate(folder)
    site = (DEPLOY / "nginx" / "loraplex.conf").read_text()
    site = site.replace("/etc/nginx/tls", str(folder)).replace("listen 80;", f"listen 127.0.0.1:{free()};")
    site = site.replace("listen 443", f"listen 127.0.0.1:{port}")
    site = site.replace("127.0.0.1:8001", f"127.0.0.1:{free()}").replace(
        "127.0.0.1:8002", f"127.0.0.1:{gateway}"
    )
    (folder / "site.conf").write_text(site)
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {temporary} include {folder}/site.conf; }}"
    )
    command = [NGINX, "-e", "stderr", "-c", str(folder / "nginx.conf")]
    subprocess.run([*command, "-t"], check=True, capture_output=True, timeout=60)
    return command, {}, f"https://127.0.0.1:{port}"


def caddy(folder: Path, gateway: int, free: Callable[[], int]) -> tuple[list[str], dict[str, str], str]:
    """The file of the Compose project, with other addresses. The first gateway is away."""
    port = free()
    text = (DEPLOY / "compose" / "Caddyfile").read_text()
    text = text.replace("gateway-1:8000", f"127.0.0.1:{free()}").replace(
        "gateway-2:8000", f"127.0.0.1:{gateway}"
    )
    (folder / "Caddyfile").write_text(text.replace(":8081", f":{free()}"))
    environment = {"LORAPLEX_DOMAIN": f"http://llm.example.com:{port}", "HOME": str(folder)}
    command = [CADDY, "run", "--config", str(folder / "Caddyfile")]
    subprocess.run(
        [CADDY, "validate", *command[2:]], check=True, capture_output=True, env=environment, timeout=60
    )
    return command, environment, f"http://127.0.0.1:{port}"


def certificate(folder: Path) -> None:
    """A certificate of its own authority, valid for a day."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "llm.example.com")])
    now = datetime.now(UTC)
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    built = (
        built.serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "llm.example.com.crt").write_bytes(built.sign(key, hashes.SHA256()).public_bytes(pem))
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    (folder / "llm.example.com.key").write_bytes(secret)


@asynccontextmanager
async def running(name: str, folder: Path, free: Callable[[], int]) -> AsyncIterator[Proxied]:
    gateway = Gateway()
    server = await asyncio.start_server(gateway.answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    command, environment, url = {"nginx": nginx, "caddy": caddy}[name](folder, port, free)
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
    try:
        proxied = Proxied(url, gateway)
        await _answers(proxied, process, folder / "log")
        yield proxied
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        gateway.release.set()
        server.close()


async def _answers(proxied: Proxied, process: asyncio.subprocess.Process, log: Path) -> None:
    """Wait until the proxy answers, and has found the gateway that is there."""
    async with asyncio.timeout(60), proxied.client() as client:
        proxied.gateway.release.set()
        while True:
            assert process.returncode is None, log.read_text()
            try:
                if (await client.get("/livez")).status_code == 200:
                    break
            except (httpx.TransportError, ssl.SSLError):
                pass
            await asyncio.sleep(0.05)
    proxied.gateway.release.clear()
    proxied.gateway.heads.clear()


@pytest.mark.parametrize("name", ["nginx", "caddy"])
async def test_a_proxy_streams_hides_and_names_the_client(
    name: str, tmp_path: Path, free_tcp_port_factory: Callable[[], int]
) -> None:
    if not Path({"nginx": NGINX, "caddy": CADDY}[name]).exists():
        pytest.skip(f"needs {name}")
    async with running(name, tmp_path, free_tcp_port_factory) as proxied, proxied.client() as client:
        for path in INNER:
            assert (await client.get(path)).status_code == 404, path
        assert proxied.gateway.heads == []
        forged = {"x-forwarded-for": "203.0.113.7", "x-forwarded-proto": "gopher"}
        async with client.stream("POST", "/v1/chat/completions", json={}, headers=forged) as response:
            chunks = response.aiter_bytes()
            async with asyncio.timeout(60):
                assert await anext(chunks) == b"data: 1\n\n"
            proxied.gateway.release.set()
            assert [chunk async for chunk in chunks] == [b"data: 2\n\n"]
        (head,) = proxied.gateway.heads
        headers = {key.lower(): value for key, value in re.findall(r"^([\w-]+): (.*)\r$", head, re.MULTILINE)}
        assert headers["x-forwarded-for"].split(", ")[-1] == "127.0.0.1"
        assert headers["x-forwarded-proto"] == proxied.url.partition(":")[0]
        assert headers["host"].startswith("llm.example.com")
