"""Tenants, keys and random adapters of a `LocalServer`, written to its database while it runs.

Invariant: an adapter is a function of model, rank and seed; it covers all seven projections with scale 1 and gives finite logits.
"""

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import UUID

import httpx
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from loraplex.adapters.push import FolderPush, PushRequest
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.local_store import ADAPTERS_FOLDER, LocalAdapterStore
from loraplex.adapters.target_modules import BaseModel, adaptable_modules
from loraplex.adapters.validation.own_files import OwnFilesValidation
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.models.config import ModelConfig
from loraplex.platform.bench.local_server import LocalServer
from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.bench.workload import vocabulary_text
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.platform.server.base_model_file import read_base_model
from loraplex.tenants.actors import command_actor
from loraplex.tenants.administration import tenants
from loraplex.tenants.api_keys import use_cases as api_keys
from loraplex.tenants.api_keys.use_cases import Operator
from loraplex.tenants.database import Database
from loraplex.tenants.default_limits import DefaultLimits
from loraplex.tenants.scopes import INFERENCE, USAGE_READ
from loraplex.tenants.unit_of_work import unit_of_work

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
B_DEVIATION = 0.02
SLOW_PUSH_S = 0.3
NO_LIMITS = DefaultLimits(max_adapter_bytes=1 << 50)
"""A load test stores as many adapters as its disk has room for."""


@dataclass(frozen=True, slots=True)
class BenchTenant:
    """A tenant with its inference key."""

    name: str
    tenant_id: UUID
    api_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class PushTiming:
    """Seconds per registered adapter, without the time to generate its files."""

    names: tuple[str, ...]
    seconds_each: float

    def note(self) -> str:
        slow = f": slower than {SLOW_PUSH_S} s" if self.seconds_each > SLOW_PUSH_S else ""
        return f"registered {len(self.names)} adapters, {self.seconds_each:.3f} s each{slow}"


class BenchFixtures:
    """Creates tenants and adapters in the database of a running `LocalServer`."""

    def __init__(self, database: Database, server: LocalServer) -> None:
        self._database = database
        self._server = server

    async def tenant(self, name: str, weight: float = 1.0) -> BenchTenant:
        async with unit_of_work(self._database, command_actor(), None, None) as uow:
            tenant_id = (await tenants.create(uow, name, weight=weight)).id
            key = await api_keys.create(uow, Operator(tenant_id), "bench", [INFERENCE, USAGE_READ])
        return BenchTenant(name, tenant_id, key.api_key)

    async def push_folders(self, tenant: BenchTenant, folders: Sequence[Path]) -> PushTiming:
        """Register each folder under its name, without a probe."""
        push = self._push()
        began = time.perf_counter()
        for folder in folders:
            await push.push_unprobed(tenant.tenant_id, PushRequest(name=folder.name, folder=folder))
        took = time.perf_counter() - began
        return PushTiming(tuple(folder.name for folder in folders), took / max(len(folders), 1))

    async def push_random(self, tenant: BenchTenant, ranks: Sequence[int], seed: int = 0) -> PushTiming:
        """Register adapters `a000`, `a001` … of these ranks; the draft of each is deleted after its push."""
        model = self.model_config()
        names, seconds = [], 0.0
        with TemporaryDirectory(dir=self._server.data_dir) as draft:
            for index, rank in enumerate(ranks):
                name = adapter_name(index)
                folder = write_random_adapter(Path(draft, name), model, rank, seed + index)
                seconds += (await self.push_folders(tenant, [folder])).seconds_each
                (folder / "adapter_model.safetensors").unlink()
                names.append(name)
        return PushTiming(tuple(names), seconds / max(len(names), 1))

    def model_config(self) -> ModelConfig:
        """The configuration of the served model."""
        return load_model_config(read_base_model(self._server.data_dir).path)

    def _push(self) -> FolderPush:
        facts = read_base_model(self._server.data_dir)
        storage = LocalAdapterStore(self._server.data_dir / ADAPTERS_FOLDER)
        return FolderPush(
            self._database,
            lambda tenant_id: unit_of_work(self._database, command_actor(), tenant_id, None),
            BlobStore(storage, None, facts.digest),
            OwnFilesValidation(BaseModel(adaptable_modules(self.model_config()), facts.digest)),
        )


@asynccontextmanager
async def open_fixtures(server: LocalServer) -> AsyncIterator[BenchFixtures]:
    """Connect to the database that the running server started."""
    async with EmbeddedServices(server.data_dir, transient=True) as services:
        database = Database(services.database_url, pool_size=2, limits=NO_LIMITS)
        try:
            yield BenchFixtures(database, server)
        finally:
            await database.close()


def adapter_name(index: int) -> str:
    return f"a{index:03}"


async def token_pool(base_url: str, api_key: str, model: str) -> list[int]:
    """Token ids of ordinary text, from the server's tokenizer. Raises `BenchFailed`."""
    body = {"model": model, "prompt": vocabulary_text()}
    async with httpx.AsyncClient(base_url=base_url, timeout=60.0) as client:
        headers = {"authorization": f"Bearer {api_key}"}
        response = await client.post("/v1/tokenize", json=body, headers=headers)
    if response.status_code != httpx.codes.OK:
        raise BenchFailed(f"POST /v1/tokenize: HTTP {response.status_code}: {response.text[:500]}")
    tokens: list[int] = response.json()["tokens"]
    return tokens


def write_random_adapter(folder: Path, model: ModelConfig, rank: int, seed: int) -> Path:
    """Write PEFT's two files in float16 to `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.float16]] = {}
    for layer in range(model.num_layers):
        for name, (outputs, inputs) in model.projection_shapes().items():
            block = "self_attn" if name in ATTENTION else "mlp"
            path = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{path}.lora_A.weight"] = _normal(generator, rank, inputs, inputs**-0.5)
            tensors[f"{path}.lora_B.weight"] = _normal(generator, outputs, rank, B_DEVIATION)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(model.projection_shapes()),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapter_parameters(model: ModelConfig, rank: int) -> int:
    """Number of parameters of such an adapter."""
    shapes = model.projection_shapes().values()
    return model.num_layers * rank * sum(outputs + inputs for outputs, inputs in shapes)


def _normal(generator: np.random.Generator, rows: int, columns: int, deviation: float) -> NDArray[np.float16]:
    drawn = generator.standard_normal((rows, columns), dtype=np.float32)
    return (drawn * np.float32(deviation)).astype(np.float16)
