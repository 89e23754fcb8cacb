"""The server that a command calls over HTTP. Invariant: no error quotes the key, and none is sent to an address with another one."""

import ipaddress
from pathlib import Path
from typing import Any, Final

import httpx
import typer

from loraplex.platform.config import load_settings
from loraplex.platform.server.gateway_address import running_gateways
from loraplex.platform.startup_errors import RequestFailed, SettingsError
from loraplex.tenants.api_keys.key_format import parse_key
from loraplex.tenants.errors import MalformedKey

TIMEOUT_S: Final = 120.0
"""Completing an upload assembles all its parts."""


def read_key(key: str) -> str:
    """Return the key; `-` reads it from standard input, since arguments are visible to other users of the machine."""
    return typer.get_text_stream("stdin").readline().strip() if key == "-" else key


def server_url(url: str | None, data_dir: Path | None) -> str:
    """Return the given address, else that of the server on the data directory. Raises `RequestFailed` where none runs."""
    if url is not None:
        return url
    folder = load_settings({"data_dir": data_dir}).data_dir
    running = running_gateways(folder)
    if not running:
        raise RequestFailed(f"no server runs on the data directory {folder}: name one with --url")
    return running[0].base_url


def open_server(url: str, key: str, plane: str) -> httpx.AsyncClient:
    """Return a client with `client_options`."""
    return httpx.AsyncClient(**client_options(url, key, plane))


def client_options(url: str, key: str, plane: str) -> dict[str, Any]:
    """The options of a client of a plane, such as `tenant/v1`. Raises `SettingsError` for an address or key that is none."""
    try:
        address = httpx.URL(f"{url.rstrip('/')}/{plane}/")
    except httpx.InvalidURL as error:
        raise SettingsError(f"--url {url}: {error}") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise SettingsError(f"--url {url}: must be like https://host:8000")
    if address.userinfo:
        # It would replace the key, and error messages name the address.
        raise SettingsError("--url: must contain no user or password; the key is given with --key")
    try:
        parse_key(key)
    except MalformedKey as error:
        # The HTTP client would quote the whole key in its error.
        raise SettingsError(f"--key: {error}") from error
    if address.scheme == "http" and not _is_this_machine(address.host):
        typer.echo(
            f"--url {url}: the key is sent without TLS; use https outside of a trusted network", err=True
        )
    return {"base_url": address, "headers": {"authorization": f"Bearer {key}"}, "timeout": TIMEOUT_S}


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def send(server: httpx.Client, method: str, path: str, body: object = None) -> httpx.Response:
    """Return a successful response. Raises `RequestFailed`."""
    try:
        response = server.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise RequestFailed(f"{server.base_url}: {error or type(error).__name__}") from error
    if not response.is_success:
        raise RequestFailed(problem_of(response))
    return response


def problem_of(response: httpx.Response) -> str:
    """The message of an error response."""
    try:
        return f"HTTP {response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
