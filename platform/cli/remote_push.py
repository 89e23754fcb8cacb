"""`loraplex adapter push --url URL`: uploads a folder in parts to a server elsewhere, over its tenant API.

Invariant: every request may be repeated; an upload that fails is aborted, so no version is left of it.
"""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx

from loraplex.adapters.errors import FolderRejected
from loraplex.adapters.limits import DEFAULT_LIMITS
from loraplex.adapters.push import VALIDATING, PushedVersion, PushRequest, rejection, report_of
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE, max_file_bytes
from loraplex.adapters.storage.safe_files import OpenFile, hash_descriptor, open_regular, read_exactly
from loraplex.adapters.storage.threads import on_thread
from loraplex.platform.cli.remote_server import open_server, problem_of
from loraplex.platform.processes.progress import SILENT, Progress
from loraplex.platform.startup_errors import RequestFailed
from loraplex.tenants.names import check_adapter_name
from loraplex.tenants.registry.records import SERVING_STATES
from loraplex.tenants.registry.resolution import PRODUCTION

ATTEMPTS: Final = 5
POLL_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0
VALIDATION: Final = "validating and probing"
BUSY: Final = frozenset({429, 502, 503, 504})
MAX_BYTES: Final = max_file_bytes(DEFAULT_LIMITS)


