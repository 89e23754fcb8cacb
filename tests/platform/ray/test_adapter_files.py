"""A replica reads an adapter's files from its own storage, by tenant and digest, and never at a path that it was given."""

import hashlib
from pathlib import Path

import pytest

from loraplex.adapters.digest import adapter_digest
from loraplex.adapters.errors import BlobMissing
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE
from loraplex.engine.errors import AdapterLoadFailed
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.config import load_settings
from loraplex.platform.datastores.adapter_storage import AdapterStorage
from loraplex.platform.ray.adapter_files import AdapterFiles, read_files
from loraplex.platform.ray.messages import ProbeCall, Submission
from loraplex.tenants.ids import uuid7

MODEL = "0" * 64
CONFIG, WEIGHTS = b"{}", b"weights"
DIGEST = adapter_digest(CONFIG, hashlib.sha256(WEIGHTS).digest(), MODEL)
TENANT = uuid7()


@pytest.fixture
def storage(tmp_path: Path) -> AdapterStorage:
    return AdapterStorage(load_settings({"data_dir": tmp_path / "replica"}), MODEL)


def adapter(blob_path: str = "/etc") -> AdapterRef:
    return AdapterRef(namespace=b"n" * 32, digest=DIGEST, blob_path=blob_path)


def submission(tenant: bool = True) -> Submission:
    request = EngineRequest(
        request_id="r",
        namespace=b"n" * 32,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1),
        adapter=adapter(),
    )
    return Submission(request=request, tenant_id=TENANT if tenant else None)


async def test_the_path_is_that_of_the_replicas_own_storage(storage: AdapterStorage) -> None:
    with storage.local.staging() as staged:
        (staged / CONFIG_FILE).write_bytes(CONFIG)
        (staged / WEIGHTS_FILE).write_bytes(WEIGHTS)
        await storage.adapters.store(TENANT, DIGEST, staged)
    request = await AdapterFiles(storage).localize(submission())
    assert request.adapter == adapter(str(storage.local.path(TENANT, DIGEST)))


async def test_an_adapter_that_is_not_stored_is_not_read_elsewhere(storage: AdapterStorage) -> None:
    files = AdapterFiles(storage)
    with pytest.raises(BlobMissing):
        await files.localize(submission())
    with pytest.raises(AdapterLoadFailed):
        await files.localize(submission(tenant=False))


async def test_a_probe_carries_the_files_of_an_adapter_that_is_not_stored_yet(
    storage: AdapterStorage, tmp_path: Path
) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(CONFIG)
    (tmp_path / WEIGHTS_FILE).write_bytes(WEIGHTS)
    config, weights = read_files(tmp_path)
    call = ProbeCall(adapter=adapter(), config=config)
    async with AdapterFiles(storage).probed(call, weights) as probed:
        folder = Path(probed.blob_path)
        assert folder.is_relative_to(storage.local.root)
        assert read_files(folder) == (CONFIG, WEIGHTS)
    assert not folder.exists()


def test_the_tenant_of_a_folder_is_known_of_stored_adapters_alone(storage: AdapterStorage) -> None:
    root = storage.local.root
    assert storage.local.tenant_of(storage.local.location(TENANT, DIGEST)) == TENANT
    for other in (
        root / ".validating" / "x",
        root / "not-a-tenant" / DIGEST,
        root.parent / str(TENANT) / DIGEST,
    ):
        assert storage.local.tenant_of(other) is None
