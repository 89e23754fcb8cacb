"""Components of a gateway: compile checks with a real process, and the version lifecycle with real validation."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import select
from tests.adapters.validation.good_folder import HIDDEN, LAYERS, VOCAB, write_good
from tests.adapters.versions.lifecycle_server import begin
from tests.platform.engines.managed_engine import Managed
from tests.tenants.registry_records import RegistryWriter

from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.engine.messages import EngineStats
from loraplex.grammar.builder.output_plan import plan_output
from loraplex.grammar.constraints import OutputConstraints, Regex, SchemaLimits
from loraplex.grammar.errors import GrammarInvalid, GrammarTooCostly
from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.errors import UnsupportedParameter, WorkersUnavailable
from loraplex.platform.inference.structured_output.compile_cache import CompileLimits
from loraplex.platform.inference.structured_output.compile_checks import RecordedCompileChecks
from loraplex.platform.server.components import (
    open_compile_checks,
    open_lifecycle,
    refused_by_engines,
)
from loraplex.platform.workers.pool import WorkerPool
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database
from loraplex.tenants.models import AdapterVersion

SPEC = GrammarSpec(backend="llguidance", source="start: /a/")
TENANT = b"n" * 32


class Recorder:
    def __init__(self) -> None:
        self.results: list[str] = []

    def record_compile_check(self, result: str, seconds: float) -> None:
        assert seconds >= 0
        self.results.append(result)


class Scripted:
    """Compile checks that raise `error`, or hang."""

    def __init__(self, error: Exception | None, hang: bool = False) -> None:
        self._error, self._hang = error, hang

    async def check(self, namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        if self._hang:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, "accepted"),
        (GrammarInvalid("no"), "invalid"),
        (GrammarTooCostly("slow"), "too_costly"),
        (WorkersUnavailable("busy"), "unavailable"),
    ],
)
async def test_every_check_is_recorded_with_its_result(error: Exception | None, result: str) -> None:
    recorder = Recorder()
    checks = RecordedCompileChecks(Scripted(error), recorder)
    if error is None:
        await checks.check(TENANT, SPEC)
    else:
        with pytest.raises(type(error)):
            await checks.check(TENANT, SPEC)
    assert recorder.results == [result]


async def test_a_check_whose_client_disconnects_is_recorded_too() -> None:
    recorder = Recorder()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await RecordedCompileChecks(Scripted(None, hang=True), recorder).check(TENANT, SPEC)
    assert recorder.results == ["abandoned"]


def test_the_queue_timeout_allows_for_the_longest_check() -> None:
    limits = CompileLimits()
    assert 1 <= limits.cpu_s < limits.deadline_s
    assert limits.queue_timeout_s > limits.deadline_s + limits.hang_grace_s


async def never() -> None:
    """The engine does not become ready: the first check starts the process."""
    await asyncio.Event().wait()


async def test_a_model_without_an_end_token_has_no_grammars() -> None:
    recorder = Recorder()
    async with open_compile_checks(WorkerPool(), DEFAULT_INFO, "{}", recorder, never) as checks:
        with pytest.raises(UnsupportedParameter, match="no end token") as refused:
            await checks.check(TENANT, SPEC, param="tools")
    assert refused.value.param == "tools"


async def test_a_real_process_checks_grammars_and_ends_with_the_gateway(chat_tokenizer: Any) -> None:
    recorder = Recorder()
    ends = [chat_tokenizer.eos_token_id]
    info = msgspec.structs.replace(DEFAULT_INFO, vocab_size=512, eos_token_ids=ends)
    tokenizer_json = chat_tokenizer.backend_tokenizer.to_str()
    good, bad = (
        plan_output(OutputConstraints(format=Regex(regex)), ToolStyle.GENERIC, limits=SchemaLimits()).spec
        for regex in ("a+", "(a")
    )
    assert good is not None and bad is not None
    async with (
        WorkerPool() as pool,
        open_compile_checks(pool, info, tokenizer_json, recorder, never) as checks,
    ):
        await checks.check(TENANT, good, param="structured_outputs.regex")
        with pytest.raises(GrammarInvalid) as refused:
            await checks.check(TENANT, bad, param="structured_outputs.regex")
        assert refused.value.param == "structured_outputs.regex"
    with pytest.raises(WorkersUnavailable):
        await checks.check(TENANT, SPEC)
    assert recorder.results == ["accepted", "invalid", "unavailable"]


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


class Store(BlobStore):
    """Adapter storage in a local folder."""

    def __init__(self, storage: LocalAdapterStore) -> None:
        self._storage = storage

    async def store(self, tenant_id: UUID, digest: str, staged: Path) -> Path:
        return self._storage.put(tenant_id, digest, staged)

    async def ensure_stored(self, tenant_id: UUID, digest: str) -> None:
        self._storage.path(tenant_id, digest)


def namespace_of(tenant_id: UUID) -> bytes:
    return tenant_id.bytes * 2


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    async with WorkerPool() as pool:
        yield pool


async def test_an_upload_becomes_ready_and_is_quarantined_with_its_engine(
    database: Database, tmp_path: Path, pool: WorkerPool
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    info = msgspec.structs.replace(DEFAULT_INFO, model_path=str(tmp_path / "model"))
    engine = Managed(FakeScript(info=info))
    engines, root = EnginePool([engine]), tmp_path / "adapters"
    storage = LocalAdapterStore(root)
    async with database.as_operator() as session:
        tenant_id = (await TenantRepository(session).create("acme")).id
        await RegistryWriter(session, tenant_id).get_or_create("voice")
    with storage.staging() as staged:
        pass
    write_good(staged)

    async def version() -> AdapterVersion:
        async with database.as_tenant(tenant_id) as session:
            return (await session.scalars(select(AdapterVersion))).one()

    async with open_lifecycle(
        database, engines, Store(storage), root, namespace_of, pool, "tiny"
    ) as lifecycle:
        await begin(database, lifecycle, tenant_id, "voice", staged)
        await asyncio.wait_for(lifecycle.settled(), 60)
        ready = await version()
        assert ready.state == "ready" and ready.digest is not None
        assert engine.probed[0].namespace == namespace_of(tenant_id)
        assert refused_by_engines(engines) == []
        engine.last_stats = EngineStats(quarantined_adapters=[(namespace_of(tenant_id), ready.digest)])
        await lifecycle.apply_quarantines()
        assert (await version()).state == "quarantined"


async def test_without_the_models_configuration_uploads_wait(
    database: Database, tmp_path: Path, pool: WorkerPool
) -> None:
    engines, root = EnginePool([Managed()]), tmp_path / "adapters"
    async with database.as_operator() as session:
        tenant_id = (await TenantRepository(session).create("acme")).id
        await RegistryWriter(session, tenant_id).get_or_create("voice")
    storage = LocalAdapterStore(root)
    with storage.staging() as staged:
        pass
    write_good(staged)
    async with open_lifecycle(
        database, engines, Store(storage), root, namespace_of, pool, "tiny"
    ) as lifecycle:
        registered = await begin(database, lifecycle, tenant_id, "voice", staged)
        await asyncio.sleep(0.1)
    async with database.as_tenant(tenant_id) as session:
        assert (await session.scalars(select(AdapterVersion.state))).one() == "validating"
    assert (root / ".validating" / registered.id.hex).is_dir(), "for the next server"
