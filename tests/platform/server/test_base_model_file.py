"""The base model's facts survive a round trip, and a damaged file is named."""

from pathlib import Path

import pytest

from loraplex.platform.server.base_model_file import BaseModelFacts, read_base_model, write_base_model
from loraplex.platform.startup_errors import DependencyFailed


def test_round_trip(tmp_path: Path) -> None:
    for digest in ("a" * 64, "b" * 64):
        facts = BaseModelFacts(served_name="tiny", path="/models/tiny", digest=digest)
        write_base_model(tmp_path, facts)
        assert read_base_model(tmp_path) == facts
    assert [file.name for file in tmp_path.iterdir()] == ["base_model.json"]


@pytest.mark.parametrize(
    "content", ["", "[]", "null", '{"path": "x"}', '{"served_name": "a", "path": "b", "digest": "c"}']
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "base_model.json").write_text(content)
    with pytest.raises(DependencyFailed, match=r"base_model.json is damaged"):
        read_base_model(tmp_path)


def test_the_error_for_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DependencyFailed, match=r"base_model.json is missing: run `loraplex serve` once"):
        read_base_model(tmp_path)
