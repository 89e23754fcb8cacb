"""`loraplex doctor`: checks whether this machine can serve. Exit code 1 when something it needs is missing.

Invariant: a check reports; it never raises, and changes nothing but folders it is about to use.
"""

import asyncio
import importlib.metadata
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from uuid import UUID

import psutil
import psycopg
import typer
from rich.markup import escape

from loraplex.adapters.errors import AdaptersError
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE
from loraplex.adapters.target_modules import BaseModel
from loraplex.adapters.validation.result import Rejected, ValidationResult
from loraplex.platform.cli.command_context import DataDir, exit_codes
from loraplex.platform.cli.output import AsJson, print_for_people, table_of
from loraplex.platform.config import Settings, load_settings
from loraplex.platform.datastores.embedded.binaries import find_postgres, find_valkey
from loraplex.platform.datastores.embedded.errors import EmbeddedError
from loraplex.platform.datastores.embedded.identity import choose_identity
from loraplex.platform.datastores.migrations import current_revision, newest_revision, remedy
from loraplex.platform.server.adapter_validation import AdapterValidation
from loraplex.platform.server.certificate import read_certificate
from loraplex.platform.startup_errors import SettingsError
from loraplex.platform.workers.pool import WorkerPool
from loraplex.tenants.database import parse_database_url
from loraplex.tenants.errors import TenantsError
from loraplex.tenants.ledger.journal.file import MIN_FREE_BYTES
from loraplex.tenants.valkey import open_valkey, ping

GIB = 1 << 30
MIN_MEMORY_BYTES = GIB
GOOD_MEMORY_BYTES = 4 * GIB
MIN_DISK_BYTES = GIB
GOOD_DISK_BYTES = 10 * GIB
OLDEST_POSTGRES = 14
CONNECT_SECONDS = 5
NO_TENANT = UUID(int=0)

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """One finding; `failed` means that loraplex cannot serve here."""

    name: str
    status: Status
    detail: str


def check_python(settings: Settings) -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok" if sys.version_info >= (3, 11) else "failed", f"{version} (3.11 or newer)")


