"""One side of a release check: a model folder with settings, which a server of its own serves, or a server that runs.

Invariant: a folder's server has a temporary data directory, and sees no setting and no store of the user.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx

from loraplex.adapters.errors import AdapterRejected
from loraplex.engine.checkpoints.model_files import locate_model
from loraplex.platform import demo
from loraplex.platform.bench.fixtures import open_fixtures
from loraplex.platform.bench.local_server import run_local_server
from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.config import Settings, load_settings
from loraplex.platform.demo.model import ensure_demo_model
from loraplex.platform.startup_errors import SettingsError

DEMO: Final = "demo"
BASE: Final = "base"
SHORT_NAMES: Final = {"kv": "kv_cache_dtype"}
HTTP_S: Final = 120.0
MAX_KEY_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class ReleaseSpec:
    """`place` is a folder, `demo` or a URL. `template` and `adapters` are of a folder, `key_file` is of a URL."""

    place: str
    settings: Mapping[str, str]
    template: Path | None = None
    adapters: Path | None = None
    key_file: Path | None = None

    @property
    def model(self) -> str:
        """The folder or file of the model. Raises `ModelError` or `StartError`."""
        return str(
            ensure_demo_model(load_settings().data_dir) if self.place == DEMO else locate_model(self.place)
        )

    def adapter_folders(self) -> list[Path]:
        """The folders of the adapters by name; the demo's own unless `adapters` is given."""
        folder = self.adapters
        if folder is None and self.place == DEMO:
            folder = Path(demo.__file__).parent / "adapters"
        return [] if folder is None else sorted(each for each in folder.iterdir() if each.is_dir())


def parse_spec(text: str) -> ReleaseSpec:
    """Parse `PATH,quantization=int4,kv=fp8,template=FILE,adapters=DIR` or `URL,key-file=FILE`. Raises `SettingsError`."""
    place, *pairs = text.split(",")
    is_url = place.startswith(("http://", "https://"))
    paths: dict[str, Path] = {}
    settings: dict[str, str] = {}
    for name, equals, value in (pair.partition("=") for pair in pairs):
        name = SHORT_NAMES.get(name, name.lower())
        if name in (("key-file",) if is_url else ("template", "adapters")) and equals:
            paths[name.replace("-", "_")] = _existing(text, Path(value), is_dir=name == "adapters")
        elif not is_url and equals and name in Settings.model_fields:
            settings[name] = value
        else:
            allowed = (
                "key-file=FILE" if is_url else "template=FILE, adapters=DIR and SETTING=VALUE of the server"
            )
            raise SettingsError(f"{text}: {name!r}: allowed is {allowed}")
    if not place or is_url != ("key_file" in paths):
        raise SettingsError(f"{text}: allowed is a model's folder, `{DEMO}`, or URL,key-file=FILE")
    return ReleaseSpec(place, settings, **paths)


def _existing(text: str, path: Path, *, is_dir: bool) -> Path:
    if not (path.is_dir() if is_dir else path.is_file()):
        raise SettingsError(f"{text}: {path} is no {'folder' if is_dir else 'file'}")
    return path.absolute()


@dataclass(frozen=True, slots=True)
class Release:
    """A served release. `models`: names in requests, of the base model by `BASE` and of adapters by their own.

    `refused`: why an adapter is not served. `plan`: the worksheet of `loraplex plan`; None for a server that ran before.
    """

    base_url: str
    api_key: str = field(repr=False)
    models: Mapping[str, str]
    refused: Mapping[str, str]
    plan: Mapping[str, Any] | None

    def client(self) -> httpx.AsyncClient:
        """A client of `/v1`."""
        return _client(self.base_url, self.api_key)


def _client(base_url: str, api_key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {api_key}"}
    return httpx.AsyncClient(base_url=f"{base_url}/v1/", headers=headers, timeout=HTTP_S)


@asynccontextmanager
async def open_release(spec: ReleaseSpec) -> AsyncIterator[Release]:
    """Serve a release while it is checked. Raises `StartError`, `ModelError`."""
    if spec.key_file is not None:
        with spec.key_file.open() as file:
            key = file.read(MAX_KEY_BYTES).strip()
        url = spec.place.rstrip("/")
        yield Release(url, key, await _models(url, key), {}, None)
        return
    with TemporaryDirectory(prefix="loraplex-release-") as folder:
        model = (
            spec.model if spec.template is None else _with_template(Path(spec.model), spec.template, folder)
        )
        async with run_local_server(model, spec.settings) as server:
            refused: dict[str, str] = {}
            async with open_fixtures(server) as fixtures:
                tenant = await fixtures.tenant("release")
                for adapter in spec.adapter_folders():
                    try:
                        await fixtures.push_folders(tenant, [adapter])
                    except AdapterRejected as error:
                        refused[adapter.name] = str(error)
            url, key = server.base_url, tenant.api_key
            yield Release(url, key, await _models(url, key), refused, await server.plan())


def _with_template(model: Path, template: Path, folder: str) -> str:
    """A folder of links to the model's files, with another chat template."""
    if not model.is_dir():
        raise SettingsError(f"template={template}: {model} is no folder, and its template is within the file")
    for file in model.iterdir():
        Path(folder, file.name).symlink_to(file.resolve())
    own = Path(folder, "chat_template.jinja")
    own.unlink(missing_ok=True)
    own.write_bytes(template.read_bytes())
    return folder


async def _models(base_url: str, api_key: str) -> dict[str, str]:
    """Raises `BenchFailed`."""
    async with _client(base_url, api_key) as client:
        response = await client.get("models")
    if response.status_code != httpx.codes.OK:
        raise BenchFailed(f"GET {base_url}/v1/models: HTTP {response.status_code}: {response.text[:500]}")
    return {card["id"] if card["parent"] else BASE: card["id"] for card in response.json()["data"]}
