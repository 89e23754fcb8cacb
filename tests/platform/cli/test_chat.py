"""`loraplex chat` against a scripted server: what it sends, what it prints, and how it fails."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from loraplex.platform.cli.main import main
from loraplex.tenants.api_keys.key_format import generate_key

MODELS = [{"id": "poet", "parent": "tiny"}, {"id": "tiny", "parent": None}]


class Handler(BaseHTTPRequestHandler):
    bodies: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": MODELS}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        if body["model"] == "nothing":
            self._send(404, json.dumps({"error": {"message": "no such model"}}))
            return
        deltas: list[dict[str, Any]] = [{"role": "assistant"}, {"content": "Hello "}, {"content": "you"}]
        events: list[dict[str, Any]] = [{"choices": [{"delta": each}]} for each in deltas]
        if body["model"] == "poet":
            events.append({"error": {"message": "the engine ended"}})
        lines = [f"data: {json.dumps(each)}\n\n" for each in events]
        self._send(200, "".join([*lines, "data: [DONE]\n\n"]))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("x-request-id", "r1")
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    Handler.bodies = []
    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def chat(server: HTTPServer, *arguments: str) -> Result:
    url = f"http://127.0.0.1:{server.server_port}"
    key = generate_key("live").plaintext
    return CliRunner().invoke(main, ["chat", "--url", url, "--key", key, *arguments], input="Hi\nthere\n")


def test_what_is_piped_in_is_one_message_to_the_base_model(server: HTTPServer) -> None:
    done = chat(server)
    assert (done.exit_code, done.stdout) == (0, "Hello you\n")
    (sent,) = Handler.bodies
    assert (sent["model"], sent["stream"]) == ("tiny", True)
    assert sent["messages"][0] == {"role": "user", "content": "Hi\nthere"}


def test_a_refusal_and_an_error_within_a_stream_are_one_line_with_the_request_id(server: HTTPServer) -> None:
    refused = chat(server, "--adapter", "nothing")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1] == "error: HTTP 404: no such model (request r1)"
    broken = chat(server, "--adapter", "poet")
    assert broken.exit_code == 1 and "error: the engine ended (request r1)" in broken.stderr


def test_without_a_key_or_a_demo_it_says_what_is_missing(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["chat", "--data-dir", str(tmp_path)])
    assert done.exit_code == 2 and "give --key: `loraplex key create --tenant NAME`" in done.stderr
