"""`loraplex engine`: lists, adds and drains the engines of a running server, over its operator API."""

import asyncio
from typing import Annotated, Any, Final

import httpx
import typer

from loraplex.platform.cli.command_context import DataDir, async_command
from loraplex.platform.cli.output import AsJson, print_document, print_rows
from loraplex.platform.cli.remote_server import open_server, problem_of, read_key, server_url
from loraplex.platform.startup_errors import RequestFailed

app = typer.Typer(name="engine", help="Engines of a running server.", no_args_is_help=True)

Key = Annotated[str, typer.Option("--key", help="An operator's key; `-` reads it from standard input.")]
Url = Annotated[
    str | None, typer.Option("--url", help="The server; by default the one of the data directory.")
]
Number = Annotated[int, typer.Argument(min=0, help="The engine's number, as `list` shows it.")]
Address = Annotated[
    str | None, typer.Option(help="ipc:///path of an engine that runs, for a gateway without its own.")
]
COLUMNS: Final = ("number", "state", "device", "open_requests", "restarts", "address", "failure")
POLL_S: Final = 0.5


@app.command("list")
@async_command
async def list_engines(key: Key, url: Url = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the engines, with the open requests of the gateway that answers."""
    async with _server(url, key, data_dir) as server:
        engines = await _engines(server)
    print_rows([{name: each[name] for name in COLUMNS} for each in engines.values()], as_json, COLUMNS)


@app.command()
@async_command
async def add(
    key: Key,
    address: Address = None,
    url: Url = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Add an engine, and wait until it takes requests."""
    async with _server(url, key, data_dir) as server:
        added = await _ready(server, await _post(server, "engines", {"address": address}))
    print_document({name: added[name] for name in COLUMNS}, as_json)


@app.command()
@async_command
async def drain(
    number: Number,
    key: Key,
    grace_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds that open requests have; default `drain_s`.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Add another engine first, so that capacity does not fall.")
    ] = False,
    address: Address = None,
    force: Annotated[bool, typer.Option("--force", help="Also the last engine that takes requests.")] = False,
    url: Url = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Drain an engine, and wait until its process has ended: open requests end, or go on elsewhere after the grace."""
    async with _server(url, key, data_dir) as server:
        if replace:
            added = await _post(server, "engines", {"address": address, "replaces": number})
            await _ready(server, added)
        drained = await _post(server, f"engines/{number}/drain", {"grace_s": grace_s, "force": force})
        drained = await _ended(server, drained)
    print_document({name: drained[name] for name in COLUMNS}, as_json)


def _server(url: str | None, key: str, data_dir: Any) -> httpx.AsyncClient:
    """Return a client of the operator API. Raises `RequestFailed` where no server runs on the data directory."""
    return open_server(server_url(url, data_dir), read_key(key), "operator/v1")


async def _ready(server: httpx.AsyncClient, added: dict[str, Any]) -> dict[str, Any]:
    """Wait for an added engine. Raises `RequestFailed` if it leaves instead."""
    number = added["number"]
    while added["state"] != "up":
        await asyncio.sleep(POLL_S)
        engines = await _engines(server)
        if number not in engines:
            raise RequestFailed(f"engine {number} did not start: see the server's log")
        added = engines[number]
    return added


async def _ended(server: httpx.AsyncClient, drained: dict[str, Any]) -> dict[str, Any]:
    """Wait until an engine has left or is down, or its supervisor has started it again."""
    before = drained["state"]
    while (found := (await _engines(server)).get(drained["number"])) is not None:
        if found["state"] == "down" or (before == "draining" != found["state"]):
            break
        before = found["state"]
        await asyncio.sleep(POLL_S)
    return found or drained | {"state": "down"}


async def _engines(server: httpx.AsyncClient) -> dict[int, dict[str, Any]]:
    found = await _send(server, "GET", "engine", None)
    return {each["number"]: each for each in found["engines"]}


async def _post(server: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return await _send(
        server, "POST", path, {name: value for name, value in body.items() if value is not None}
    )


async def _send(
    server: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None
) -> dict[str, Any]:
    try:
        response = await server.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise RequestFailed(f"{method} {server.base_url}{path}: {error or type(error).__name__}") from error
    if not response.is_success:
        raise RequestFailed(problem_of(response))
    document: dict[str, Any] = response.json()
    return document
