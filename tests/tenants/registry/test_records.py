"""Records of the registry: what an alias leads to, and what its rollback would."""

from datetime import UTC, datetime

import pytest

from loraplex.tenants.models import AdapterAlias
from loraplex.tenants.registry.records import AliasDocument


@pytest.mark.parametrize(
    ("targets", "version", "main"),
    [({3: 100}, 3, 3), ({2: 90, 1: 10}, None, 2), ({2: 50, 1: 50}, None, 2)],
)
def test_an_alias_names_its_version_or_the_shares_of_several(
    targets: dict[int, int], version: int | None, main: int
) -> None:
    moved = datetime(2026, 1, 2, tzinfo=UTC)
    row = AdapterAlias(alias="production", generation=4, updated_at=moved)
    alias = AliasDocument.of("pirate", row, targets, None)
    assert (alias.version, alias.main_version, alias.revision) == (version, main, 4)
    assert alias.targets == targets and [*alias.targets] == sorted(targets)
    assert alias.previous is None and alias.previous_targets == {}
    back = AliasDocument.of("pirate", row, {1: 100}, targets)
    assert back.previous_targets == targets
    assert AliasDocument.model_validate_json(back.model_dump_json()) == back
