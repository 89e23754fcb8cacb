"""The demo model, fetched once into the checkout's test cache, and what pushes the demo's adapters."""

from pathlib import Path

import pytest

from loraplex.adapters.push import FolderPush
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.adapters.target_modules import BaseModel, adaptable_modules
from loraplex.adapters.validation.own_files import OwnFilesValidation
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.platform.demo.model import ensure_demo_model
from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.unit_of_work import unit_of_work

CACHE = Path(__file__).resolve().parents[3] / ".loraplex-test"
BASE_DIGEST = "b" * 64


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ensure_demo_model(CACHE)


@pytest.fixture
def push(database: Database, demo_model: Path, tmp_path: Path) -> FolderPush:
    storage = LocalAdapterStore(tmp_path / "adapters")
    modules = adaptable_modules(load_model_config(str(demo_model)))
    return FolderPush(
        database,
        lambda tenant_id: unit_of_work(database, system_actor("demo"), tenant_id, None),
        BlobStore(storage, None, BASE_DIGEST),
        OwnFilesValidation(BaseModel(modules, BASE_DIGEST)),
    )
