"""The hub's cache, without the network: a cached snapshot is found, a missing one is a clear error."""

from pathlib import Path

import pytest

from loraplex.engine.checkpoints.model_files import download_model
from loraplex.engine.errors import ModelError

COMMIT = "0" * 39 + "1"


def test_cached_snapshot_is_found_by_name_and_by_revision(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    reference = tmp_path / "models--acme--tiny" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text(COMMIT)
    assert download_model("acme/tiny", cache_dir=tmp_path, offline=True) == snapshot
    assert download_model(f"acme/tiny@{COMMIT}", cache_dir=tmp_path, offline=True) == snapshot


def test_missing_snapshot_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"model 'acme/absent': no such folder, and not to be had from the hub"
    ):
        download_model("acme/absent", cache_dir=tmp_path, offline=True)
