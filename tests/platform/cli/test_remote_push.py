"""`adapter push --url` against a scripted server: parts, repetitions, and what is left of an upload that fails."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.adapters.validation.good_folder import CONFIG, WEIGHTS, write_good

from loraplex.adapters.errors import FolderRejected, VersionRejected
from loraplex.adapters.push import PushRequest
from loraplex.platform.cli.remote_push import ATTEMPTS, RemotePush, open_remote_push
from loraplex.platform.startup_errors import RequestFailed, SettingsError
from loraplex.tenants.api_keys.key_format import generate_key
from loraplex.tenants.errors import InvalidName
from loraplex.tenants.registry.records import AdapterProfile

PASSED = {"name": "probe", "passed": True, "detail": "2 modules agree", "warning": False}
FAILED = {"name": "probe", "passed": False, "detail": "the adapter: it differs", "warning": False}
Answer = Callable[[httpx.Request], httpx.Response | None]


@dataclass
class ScriptedServer:
    """The tenant API for one adapter that has `versions` already. `answer` may respond in its place."""

    versions: int = 0
    state: str = "ready"
    part_size: int = 1000
    answer: Answer = lambda request: None
    calls: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    bodies: dict[str, Any] = field(default_factory=dict)

    def respond(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/tenant/v1/")
        call = f"{request.method} {path}"
        self.calls.append(call)
        self.keys.append(request.headers["idempotency-key"])
        answer = self.answer(request)
        if answer is not None:
            return answer
        if "/parts/" in path:
            name = path.split("/")[2]
            self.files[name] = self.files.get(name, b"") + request.content
            return httpx.Response(200)
        if request.content:
            self.bodies[call] = json.loads(request.content)
        return self._response(call)

    def _response(self, call: str) -> httpx.Response:
        version = {"state": self.state, "digest": "d" * 64, "size_bytes": 3, "rank": 4}
        version["report"] = {"checks": [PASSED if self.state == "ready" else FAILED]}
        responses = {
            "GET me": (200, {"tenant": {"name": "harbor"}}),
            "GET adapters/voice/versions": (200, {"data": [version] * self.versions}),
            "POST adapters/voice/uploads": (201, {"id": "u1", "part_size": self.part_size}),
            "POST uploads/u1/complete": (202, {"version": self.versions + 1}),
            f"GET adapters/voice/versions/{self.versions + 1}": (200, version),
            "GET adapters/voice/aliases/production": (200, {}) if self.versions else (404, {}),
            "DELETE uploads/u1": (204, None),
        }
        status, body = responses.get(call, (200, {}))
        if not self.versions and call == "GET adapters/voice/versions":
            status = 404
        if call == "POST adapters":
            status = 201
        return httpx.Response(status, json=body, headers={"etag": '"7"'})


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
async def push(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RemotePush]:
    async def at_once(_: float) -> None:
        pass

    monkeypatch.setattr("loraplex.platform.cli.remote_push.asyncio.sleep", at_once)
    transport = httpx.MockTransport(server.respond)
    async with httpx.AsyncClient(transport=transport, base_url="http://far/tenant/v1/") as client:
        yield RemotePush(client, "harbor")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_good(tmp_path / "voice")
    return tmp_path / "voice"


async def test_a_new_adapter_is_created_and_uploaded_in_parts(
    server: ScriptedServer, push: RemotePush, folder: Path
) -> None:
    pushed = await push.push(PushRequest(name="voice", folder=folder, promote="first"))
    assert (pushed.version, pushed.state, pushed.promoted, pushed.rank) == (1, "ready", True, 4)
    assert server.files == {file: (folder / file).read_bytes() for file in (CONFIG, WEIGHTS)}
    declared = server.bodies["POST adapters/voice/uploads"]["files"]
    assert [(file["name"], file["size"]) for file in declared] == [
        (file, (folder / file).stat().st_size) for file in (CONFIG, WEIGHTS)
    ]
    weights = (folder / WEIGHTS).stat().st_size
    assert sum(f"/{WEIGHTS}/parts/" in call for call in server.calls) == -(-weights // server.part_size)
    assert server.bodies["POST adapters"] == {"name": "voice"}
    assert server.bodies["PUT adapters/voice/aliases/production"] == {"version": 1}
    assert "DELETE uploads/u1" not in server.calls


async def test_a_profile_is_set_and_a_later_version_moves_nothing_if_only_the_first_does(
    server: ScriptedServer, push: RemotePush, folder: Path
) -> None:
    server.versions = 2
    profile = AdapterProfile("hermes", {"temperature": 0.2}, "think")
    pushed = await push.push(PushRequest(name="voice", folder=folder, promote="first", profile=profile))
    assert (pushed.version, pushed.promoted) == (3, False)
    changed = server.bodies["PATCH adapters/voice/versions/3"]
    expected = {"tool_style": "hermes", "reasoning_style": "think", "defaults": {"temperature": 0.2}}
    assert changed == expected
    assert "POST adapters" not in server.calls
    assert not any(call.startswith("PUT adapters") for call in server.calls)


async def test_a_busy_or_unreachable_server_is_asked_again(
    server: ScriptedServer, push: RemotePush, folder: Path
) -> None:
    busy = httpx.Response(503, headers={"retry-after": "1"})
    problems: list[httpx.Response | httpx.ConnectError] = [busy, httpx.ConnectError("refused")]

    def answer(request: httpx.Request) -> httpx.Response | None:
        if not request.url.path.endswith("/complete") or not problems:
            return None
        problem = problems.pop()
        if isinstance(problem, httpx.ConnectError):
            raise problem
        return problem

    server.answer = answer
    assert (await push.push(PushRequest(name="voice", folder=folder))).version == 1
    completions = [
        key for call, key in zip(server.calls, server.keys, strict=True) if call.endswith("/complete")
    ]
    assert len(completions) == 3 and len(set(completions)) == 1


async def test_an_upload_that_fails_is_aborted(
    server: ScriptedServer, push: RemotePush, folder: Path
) -> None:
    error = {"error": {"message": "the disk is full"}}
    server.answer = lambda request: (
        httpx.Response(507, json=error) if f"{WEIGHTS}/parts/1" in request.url.path else None
    )
    with pytest.raises(RequestFailed, match="HTTP 507: the disk is full"):
        await push.push(PushRequest(name="voice", folder=folder))
    assert server.calls[-1] == "DELETE uploads/u1"


@pytest.mark.parametrize("change", ["link", "shrinks"])
async def test_a_file_that_changes_before_it_is_sent_is_refused(
    server: ScriptedServer, push: RemotePush, folder: Path, tmp_path: Path, change: str
) -> None:
    weights = folder / WEIGHTS
    (tmp_path / "secret").write_bytes(b"secret")

    def answer(request: httpx.Request) -> httpx.Response | None:
        if change == "link" and request.url.path.endswith("voice/uploads"):
            weights.unlink()
            weights.symlink_to(tmp_path / "secret")
        if change == "shrinks" and request.url.path.endswith(f"{WEIGHTS}/parts/1"):
            weights.write_bytes(b"")
        return None

    server.answer = answer
    with pytest.raises(FolderRejected, match="symbolic link" if change == "link" else "changed while"):
        await push.push(PushRequest(name="voice", folder=folder))
    assert server.calls[-1] == "DELETE uploads/u1" and b"secret" not in server.files.values()


async def test_a_server_that_stays_away_is_an_error(
    server: ScriptedServer, push: RemotePush, folder: Path
) -> None:
    server.answer = lambda request: httpx.Response(503, text="no JSON")
    with pytest.raises(RequestFailed, match=r"GET http://far/tenant/v1/me: HTTP 503$"):
        await push.push(PushRequest(name="voice", folder=folder))
    assert len(server.calls) == ATTEMPTS


async def test_a_rejected_version_is_an_error_with_its_report(
    server: ScriptedServer, push: RemotePush, folder: Path
) -> None:
    server.state = "rejected"
    with pytest.raises(VersionRejected, match="the adapter: it differs") as refused:
        await push.push(PushRequest(name="voice", folder=folder))
    assert refused.value.check == "probe"


async def test_another_tenants_key_and_wrong_input_send_nothing_else(
    server: ScriptedServer, folder: Path
) -> None:
    transport = httpx.MockTransport(server.respond)
    async with httpx.AsyncClient(transport=transport, base_url="http://far/tenant/v1/") as client:
        push = RemotePush(client, "bolt")
        with pytest.raises(RequestFailed, match="belongs to the tenant harbor, not to bolt"):
            await push.push(PushRequest(name="voice", folder=folder))
        assert server.calls == ["GET me"]
        with pytest.raises(InvalidName):
            await push.push(PushRequest(name="../me", folder=folder))
        (folder / WEIGHTS).unlink()
        with pytest.raises(FolderRejected, match="is missing"):
            await push.push(PushRequest(name="voice", folder=folder))
        with pytest.raises(FolderRejected, match="is not a folder"):
            await push.push(PushRequest(name="voice", folder=folder / CONFIG))
    assert server.calls == ["GET me"]


@pytest.mark.parametrize("url", ["http://far:many", "far", "ftp://far", "http://"])
async def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(SettingsError, match="--url"):
        async with open_remote_push(url, generate_key("live").plaintext, "harbor"):
            pass


@pytest.mark.parametrize("damage", ["\r", " ", "é", "\n"])
async def test_a_damaged_key_is_refused_and_not_quoted(damage: str) -> None:
    key = generate_key("live")
    with pytest.raises(SettingsError, match="--key: an API key looks like") as refused:
        async with open_remote_push("http://far", key.plaintext + damage, "harbor"):
            pass
    assert key.secret not in str(refused.value)


async def test_a_password_in_the_address_is_refused_and_not_quoted() -> None:
    with pytest.raises(SettingsError, match="--url: must contain no user or password") as refused:
        async with open_remote_push("http://ada:hush@far", generate_key("live").plaintext, "harbor"):
            pass
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "is_warned"),
    [
        *(("http://far", True), ("http://192.0.2.1:8000", True), ("https://far", False)),
        *(("http://localhost:8000", False), ("http://127.0.0.1", False), ("http://[::1]", False)),
    ],
)
async def test_a_key_in_clear_text_is_warned_of(
    url: str, is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_remote_push(url, generate_key("live").plaintext, "harbor"):
        pass
    assert ("without TLS" in capsys.readouterr().err) == is_warned


async def test_what_is_no_loraplex_server_is_an_error(
    server: ScriptedServer, push: RemotePush, folder: Path
) -> None:
    pages = [httpx.Response(200, text="<html>"), httpx.Response(200, json=[])]
    server.answer = lambda request: pages.pop()
    while pages:
        with pytest.raises(RequestFailed, match="GET http://far/tenant/v1/me: no response of loraplex"):
            await push.push(PushRequest(name="voice", folder=folder))


async def test_a_profile_is_set_when_the_server_no_longer_changes_the_version(
    server: ScriptedServer, push: RemotePush, folder: Path
) -> None:
    server.state = "validating"

    def answer(request: httpx.Request) -> httpx.Response | None:
        if request.method == "PATCH" and server.state == "validating":
            return httpx.Response(412, json={"error": {"message": "it has changed since it was read"}})
        if server.calls.count("GET adapters/voice/versions/1") == 2:
            server.state = "ready"
        return None

    server.answer = answer
    pushed = await push.push(PushRequest(name="voice", folder=folder, profile=AdapterProfile("hermes")))
    assert pushed.state == "ready" and "PATCH adapters/voice/versions/1" in server.bodies


async def test_rejected_versions_do_not_count_as_the_first(
    server: ScriptedServer, push: RemotePush, folder: Path
) -> None:
    rejected = {"data": [{"version": 1, "state": "rejected"}]}
    server.answer = lambda request: (
        httpx.Response(200, json=rejected) if request.url.path.endswith("voice/versions") else None
    )
    pushed = await push.push(PushRequest(name="voice", folder=folder, promote="first"))
    assert pushed.promoted
