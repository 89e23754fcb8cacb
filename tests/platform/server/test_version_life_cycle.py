"""The life cycle as a gateway opens it: with real validation, and without a model whose configuration can be read."""

import asyncio
import json
from pathlib import Path
from uuid import UUID

import msgspec
from sqlalchemy import select
from tests.adapters.validation.good_folder import HIDDEN, LAYERS, VOCAB, write_good
from tests.platform.engines.managed_engine import Managed

from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.server.components import open_life_cycle, refused_by_engines
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database
from loraplex.tenants.models import AdapterVersion
from loraplex.tenants.registry.adapters import AdapterRepository

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


class Store:
    """The local folder."""

    def __init__(self, storage: LocalAdapterStore) -> None:
        self._storage = storage

    async def store(self, tenant_id: UUID, digest: str, staged: Path) -> Path:
        return self._storage.put(tenant_id, digest, staged)

    async def ensure_stored(self, tenant_id: UUID, digest: str) -> None:
        self._storage.path(tenant_id, digest)


def namespace_of(tenant_id: UUID) -> bytes:
    return tenant_id.bytes * 2


async def test_an_upload_becomes_ready_and_is_quarantined_with_its_engine(
    database: Database, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    info = msgspec.structs.replace(DEFAULT_INFO, model_path=str(tmp_path / "model"))
    engine = Managed(FakeScript(info=info))
    engines, root = EnginePool([engine]), tmp_path / "adapters"
    storage = LocalAdapterStore(root)
    async with database.as_operator() as session:
        tenant_id = (await TenantRepository(session).create("acme")).id
        await AdapterRepository(session, tenant_id).get_or_create("voice")
    with storage.staging() as staged:
        pass
    write_good(staged)

    async def version() -> AdapterVersion:
        async with database.as_tenant(tenant_id) as session:
            return (await session.scalars(select(AdapterVersion))).one()

    async with open_life_cycle(database, engines, Store(storage), root, namespace_of) as life_cycle:
        await life_cycle.begin(tenant_id, "voice", staged)
        await asyncio.wait_for(life_cycle.settled(), 60)
        ready = await version()
        assert ready.state == "ready" and ready.digest is not None
        assert engine.probed[0].namespace == namespace_of(tenant_id)
        assert refused_by_engines(engines) == []
        engine.last_stats = EngineStats(quarantined_adapters=[(namespace_of(tenant_id), ready.digest)])
        await life_cycle.apply_quarantines()
        assert (await version()).state == "quarantined"


async def test_without_the_models_configuration_uploads_wait(database: Database, tmp_path: Path) -> None:
    engines, root = EnginePool([Managed()]), tmp_path / "adapters"
    async with database.as_operator() as session:
        tenant_id = (await TenantRepository(session).create("acme")).id
        await AdapterRepository(session, tenant_id).get_or_create("voice")
    storage = LocalAdapterStore(root)
    with storage.staging() as staged:
        pass
    write_good(staged)
    async with open_life_cycle(database, engines, Store(storage), root, namespace_of) as life_cycle:
        begun = await life_cycle.begin(tenant_id, "voice", staged)
        await asyncio.sleep(0.1)
    async with database.as_tenant(tenant_id) as session:
        assert (await session.scalars(select(AdapterVersion.state))).one() == "validating"
    assert (root / ".validating" / begun.id.hex).is_dir(), "for the next server"
