"""`loraplex tour` says what came back: a claim that fails makes exit code 1, and what any claim made is removed."""

from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from loraplex.platform.cli.main import main
from loraplex.platform.cli.tour import claims, command
from loraplex.platform.cli.tour.visitor import Found, Visitor
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
HELD = Found(True, "a question", "an [answer]", "curl")
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
    async def tried(visit: Visitor) -> Found:
        visit.cleanup.callback(REMOVED.append, "made")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return tried


@pytest.mark.parametrize(
    ("outcome", "code", "shown"),
    [
        (HELD, 0, "an [answer]"),
        (HELD._replace(held=False), 1, "BROKEN"),
        (RequestFailed("HTTP 500"), 1, "RequestFailed: HTTP 500"),
        (httpx.ReadError("gone"), 1, "ReadError: gone"),
    ],
)
def test_one_broken_claim_is_exit_code_1_and_the_others_are_tried(
    installation: Installation,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Found | Exception,
    code: int,
    shown: str,
) -> None:
    monkeypatch.setattr(command, "CLAIMS", (("First.", claim(outcome)), ("Second.", claim(HELD))))
    result = tour(installation.data_dir)
    assert result.exit_code == code and shown in result.output
    assert f"{2 - code} of 2 claims held." in result.output and REMOVED == ["made", "made"]


def test_without_a_demo_nothing_is_tried(tmp_path: Path) -> None:
    result = tour(tmp_path)
    assert result.exit_code == 1 and "loraplex serve --demo" in result.output
    assert [*tmp_path.iterdir()] == []


class Server:
    """Answers as a demo would that breaks the promise of one claim."""

    def __init__(self, *, cached_of_others: int = 0, adapter_status: int = 404, admitted: int = 10) -> None:
        self.cached = iter((0, 64, cached_of_others))
        self.adapter_status = adapter_status
        self.admitted = admitted
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
            self.admitted -= 1
            return httpx.Response(200 if self.admitted >= 0 else 429, headers={"x-request-id": "r"}, json={})
        decision = {"level": "key", "name": "requests_per_minute", "used": 10, "limit": 10, "passed": False}
        document = {"id": "k", "api_key": "new", "decisions": [decision]}
        return httpx.Response(201 if request.method == "POST" else 200, headers={"etag": "1"}, json=document)


async def tried(found: Installation, server: Server, name: str) -> Found:
    transport = httpx.MockTransport(server)
    async with httpx.AsyncClient(base_url=URL, transport=transport) as http, AsyncExitStack() as made:
        visit = Visitor(access=ACCESS, http=http, installation=found, cleanup=made)
        result: Found = await getattr(claims, name)(visit)
        return result


async def test_isolation_is_held_by_what_comes_back(installation: Installation) -> None:
    assert (await tried(installation, Server(), "isolation")).held
    for server in (Server(cached_of_others=16), Server(adapter_status=200)):
        assert not (await tried(installation, server, "isolation")).held


@pytest.mark.parametrize(("admitted", "held"), [(9, False), (10, True), (11, False)])
async def test_exactly_as_many_as_the_limit(installation: Installation, admitted: int, held: bool) -> None:
    server = Server(admitted=admitted)
    found = await tried(installation, server, "limit")
    assert found.held == held and f"{admitted} answered" in found.got
    assert server.deleted == ["/tenant/v1/keys/k"]
    assert '-H "Authorization: Bearer $ADMIN_KEY"' in found.repeat and "harbor-admin" not in found.repeat
