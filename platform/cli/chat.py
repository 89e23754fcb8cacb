"""`loraplex chat`: a conversation with the base model or an adapter of a running server; the answers stream.

Invariant: only answers go to standard output, and to a terminal without control characters.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer

from loraplex.platform.cli.command_context import DataDir, exit_codes
from loraplex.platform.cli.remote_server import client_options, problem_of, read_key, send, server_url
from loraplex.platform.config import load_settings
from loraplex.platform.demo.demo_file import DEMO_FILE, read_demo_file
from loraplex.platform.startup_errors import RequestFailed, SettingsError

MAX_TOKENS: Final = 512
"""Of an answer."""


def chat_command(
    adapter: Annotated[
        str | None, typer.Option(help="NAME, NAME:ALIAS or NAME@VERSION; default the base model.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="The server; default that of the data directory.")] = None,
    key: Annotated[
        str | None, typer.Option(help="A key with the scope inference; default one of the demo's.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0: the likeliest answer.")] = 0.0,
    data_dir: DataDir = None,
) -> None:
    """Chat, a line at a time; what is piped in is one message. End with Ctrl-D."""
    with exit_codes():
        home = load_settings({"data_dir": data_dir}).data_dir
        secret = _demo_key(home, adapter) if key is None else read_key(key)
        with httpx.Client(**client_options(server_url(url, data_dir), secret, "v1")) as server:
            model = adapter or _base_model(server)
            _converse(server, {"model": model, "temperature": temperature})


def _converse(server: httpx.Client, asked: dict[str, Any]) -> None:
    is_asked = sys.stdin.isatty()
    messages: list[dict[str, str]] = []
    while text := _next_message(asked["model"]) if is_asked else sys.stdin.read().strip():
        messages.append({"role": "user", "content": text})
        try:
            answer = _answer(server, asked | {"messages": messages})
            messages.append({"role": "assistant", "content": answer})
        except RequestFailed as error:
            if not is_asked:
                raise
            messages.pop()
            typer.echo(f"error: {error}", err=True)


def _next_message(model: str) -> str:
    try:
        return input(f"{model}> ").strip() or _next_message(model)
    except EOFError:
        return ""


def _answer(server: httpx.Client, asked: dict[str, Any]) -> str:
    """Stream an answer to standard output, and return it. Raises `RequestFailed`."""
    parts: list[str] = []
    on_terminal = sys.stdout.isatty()
    body = asked | {"stream": True, "max_tokens": MAX_TOKENS}
    try:
        with server.stream("POST", "chat/completions", json=body) as response:
            request_id = response.headers.get("x-request-id", "-")
            if not response.is_success:
                response.read()
                raise RequestFailed(f"{problem_of(response)} (request {request_id})")
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise RequestFailed(f"{event['error']['message']} (request {request_id})")
                for choice in event["choices"]:
                    parts.append(choice["delta"].get("content") or "")
                    typer.echo(_printable(parts[-1]) if on_terminal else parts[-1], nl=False)
    except httpx.HTTPError as error:
        raise RequestFailed(f"{server.base_url}: {error or type(error).__name__}") from error
    typer.echo()
    return "".join(parts)


def _printable(text: str) -> str:
    return "".join(each for each in text if each.isprintable() or each in "\n\t")


def _base_model(server: httpx.Client) -> str:
    """Raises `RequestFailed`."""
    models = send(server, "GET", "models").json()["data"]
    return next(str(each["id"]) for each in models if each["parent"] is None)


def _demo_key(data_dir: Path, adapter: str | None) -> str:
    """The key of the demo's tenant that has the adapter. Raises `SettingsError`."""
    access = read_demo_file(data_dir)
    if access is None:
        raise SettingsError(
            f"{data_dir} has no {DEMO_FILE}, so give --key: `loraplex key create --tenant NAME` makes one"
        )
    name = (adapter or "").partition(":")[0].partition("@")[0]
    owners = [each for each in access.tenants if adapter is None or name in each.adapters]
    return (owners or access.tenants)[0].api_key
