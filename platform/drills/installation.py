"""The running installation that a drill is for: addresses of its stores and gateways, and its processes on this machine.

Invariant: it starts nothing and joins nothing. What does not run is an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import psutil

from loraplex.platform.bench.local_server import HTTP_S, is_ready
from loraplex.platform.config import Settings
from loraplex.platform.datastores.embedded.lock import ConnectionFacts, OwnerLock
from loraplex.platform.datastores.embedded.servers import SERVICES_FOLDER
from loraplex.platform.datastores.installation import require_installation
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.engines import process, wire
from loraplex.platform.engines.attached_engines import existing
from loraplex.platform.server.gateway_address import running_gateways
from loraplex.tenants.ledger.journal.folder import JOURNAL_FOLDER

LOCK_SUFFIX: Final = ".lock"


@dataclass(frozen=True, slots=True)
class Installation:
    """Where the parts of a running installation are. `settings` are those that this command reads, as a gateway does."""

    settings: Settings = field(repr=False)
    database_url: str = field(repr=False)
    redis_url: str = field(repr=False)
    base_urls: tuple[str, ...]

    @property
    def data_dir(self) -> Path:
        return self.settings.data_dir.absolute()

    def gateways(self) -> list[psutil.Process]:
        """The gateways of the data directory on this machine, by process id: each has the lock of its journal open."""
        folder = self.data_dir / JOURNAL_FOLDER
        return [each for each in psutil.process_iter() if any(_locks_in(each, folder))]

    def engines(self) -> list[psutil.Process]:
        """The engine processes: children of the gateways, and those that listen at the addresses of `settings.engine`."""
        children = [child for gateway in self.gateways() for child in gateway.children()]
        addresses = [each for each in self.settings.engine if each.startswith(wire.SCHEME)]
        sockets = {str(wire.socket_path(address)) for address in existing(addresses)}
        listening = {
            each.pid
            for each in psutil.net_connections("unix")
            if sockets and each.laddr in sockets and each.pid
        }
        found = [each for each in children if _is_engine(each)]
        return found + [psutil.Process(pid) for pid in sorted(listening)]

    async def base_model(self, api_key: str) -> str:
        """The name of the base model: the only one that a tenant without adapters has. Raises `DrillImpossible`."""
        headers = {"authorization": f"Bearer {api_key}"}
        try:
            async with httpx.AsyncClient(base_url=self.base_urls[0], timeout=HTTP_S) as client:
                response = await client.get("/v1/models", headers=headers)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise DrillImpossible(f"{self.base_urls[0]}/v1/models: {error}") from error
        return str(response.json()["data"][0]["id"])


async def find_installation(settings: Settings, base_urls: Sequence[str]) -> Installation:
    """Find the stores, and check that each gateway is ready. Without `base_urls`, they are those that run on the data directory.

    Raises `DrillImpossible`, `DependencyFailed`.
    """
    require_installation(settings, files=True)
    facts = None
    if settings.database_url is None or settings.redis_url is None:
        facts = _embedded(settings.data_dir)
    database, valkey = settings.database_url, settings.redis_url
    installation = Installation(
        settings,
        facts.database_url if database is None and facts else database.get_secret_value() if database else "",
        facts.redis_url if valkey is None and facts else valkey.get_secret_value() if valkey else "",
        tuple(base_urls) or tuple(each.base_url for each in running_gateways(settings.data_dir)),
    )
    if not installation.base_urls:
        raise DrillImpossible(f"no gateway runs on {settings.data_dir}: name each of them with --base-url")
    for base_url in installation.base_urls:
        if not await is_ready(base_url):
            raise DrillImpossible(f"{base_url} is not ready: name each running gateway with --base-url")
    return installation


def _embedded(data_dir: Path) -> ConnectionFacts:
    facts = OwnerLock(data_dir.absolute() / SERVICES_FOLDER).facts()
    if facts is None or facts.transient:
        raise DrillImpossible(f"no server runs on the data directory {data_dir.absolute()}")
    return facts


def _locks_in(candidate: psutil.Process, folder: Path) -> Iterator[bool]:
    try:
        paths = [Path(each.path) for each in candidate.open_files()]
    except psutil.Error:
        # Another user's process, or one that has just ended.
        return
    yield from (True for path in paths if path.parent == folder and path.suffix == LOCK_SUFFIX)


def _is_engine(candidate: psutil.Process) -> bool:
    try:
        return process.MODULE in candidate.cmdline()
    except psutil.Error:
        return False


def is_alive(candidate: psutil.Process) -> bool:
    """Whether the process runs: neither ended, nor ended and not yet collected by its parent."""
    try:
        return bool(candidate.is_running() and candidate.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