def check_torch(settings: Settings) -> Check:
    try:
        return Check("torch", "ok", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", "failed", "not installed")


def check_gpu(settings: Settings) -> Check:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Check("gpu", "ok", ", ".join(names))
    status: Status = "failed" if settings.device == "cuda" else "ok"
    return Check("gpu", status, "no CUDA device: the CPU path is used")


def check_triton(settings: Settings) -> Check:
    import torch

    try:
        return Check("triton", "ok", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        status: Status = "failed" if torch.cuda.is_available() else "ok"
        return Check("triton", status, "not installed: needed on a GPU only (pip install 'loraplex[cuda]')")


def check_cpu(settings: Settings) -> Check:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    status: Status = "warning" if capability in ("DEFAULT", "NO AVX") else "ok"
    return Check("cpu", status, f"{os.cpu_count()} cores, {capability}")


def check_memory(settings: Settings) -> Check:
    free = psutil.virtual_memory().available
    return Check(
        "memory", grade(free, MIN_MEMORY_BYTES, GOOD_MEMORY_BYTES), f"{free / GIB:.1f} GiB available"
    )


def check_disk(settings: Settings) -> Check:
    free = shutil.disk_usage(existing_parent(settings.data_dir)).free
    floors = {"requests": MIN_FREE_BYTES, "uploads": settings.storage_floor_bytes}
    refused = [
        f"{name} are refused below {floor / GIB:g} GiB" for name, floor in floors.items() if free < floor
    ]
    status = grade(free, MIN_DISK_BYTES, max(GOOD_DISK_BYTES, settings.storage_floor_bytes))
    return Check("disk", status, "; ".join([f"{free / GIB:.1f} GiB free", *refused]))


def check_data_dir(settings: Settings) -> Check:
    folder = settings.data_dir
    target = existing_parent(folder)
    if not target.is_dir():
        return Check("data directory", "failed", f"{target} is not a directory")
    if not os.access(target, os.W_OK | os.X_OK):
        return Check("data directory", "failed", f"{target} is not writable")
    if folder.exists() and stat.S_IMODE(folder.stat().st_mode) & 0o022:
        return Check("data directory", "warning", f"{folder} can be written by others: chmod 700")
    return Check("data directory", "ok", str(folder) if folder.exists() else f"{folder} will be created")


def check_network(settings: Settings) -> Check:
    try:
        read_certificate(settings)
    except SettingsError as error:
        return Check("network", "failed", str(error))
    if settings.exposures:
        return Check("network", "warning", f"{settings.host}: {'; '.join(settings.exposures)}")
    return Check("network", "ok", f"{settings.host}, port {settings.port}, {settings.scheme}")


def check_postgres(settings: Settings) -> Check:
    name = "postgresql"
    if settings.database_url is None:
        return check_embedded(name, lambda: f"embedded {find_postgres().major}{run_as(settings)}")
    try:
        return Check(name, *inspect_database(settings.database_url.get_secret_value()))
    except (psycopg.Error, TenantsError) as error:
        return Check(name, "failed", first_line(error))


def check_valkey(settings: Settings) -> Check:
    name = "valkey"
    if settings.redis_url is None:
        return check_embedded(name, lambda: f"embedded, {find_valkey().name}")
    try:
        asyncio.run(ping_once(settings.redis_url.get_secret_value()))
    except TenantsError as error:
        return Check(name, "failed", first_line(error))
    return Check(name, "ok", "REDIS_URL responds")


def check_uploads(settings: Settings) -> Check:
    """Start a sandboxed process as for an upload, and let it reject an empty configuration."""
    try:
        result = asyncio.run(validate_empty_upload())
    except AdaptersError as error:
        return Check("uploads", "warning", f"{error}: no adapter can be added")
    confined = isinstance(result, Rejected) and result.check == "manifest"
    if not confined:
        return Check("uploads", "warning", "the process that validates uploads does not work here")
    return Check("uploads", "ok", "validated by processes without network")


async def validate_empty_upload() -> ValidationResult:
    """Validate two empty files as a gateway does. Raises `ValidationUnavailable`."""
    with TemporaryDirectory() as folder:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            (Path(folder) / name).touch()
        async with WorkerPool() as pool:
            return await AdapterValidation(pool, BaseModel({}, "")).validate(NO_TENANT, Path(folder))


CHECKS: tuple[Callable[[Settings], Check], ...] = (
    *(check_python, check_torch, check_triton, check_gpu, check_cpu, check_memory),
    *(check_data_dir, check_disk, check_network, check_postgres, check_valkey, check_uploads),
)


def check_embedded(name: str, describe: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", describe())
    except EmbeddedError as error:
        return Check(name, "failed", str(error))


def run_as(settings: Settings) -> str:
    identity = choose_identity(settings.data_dir / "embedded" / "postgres")
    return f", run as uid {identity.uid}" if identity.dropped else ""


def inspect_database(url: str) -> tuple[Status, str]:
    plain = parse_database_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, connect_timeout=CONNECT_SECONDS) as connection:
        version = connection.info.server_version // 10_000
    if version < OLDEST_POSTGRES:
        return "failed", f"PostgreSQL {version} is too old: {OLDEST_POSTGRES} or newer"
    current, newest = current_revision(url), newest_revision()
    if current != newest:
        return (
            "warning",
            f"PostgreSQL {version}; schema {current or 'none'}, needs {newest}: {remedy(current)}",
        )
    return "ok", f"PostgreSQL {version}, schema {current}"


async def ping_once(url: str) -> None:
    client = open_valkey(url)
    try:
        await ping(client)
    finally:
        await client.aclose()


def grade(amount: int, least: int, good: int) -> Status:
    return "failed" if amount < least else "warning" if amount < good else "ok"


def existing_parent(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


app = typer.Typer(add_completion=False)


@app.command()
def doctor(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Check this machine: Python, torch, GPU, memory, disk, data directory, PostgreSQL, Valkey and the validation of uploads."""
    with exit_codes():
        settings = load_settings({"data_dir": data_dir})
    checks = [check(settings) for check in CHECKS]
    print_checks(checks, as_json)
    if any(check.status == "failed" for check in checks):
        raise typer.Exit(1)


def print_checks(checks: list[Check], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks]))
        return
    table = table_of("check", "status", "detail")
    for check in checks:
        table.add_row(check.name, f"[{COLOURS[check.status]}]{check.status}[/]", escape(check.detail))
    print_for_people(table)
