"""`loraplex tour` says what came back: a claim that fails makes exit code 1, and what any claim made is removed."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from loraplex.platform.cli import tour as command
from loraplex.platform.cli.main import main
from loraplex.platform.cli.tour import Found, Visit
from loraplex.platform.config import load_settings
from loraplex.platform.demo.demo_file import DemoAccess, DemoTenantAccess, write_demo_file
from loraplex.platform.drills.installation import Installation
from loraplex.platform.startup_errors import RequestFailed

URL = "http://127.0.0.1:1"
ACCESS = DemoAccess(
    base_url=URL,
    console_url=None,
    model="base-model",
    operator_key="operator",
    tenants=tuple(
        DemoTenantAccess(name=name, api_key=f"{name}-key", admin_key=f"{name}-admin", adapters=(adapter,))
        for name, adapter in (("harbor", "pirate"), ("ledger", "records"), ("acme", "support"))
    ),
)
HELD = (True, "a question", "an [answer]")
REMOVED: list[str] = []


def tour(data_dir: Path) -> Result:
    REMOVED.clear()
    return CliRunner().invoke(main, ["tour", "--data-dir", str(data_dir)])


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    found = Installation(load_settings({"data_dir": tmp_path}), "", "", (URL,))

    async def find(*_: Any) -> Installation:
        return found

    monkeypatch.setattr(command, "find_installation", find)
    write_demo_file(tmp_path, ACCESS)
    yield found


def claim(outcome: Found | Exception) -> Any:
    async def tried(visit: Visit) -> Found:
        """A claim."""
        visit.callback(REMOVED.append, "made")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return tried


@pytest.mark.parametrize(
    ("outcome", "code", "shown"),
    [
        (HELD, 0, "an [answer]"),
        ((False, *HELD[1:]), 1, "BROKEN"),
        (RequestFailed("HTTP 500"), 1, "RequestFailed: HTTP 500"),
        (httpx.ReadError("gone"), 1, "ReadError: gone"),
        (KeyError("x-digest"), 1, "KeyError: 'x-digest'"),
    ],
)
def test_one_broken_claim_is_exit_code_1_and_the_others_are_tried(
    installation: Installation,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Found | Exception,
    code: int,
    shown: str,
) -> None:
    monkeypatch.setattr(command, "CLAIMS", (claim(outcome), claim(HELD)))
    result = tour(installation.data_dir)
    assert result.exit_code == code and shown in result.output
    assert f"{2 - code} of 2 claims held." in result.output and REMOVED == ["made", "made"]
    assert "kills the demo's engine once" in result.output.splitlines()[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_removing_what_was_made(
    installation: Installation, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    async def stopped(visit: Visit) -> Found:
        """A claim."""

        async def remove() -> None:
            await asyncio.sleep(0)
            REMOVED.append("made")

        visit.push_async_callback(remove)
        signal.raise_signal(number)
        await asyncio.sleep(60)
        return HELD

    monkeypatch.setattr(command, "CLAIMS", (stopped, claim(HELD)))
    result = tour(installation.data_dir)
    assert result.exit_code == 1 and "stopped before the end" in result.output
    assert REMOVED == ["made"] and "claims held." not in result.output


def test_without_a_demo_nothing_is_tried(tmp_path: Path) -> None:
    result = tour(tmp_path)
    assert result.exit_code == 1 and "loraplex serve --demo" in result.output
    assert [*tmp_path.iterdir()] == []


class Server:
    """Answers as a demo would that breaks the promise of one claim. `late`: keys whose requests Valkey is late for."""

    def __init__(
        self, *, cached_of_others: int = 0, adapter_status: int = 404, admitted: int = 10, late: int = 0
    ) -> None:
        self.cached = iter((0, 64, cached_of_others))
        self.adapter_status = adapter_status
        self.admitted, self.late, self.left = admitted, late, 0
        self.deleted: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method == "DELETE":
            self.deleted.append(path)
            return httpx.Response(204)
        if path == "/v1/completions":
            cached = {"cached_tokens": next(self.cached)}
            return httpx.Response(200, json={"usage": {"prompt_tokens_details": cached}})
        if path == "/v1/chat/completions" and b"records" in request.content:
            return httpx.Response(self.adapter_status, json={"error": {"code": "model_not_found"}})
        if path == "/v1/chat/completions":
            self.left -= 1
            headers = {"x-request-id": "r"} | ({"x-ratelimit-mode": "degraded"} if self.late >= 0 else {})
            return httpx.Response(200 if self.left >= 0 else 429, headers=headers, json={})
        if path == "/tenant/v1/keys":
            self.late -= 1
            # The gateway's share admits one more.
            self.left = self.admitted + (self.late >= 0)
        decision = {"level": "key", "name": "requests_per_minute", "used": 10, "limit": 10, "passed": False}
        document = {"id": "k", "api_key": "new", "decisions": [decision]}
        return httpx.Response(201 if request.method == "POST" else 200, headers={"etag": "1"}, json=document)


async def tried(
    found: Installation, server: Callable[[httpx.Request], httpx.Response], name: str
) -> tuple[Found, str]:
    """What a claim finds, and the command that repeats its last request."""
    async with httpx.AsyncClient(base_url=URL, transport=httpx.MockTransport(server)) as http:
        async with Visit(ACCESS, found, http) as visit:
            result: Found = await getattr(command, name)(visit)
        return result, visit.repeat


async def test_isolation_is_held_by_what_comes_back(installation: Installation) -> None:
    (held, _, _), repeat = await tried(installation, Server(), "isolation")
    assert held and '-H "Authorization: Bearer $KEY"' in repeat and '"model": "records"' in repeat
    for server in (Server(cached_of_others=16), Server(adapter_status=200)):
        assert not (await tried(installation, server, "isolation"))[0][0]


@pytest.mark.parametrize(
    ("admitted", "late", "held"),
    [(9, 0, False), (10, 0, True), (11, 0, False), (10, 2, True), (10, 3, False)],
)
async def test_exactly_as_many_as_the_limit(
    installation: Installation, admitted: int, late: int, held: bool
) -> None:
    server = Server(admitted=admitted, late=late)
    found, repeat = await tried(installation, server, "limit")
    assert found[0] == held and f"{admitted + (late == 3)} answered" in found[2]
    assert server.deleted == ["/tenant/v1/keys/k"] * min(late + 1, 3)
    assert '-H "Authorization: Bearer $ADMIN_KEY"' in repeat and "harbor-admin" not in repeat


@pytest.mark.parametrize(("steps", "held"), [((18, 18), True), ((54, 18), False)])
async def test_adapters_that_run_one_after_the_other_take_more_steps(
    installation: Installation, steps: tuple[int, int], held: bool
) -> None:
    """Each report is the newest one: before, while rows run, and after."""
    reports = iter([0, 3, 3, 3, 3 + steps[0], 3 + steps[0], 3 + steps[0], 3 + sum(steps)])
    running = iter([0, 0, 0, 1, 0, 0, 1, 0])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return httpx.Response(200, json={"usage": {"completion_tokens": 16}})
        queues = {"steps": next(reports), "running": next(running)}
        return httpx.Response(200, json={"engines": [{"queues": queues}, {"queues": None}]})

    found, _ = await tried(installation, answer, "mixing")
    assert found[0] == held and f"in {steps[0]} steps, then" in found[2]
