"""A version that is released after 0022 leaves gateways of the release before it working: it adds, and changes nothing they use."""

import re
from typing import Any, Final

import pytest
from sqlalchemy import Engine, event

from loraplex.platform.datastores.migrations import upgrade

RELEASED: Final = "0022"
"""The newest version of the release whose gateways run while later versions are applied."""
REASONS: Final[dict[str, str]] = {
    "ALTER TABLE usage_records DROP CONSTRAINT ck_usage_records_outcome": "a wider one replaces it at once",
    "DROP TRIGGER bump_revision ON quotas": "it is made again in the same transaction",
    "CREATE TRIGGER bump_revision BEFORE UPDATE OF": "it minds one more column, which the release before never changes",
    "CREATE TRIGGER unknown_parameters_": "it minds a column that the release before never changes",
    "CREATE TRIGGER reasoning_style_": "it minds a column that the release before never changes",
    "CREATE CONSTRAINT TRIGGER reasoning_style_": "it minds a column that the release before never changes",
    "CREATE POLICY owner_": "it lets the owner do more, and nobody else",
    "UPDATE api_keys k SET parent_id": "the release before does not know this column",
    "WITH RECURSIVE tree": "it sets a column that the release before does not know, and raises fences as a rebuild does",
    "CREATE TRIGGER move_limit_roots": "it sets a column that the release before does not know",
    "CREATE TRIGGER move_rotated_root": "it sets columns that the release before does not know",
    "CREATE TRIGGER take_limit_root": "it sets columns that the release before does not know",
    "ALTER TABLE meter_exports DROP CONSTRAINT ck_meter_exports_meter": "a wider one replaces it at once",
    "CREATE OR REPLACE FUNCTION add_to_monthly_rollups": "it adds one more column, which has a default",
    "DO $$ DECLARE body text; BEGIN FOR body IN SELECT pg_get_functiondef": "it minds one more column of quotas",
    "ALTER TABLE webhook_endpoints DROP CONSTRAINT ck_webhook_endpoints_events": "a wider one replaces it at once",
    "ALTER TABLE outbox_events DROP CONSTRAINT ck_outbox_events_type": "a wider one replaces it at once",
    "CREATE TRIGGER decision_": "it minds a column that the release before never changes",
    "CREATE CONSTRAINT TRIGGER decision_": "it minds a column that the release before never changes",
    "CREATE CONSTRAINT TRIGGER bump_policy_epoch AFTER INSERT OR UPDATE ON decision_": "of a table of its own",
    "DROP TRIGGER move_limit_roots": "they are made again in the same transaction",
}
"""Statements that do more than add, by their beginning: why the release before is not affected."""
HARMLESS: Final = re.compile(
    r"SELECT |SET |GRANT |COMMENT |CREATE FUNCTION |CREATE TABLE |CREATE INDEX |CREATE TYPE "
    r"|(INSERT INTO|UPDATE) alembic_version",
    re.IGNORECASE,
)
NEW_TABLE: Final = re.compile(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+)", re.IGNORECASE)
TABLE: Final = re.compile(r"(?:ALTER TABLE|\bON|INSERT INTO|UPDATE)\s+(?:ONLY )?(\w+)", re.IGNORECASE)
NEW_COLUMN: Final = re.compile(
    r"ALTER TABLE \w+ ADD COLUMN (?!.*NOT NULL)|ALTER TABLE \w+ ADD COLUMN .*DEFAULT", re.IGNORECASE
)


def breaking(statements: list[str]) -> list[str]:
    """The statements that may affect a release that does not know of them."""
    created: set[str] = set()
    found = []
    for statement in (" ".join(each.split()) for each in statements):
        table, new = TABLE.search(statement), NEW_TABLE.match(statement)
        created |= {new[1]} if new else set()
        is_new = table is not None and table[1] in created
        excused = any(statement.startswith(begin) for begin in REASONS)
        if not (HARMLESS.match(statement) or NEW_COLUMN.match(statement) or is_new or excused):
            found.append(statement)
    return found


@pytest.mark.parametrize(
    ("statements", "adds"),
    [
        (["ALTER TABLE quotas ADD COLUMN burst integer"], True),
        (["ALTER TABLE quotas ADD COLUMN burst integer DEFAULT 1 NOT NULL"], True),
        (["CREATE TABLE spools (id uuid)", "CREATE UNIQUE INDEX i ON spools (id)"], True),
        (["CREATE TABLE spools (id uuid)", "ALTER TABLE spools FORCE ROW LEVEL SECURITY"], True),
        (["CREATE INDEX i ON quotas (tenant_id)", "GRANT SELECT ON quotas TO app_tenant"], True),
        (["ALTER TABLE quotas ADD COLUMN burst integer NOT NULL"], False),
        (["ALTER TABLE quotas\n DROP COLUMN tokens_per_day"], False),
        (["ALTER TABLE quotas RENAME TO limits"], False),
        (["CREATE UNIQUE INDEX i ON quotas (tenant_id)"], False),
        (["UPDATE quotas SET tokens_per_day = 0"], False),
        (["DROP TABLE quotas"], False),
        (["REVOKE SELECT ON quotas FROM app_tenant"], False),
        (["CREATE TRIGGER t BEFORE INSERT ON quotas EXECUTE FUNCTION f()"], False),
        (["CREATE POLICY p ON quotas AS RESTRICTIVE USING (false)"], False),
    ],
)
def test_what_only_adds(statements: list[str], adds: bool) -> None:
    assert (breaking(statements) == []) == adds


def test_later_versions_only_add_or_say_why_not(empty_database_url: str) -> None:
    upgrade(empty_database_url, RELEASED)
    statements: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        upgrade(empty_database_url)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert statements
    assert breaking(statements) == []
