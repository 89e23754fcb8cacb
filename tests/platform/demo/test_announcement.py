"""The printed requests, run exactly as printed by bash and Python against a server that records what arrives."""

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from loraplex.platform.demo.announcement import QUESTION, curl_snippet, python_snippet
from loraplex.platform.server.listening import root_url

KEY = "lpx_live_0123456789abcdef_secret_crc"
ANSWER = "It's Rome, matey!"


class RecordingServer(HTTPServer):
    """Responds to every chat request with `ANSWER`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str | None, dict[str, Any]]] = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert isinstance(self.server, RecordingServer)
        self.server.seen.append((self.path, self.headers["authorization"], body))
        message = {"role": "assistant", "content": ANSWER}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with RecordingServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def check_request(server: RecordingServer, model: str) -> None:
    [(path, authorization, body)] = server.seen
    assert (path, authorization) == ("/v1/chat/completions", f"Bearer {KEY}")
    assert body == {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 64,
        "temperature": 0,
    }


@pytest.mark.parametrize("model", ["pirate", 'it\'s "odd" $(no) `name`'])
def test_curl_runs_as_printed(server: RecordingServer, model: str) -> None:
    text = curl_snippet(root_url("127.0.0.1", server.server_port), KEY, model)
    done = subprocess.run(["bash", "-c", text], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == ANSWER
    check_request(server, model)


@pytest.mark.parametrize("model", ["pirate", 'it\'s "odd" {name}'])
def test_python_runs_as_printed(server: RecordingServer, model: str) -> None:
    text = python_snippet(root_url("127.0.0.1", server.server_port), KEY, model)
    done = subprocess.run(
        [sys.executable, "-c", text], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n"), done.stderr
    check_request(server, model)
