"""`loraplex decision calibrate` against a scripted server that is too sure: what it asks, finds and writes, and how it fails."""

import json
import random
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from loraplex.platform.cli.main import main
from loraplex.platform.inference.decisions.calibration import tempered
from loraplex.tenants.api_keys.key_format import generate_key

OPTIONS = ("billing", "technical", "other")
TOO_SURE = 0.3
"""The temperature at which the server's model answers what it believes at 1."""
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": "Which team?",
    "choices": [{"value": each} for each in OPTIONS],
}


def believed(text: str) -> list[float]:
    """What the model believes of an input."""
    chance = random.Random(text)
    weights = [chance.expovariate(1) for _ in OPTIONS]
    return [each / sum(weights) for each in weights]


class Handler(BaseHTTPRequestHandler):
    temperature = 1.0
    known = "b" * 64
    asked: list[dict[str, Any]]
    written: dict[str, Any] | None

    def do_GET(self) -> None:
        if "models" in self.path:
            self._send(200, {"system_fingerprint": "fp_1"})
        elif self.temperature == 1.0:
            self._send(404, {"error": {"message": "no calibration"}})
        else:
            self._send(200, {"sha256": self.known, "temperatures": {"choice": self.temperature}})

    def do_POST(self) -> None:
        body = self._body()
        self.asked.append(body)
        shares = tempered(tempered(believed(body["input"]), TOO_SURE), self.temperature)
        pairs = [{"value": value, "probability": each} for value, each in zip(OPTIONS, shares, strict=True)]
        answer = {"type": "choice", "choice": OPTIONS[0], "confidence": 0, "probabilities": pairs}
        self._send(200, {"answers": [answer] * len(body["questions"])})

    def do_PUT(self) -> None:
        type(self).written = self._body()
        self._send(200, {"sha256": "a" * 64})

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        return body

    def _send(self, status: int, document: object) -> None:
        self.send_response(status)
        self.send_header("x-loraplex-decision-format", "1")
        applied = "none" if self.temperature == 1.0 else "b" * 16
        self.send_header("x-loraplex-decision-calibration", applied)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    Handler.asked, Handler.written, Handler.temperature = [], None, 1.0
    Handler.known = "b" * 64
    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """100 inputs, eight questions each; the answers are drawn from what the model believes."""
    chance, lines = random.Random(1), []
    for number in range(100):
        text = f"ticket {number}"
        answers = chance.choices(OPTIONS, believed(text), k=8)
        lines += [json.dumps({"input": text, "question": CHOICE, "answer": each}) for each in answers]
    path = tmp_path / "examples.jsonl"
    path.write_text("\n".join(lines))
    return path


def calibrate(server: HTTPServer, examples: Path, adapter: str = "triage@3") -> Result:
    url = f"http://127.0.0.1:{server.server_port}"
    options = ("--url", url, "--key", generate_key("live").plaintext, "--adapter", adapter)
    return CliRunner().invoke(main, ["decision", "calibrate", "--examples", str(examples), *options])


@pytest.mark.parametrize("present", [1.0, 2.0])
def test_what_is_too_sure_is_found_and_written(server: HTTPServer, examples: Path, present: float) -> None:
    Handler.temperature = present
    done = calibrate(server, examples)
    assert done.exit_code == 0, done.output
    # One request for the questions of an input.
    assert len(Handler.asked) == 100 and {len(each["questions"]) for each in Handler.asked} == {8}
    assert Handler.written is not None
    assert Handler.written["temperatures"] == {"choice": pytest.approx(1 / TOO_SURE, rel=0.2)}
    assert (Handler.written["format"], Handler.written["system_fingerprint"]) == ("1", "fp_1")
    measured = Handler.written["report"]["choice"]
    assert measured["examples"] == 400 and measured["after"]["ece"] <= measured["before"]["ece"] / 2
    assert measured["after"]["accuracy"] == measured["before"]["accuracy"]
    assert re.search(r"choice .*->", done.output) and "triage@3: calibration aaaaaaaaaaaaaaaa" in done.output


def test_what_another_calibrated_meanwhile_is_not_measured(server: HTTPServer, examples: Path) -> None:
    Handler.temperature, Handler.known = 2.0, "c" * 64
    failed = calibrate(server, examples)
    assert failed.exit_code == 1 and "meanwhile" in failed.output and Handler.written is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ('{"input": "a", "question": {"type": "choice"}, "answer": "b"}', "line 2"),
        (json.dumps({"input": "a", "question": CHOICE, "answer": "nothing"}), "line 2"),
    ],
)
def test_a_wrong_example_names_its_line(server: HTTPServer, examples: Path, line: str, said: str) -> None:
    examples.write_text("\n".join([examples.read_text().splitlines()[0], line]))
    refused = calibrate(server, examples)
    assert refused.exit_code == 2 and said in refused.output and Handler.asked == []


def test_too_few_examples_and_no_version_are_refused(server: HTTPServer, examples: Path) -> None:
    assert "NAME@VERSION" in calibrate(server, examples, "triage").output
    examples.write_text("\n".join(examples.read_text().splitlines()[:10]))
    few = calibrate(server, examples)
    assert few.exit_code == 2 and "at least 20" in few.output and Handler.written is None