class RemotePush:
    """Pushes with a key of the tenant `tenant`, which may write its adapters."""

    def __init__(self, http: httpx.AsyncClient, tenant: str, progress: Progress = SILENT) -> None:
        self._http = http
        self._tenant = tenant
        self._progress = progress

    async def push(self, request: PushRequest) -> PushedVersion:
        """Upload the folder, and wait until the server has validated and probed it.

        Raises `RequestFailed`, `InvalidName`, `FolderRejected`, `VersionRejected`.
        """
        name = check_adapter_name(request.name)
        files = await on_thread(_declared, request.folder)
        await self._require_tenant()
        is_first = await self._ensure_adapter(name)
        async with self._upload(name, files) as upload:
            sent, total = 0, sum(file["size"] for file in files)
            self._progress(stage := f"uploading {name}: {total:,} bytes")
            for file in files:
                async for size in self._send_parts(upload, request.folder / file["name"]):
                    sent += size
                    self._progress(stage, sent / total)
            path = f"uploads/{upload['id']}/complete"
            number = int((await self._send("POST", path, expected=202)).json()["version"])
        self._progress(VALIDATION)
        version = await self._result(name, number)
        if request.profile is not None:
            # After the result: until then the server's own changes move the revision.
            await self._set_profile(number, request)
        promoted = request.promotes(is_first)
        if promoted:
            await self._promote(name, number)
        return PushedVersion(
            name=name,
            version=number,
            state=version["state"],
            digest=version["digest"],
            size_bytes=version["size_bytes"],
            rank=version["rank"],
            promoted=promoted,
            report=report_of(version["report"]["checks"]),
        )

    async def _require_tenant(self) -> None:
        response = await self._send("GET", "me")
        try:
            found = response.json()["tenant"]["name"]
        except (ValueError, KeyError, TypeError) as error:
            raise RequestFailed(f"GET {response.url}: no response of loraplex; check --url") from error
        if found != self._tenant:
            raise RequestFailed(f"the key belongs to the tenant {found}, not to {self._tenant}")

    async def _ensure_adapter(self, name: str) -> bool:
        """Create the adapter unless it exists; return whether it has no version yet that could be served."""
        response = await self._send("GET", f"adapters/{name}/versions?limit=100", expected=(200, 404))
        if response.status_code == httpx.codes.OK:
            return all(version["state"] not in SERVING_STATES for version in response.json()["data"])
        await self._send("POST", "adapters", expected=201, json={"name": name})
        return True

    @asynccontextmanager
    async def _upload(self, name: str, files: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        body = {"files": files}
        upload: dict[str, Any] = (
            await self._send("POST", f"adapters/{name}/uploads", expected=201, json=body)
        ).json()
        try:
            yield upload
        except BaseException:
            with suppress(RequestFailed):
                await asyncio.shield(self._send("DELETE", f"uploads/{upload['id']}", expected=204))
            raise

    async def _send_parts(self, upload: dict[str, Any], path: Path) -> AsyncIterator[int]:
        """Send a file, and yield the size of each part that has arrived."""
        part_size = upload["part_size"]
        with _opened(path) as (descriptor, size):
            for number, offset in enumerate(range(0, size, part_size), 1):
                part = await on_thread(read_exactly, descriptor, min(part_size, size - offset), offset)
                digest = base64.b64encode(hashlib.sha256(part).digest()).decode()
                await self._send(
                    "PUT",
                    f"uploads/{upload['id']}/{path.name}/parts/{number}",
                    content=part,
                    headers={"content-digest": f"sha-256=:{digest}:"},
                )
                yield len(part)

    async def _set_profile(self, number: int, request: PushRequest) -> None:
        path = f"adapters/{request.name}/versions/{number}"
        seen, change = await self._send("GET", path), request.profile_change()
        # An uploaded version has none, and a server of the release before refuses the field.
        if change["decision"] is None:
            del change["decision"]
        await self._send("PATCH", path, json=change, headers=_if_match(seen))

    async def _result(self, name: str, number: int) -> dict[str, Any]:
        while True:
            version: dict[str, Any] = (await self._send("GET", f"adapters/{name}/versions/{number}")).json()
            if version["state"] == "rejected":
                raise rejection(report_of(version["report"]["checks"]))
            if version["state"] != VALIDATING:
                return version
            await asyncio.sleep(POLL_S)

    async def _promote(self, name: str, number: int) -> None:
        path = f"adapters/{name}/aliases/{PRODUCTION}"
        seen = await self._send("GET", path, expected=(200, 404))
        headers = _if_match(seen) if seen.status_code == httpx.codes.OK else {"if-none-match": "*"}
        await self._send("PUT", path, expected=(200, 201), json={"version": number}, headers=headers)

    async def _send(
        self,
        method: str,
        path: str,
        *,
        expected: int | tuple[int, ...] = 200,
        headers: dict[str, str] | None = None,
        **content: Any,
    ) -> httpx.Response:
        """Send a request, again while the server is busy or unreachable. Raises `RequestFailed`."""
        headers = {"idempotency-key": uuid4().hex} | (headers or {})
        allowed = (expected,) if isinstance(expected, int) else expected
        problem = ""
        for attempt in range(ATTEMPTS):
            try:
                response = await self._http.request(method, path, headers=headers, **content)
            except httpx.TransportError as error:
                problem, pause_s = f"{type(error).__name__}: {error}", 2.0**attempt
            else:
                if response.status_code in allowed:
                    return response
                problem = problem_of(response)
                if response.status_code not in BUSY:
                    break
                pause_s = _retry_after(response, 2.0**attempt)
            if attempt + 1 < ATTEMPTS:
                await asyncio.sleep(min(pause_s, MAX_PAUSE_S))
        raise RequestFailed(f"{method} {self._http.base_url}{path}: {problem}")


@asynccontextmanager
async def open_remote_push(
    url: str, key: str, tenant: str, progress: Progress = SILENT
) -> AsyncIterator[RemotePush]:
    """Open a client of the server at `url`. Raises `SettingsError` for an address or a key that is none."""
    async with open_server(url, key, "tenant/v1") as client:
        yield RemotePush(client, tenant, progress)


def _declared(folder: Path) -> list[dict[str, Any]]:
    """Return name, size and hash of the two files. Raises `FolderRejected`."""
    if not folder.is_dir():
        raise FolderRejected(folder.name, f"is not a folder of {CONFIG_FILE} and {WEIGHTS_FILE}")
    return [_declared_file(folder / name) for name in MAX_BYTES]


def _declared_file(path: Path) -> dict[str, Any]:
    with _opened(path) as (descriptor, size):
        return {"name": path.name, "size": size, "sha256": hash_descriptor(descriptor, size).hex()}


@contextmanager
def _opened(path: Path) -> Iterator[OpenFile]:
    """Open one of the two files. Raises `FolderRejected`, also when the file shrinks meanwhile."""
    try:
        with open_regular(path, max_bytes=MAX_BYTES[path.name]) as file:
            yield file
    except EOFError as error:
        raise FolderRejected(path.name, "changed while it was read") from error


def _if_match(seen: httpx.Response) -> dict[str, str]:
    return {"if-match": seen.headers["etag"]}


def _retry_after(response: httpx.Response, default_s: float) -> float:
    given = response.headers.get("retry-after", "")
    return float(given) if given.isdecimal() else default_s
