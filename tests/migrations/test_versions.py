"""The migrations lead to exactly the models, run both ways, one at a time and within their timeouts, on every PostgreSQL."""

import subprocess
import sys
from functools import partial

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine

from loraplex.platform.datastores.embedded.binaries import POSTGRES_MAJORS
from loraplex.platform.datastores.migrations import current_revision, downgrade, newest_revision, upgrade
from loraplex.tenants.database import parse_database_url
from loraplex.tenants.models import Base

pytestmark = pytest.mark.parametrize("postgres_major", POSTGRES_MAJORS, indirect=True)
WATCH = """
    CREATE SCHEMA watch;
    CREATE TABLE watch.seen (major int, lock_timeout text, statement_timeout text);
    CREATE FUNCTION watch.note() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO watch.seen VALUES (current_setting('server_version_num')::int / 10000,
            current_setting('lock_timeout'), current_setting('statement_timeout'));
    END $$;
    CREATE EVENT TRIGGER watch ON ddl_command_end EXECUTE FUNCTION watch.note();
"""


TABLES = """
    SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
"""


def tables(url: str) -> set[str]:
    """The tables of the schema. Partitions follow the calendar, and are no part of the models."""
    with psycopg.connect(url) as connection:
        return {name for (name,) in connection.execute(TABLES).fetchall()}


def test_up_down_up(empty_database_url: str) -> None:
    upgrade(empty_database_url)
    assert tables(empty_database_url) == {*Base.metadata.tables, "alembic_version"}
    downgrade(empty_database_url, "base")
    assert tables(empty_database_url) == {"alembic_version"}
    upgrade(empty_database_url)
    assert current_revision(empty_database_url) == newest_revision()


def test_every_statement_is_bounded_both_ways(empty_database_url: str, postgres_major: int) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(WATCH)
        for move in (partial(upgrade, empty_database_url), partial(downgrade, empty_database_url, "base")):
            move()
            seen = connection.execute("SELECT DISTINCT * FROM watch.seen").fetchall()
            assert seen == [(postgres_major, "15s", "10min")]
            connection.execute("TRUNCATE watch.seen")


def test_schema_equals_models(database_url: str) -> None:
    engine = create_engine(parse_database_url(database_url))
    compared = tables(database_url)
    options = {
        "compare_server_default": True,
        "include_name": lambda name, kind, _: kind != "table" or name in compared,
    }
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_check_constraints_equal_the_models(database_url: str, empty_database_url: str) -> None:
    engine = create_engine(parse_database_url(empty_database_url))
    Base.metadata.create_all(engine)
    engine.dispose()
    # A check that replaces a narrower one need not read the rows that are there.
    upgraded = {name: check.removesuffix(" NOT VALID") for name, check in constraints(database_url).items()}
    assert upgraded == constraints(empty_database_url)


def constraints(url: str) -> dict[str, str]:
    query = """
        SELECT conname, pg_get_constraintdef(pg_constraint.oid) FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid
        WHERE connamespace = 'public'::regnamespace AND contype <> 't' AND NOT relispartition
        AND relname <> 'alembic_version'
    """
    with psycopg.connect(url) as connection:
        return dict(connection.execute(query).fetchall())


def test_two_runs_at_once(empty_database_url: str) -> None:
    program = "import sys; from loraplex.platform.datastores.migrations import upgrade; upgrade(sys.argv[1])"
    runs = [
        subprocess.Popen([sys.executable, "-c", program, empty_database_url], stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    assert [(run.wait(60), run.stderr.read() if run.stderr else None) for run in runs] == [(0, b"")] * 2
    assert "tenants" in tables(empty_database_url)


def test_versions_are_immutable(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("INSERT INTO tenants (id, name) VALUES (gen_random_uuid(), 'acme')")
        connection.execute(
            "INSERT INTO adapters (id, tenant_id, name) SELECT gen_random_uuid(), id, 'support' FROM tenants"
        )
        connection.execute(
            "INSERT INTO adapter_versions (id, tenant_id, adapter_id, version, digest, state, size_bytes, rank, config,"
            " report) SELECT gen_random_uuid(), tenant_id, id, 1, repeat('a', 64), 'ready', 1, 8, '{}', '{}'"
            " FROM adapters"
        )
        connection.execute("UPDATE adapter_versions SET state = 'deprecated', report = '{\"checks\": []}'")
        with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="immutable"):
            connection.execute("UPDATE adapter_versions SET digest = repeat('b', 64)")


def insert_version(connection: "psycopg.Connection[tuple[object, ...]]") -> None:
    connection.execute("INSERT INTO tenants (id, name) VALUES (gen_random_uuid(), 'acme')")
    connection.execute(
        "INSERT INTO adapters (id, tenant_id, name) SELECT gen_random_uuid(), id, 'support' FROM tenants"
    )
    connection.execute(
        "INSERT INTO adapter_versions (id, tenant_id, adapter_id, version, digest, state, size_bytes, rank, config,"
        " report) SELECT gen_random_uuid(), tenant_id, id, 1, repeat('a', 64), 'ready', 1, 8, '{}', '{}'"
        " FROM adapters"
    )


INSERT_ALIAS = (
    "INSERT INTO adapter_aliases (adapter_id, tenant_id, alias, version)"
    " SELECT id, tenant_id, 'production', 1 FROM adapters"
)


def test_a_profile_is_free_until_the_first_alias(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        insert_version(connection)
        connection.execute("UPDATE adapter_versions SET tool_style = 'hermes', defaults = '{\"top_k\": 5}'")
        connection.execute("UPDATE adapter_versions SET tool_style = 'mistral'")
        connection.execute("UPDATE adapter_versions SET reasoning_style = '{}'")
        connection.execute("UPDATE adapter_versions SET reasoning_style = '\"think\"'")
        connection.execute(
            "INSERT INTO adapter_aliases (adapter_id, tenant_id, alias) SELECT id, tenant_id, 'production' FROM adapters"
        )
        connection.execute(
            "INSERT INTO alias_targets SELECT id, 'production', 1, 1, tenant_id, 100 FROM adapters"
        )
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        connection.execute("DELETE FROM adapter_aliases")
        for change in (
            *("tool_style = 'hermes'", "defaults = '{}'", "aliased_at = NULL", "tool_style = NULL"),
            *("reasoning_style = '{}'", "reasoning_style = NULL"),
        ):
            with (
                pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="immutable"),
                connection.transaction(),
            ):
                connection.execute(f"UPDATE adapter_versions SET {change}".encode())
        connection.execute("UPDATE adapter_versions SET state = 'deprecated', tool_style = 'mistral'")


@pytest.mark.parametrize(
    "change",
    [
        *("tool_style = 'template'", "defaults = '[]'"),
        *("reasoning_style = 'null'", "reasoning_style = '[]'", "reasoning_style = '\"base\"'"),
    ],
)
def test_a_profile_outside_its_closed_set(database_url: str, change: str) -> None:
    with psycopg.connect(database_url) as connection:
        insert_version(connection)
        with pytest.raises(psycopg.errors.CheckViolation):
            connection.execute(f"UPDATE adapter_versions SET {change}".encode())


def test_aliases_keep_their_place_both_ways(empty_database_url: str) -> None:
    upgrade(empty_database_url, "0003")
    with psycopg.connect(empty_database_url) as connection:
        insert_version(connection)
        connection.execute(
            "INSERT INTO adapter_versions (id, tenant_id, adapter_id, version, digest, state, size_bytes, rank, config,"
            " report) SELECT gen_random_uuid(), tenant_id, adapter_id, 2, repeat('b', 64), 'ready', 1, 8, '{}', '{}'"
            " FROM adapter_versions"
        )
        connection.execute(INSERT_ALIAS)
        connection.execute("UPDATE adapter_aliases SET version = 2, previous_version = 1")
        connection.execute(INSERT_ALIAS.replace("production", "canary"))
    upgrade(empty_database_url)
    targets = "SELECT alias, generation, version, weight FROM alias_targets ORDER BY alias, generation"
    with psycopg.connect(empty_database_url) as connection:
        assert connection.execute(targets).fetchall() == [
            ("canary", 1, 1, 100),
            ("production", 1, 1, 100),
            ("production", 2, 2, 100),
        ]
    downgrade(empty_database_url, "0003")
    with psycopg.connect(empty_database_url) as connection:
        found = connection.execute("SELECT alias, version, previous_version FROM adapter_aliases ORDER BY 1")
        assert found.fetchall() == [("canary", 1, None), ("production", 2, 1)]


def test_what_had_an_alias_before_profiles_keeps_the_empty_one(empty_database_url: str) -> None:
    upgrade(empty_database_url)
    downgrade(empty_database_url, "0001")
    with psycopg.connect(empty_database_url) as connection:
        insert_version(connection)
        connection.execute(INSERT_ALIAS)
    upgrade(empty_database_url)
    with (
        psycopg.connect(empty_database_url) as connection,
        pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="immutable"),
    ):
        connection.execute("UPDATE adapter_versions SET tool_style = 'hermes'")


def insert_prices(connection: "psycopg.Connection[tuple[object, ...]]", effective: str) -> None:
    connection.execute(
        "INSERT INTO rate_cards (scope, currency) VALUES ('all', 'USD') ON CONFLICT DO NOTHING",
    )
    connection.execute(
        "INSERT INTO price_versions (id, rate_card_id, version, prompt, cached_prompt, completion, effective)"
        " SELECT gen_random_uuid(), c.id, (SELECT count(*) + 1 FROM price_versions), 2, 1, 3, %s::tstzrange"
        " FROM rate_cards c",
        (effective,),
    )


def test_price_versions_never_overlap(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        insert_prices(connection, "[2026-01-01Z,2026-02-01Z)")
        insert_prices(connection, "[2026-02-01Z,)")
        for effective in ("[2026-01-31Z,2026-02-01Z)", "[2026-03-01Z,)"):
            with pytest.raises(psycopg.errors.ExclusionViolation), connection.transaction():
                insert_prices(connection, effective)
        for effective in ("empty", "(2025-01-01Z,2025-02-01Z)", "[2025-01-01Z,2025-02-01Z]"):
            with pytest.raises(psycopg.errors.CheckViolation), connection.transaction():
                insert_prices(connection, effective)


def test_a_price_version_is_final_but_for_an_end_in_the_future(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        insert_prices(connection, "[2026-01-01Z,)")
        for change in (
            "UPDATE price_versions SET prompt = 3",
            "UPDATE price_versions SET effective = tstzrange(lower(effective), now())",
            "UPDATE price_versions SET effective = tstzrange('2025-01-01Z', now() + interval '1 day')",
            "UPDATE price_versions SET prompt = 3, effective = tstzrange(lower(effective), now() + interval '1 day')",
            "DELETE FROM price_versions",
        ):
            with (
                pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="final"),
                connection.transaction(),
            ):
                connection.execute(change)
        ended = "UPDATE price_versions SET effective = tstzrange(lower(effective), now() + interval '{} day')"
        connection.execute(ended.format(2))
        connection.execute(ended.format(1))
        with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="final"):
            connection.execute(ended.format(2))


def test_a_change_of_prices_or_currencies_raises_their_epoch(database_url: str) -> None:
    epoch = "SELECT coalesce(max(epoch), 0) FROM price_epochs"
    with psycopg.connect(database_url, autocommit=True) as connection:
        seen = [connection.execute(epoch).fetchone()]
        insert_prices(connection, "[2026-01-01Z,)")
        seen.append(connection.execute(epoch).fetchone())
        connection.execute("INSERT INTO tenants (id, name) VALUES (gen_random_uuid(), 'acme')")
        connection.execute("INSERT INTO tenant_billing (tenant_id) SELECT id FROM tenants")
        seen.append(connection.execute(epoch).fetchone())
        connection.execute("UPDATE tenant_billing SET currency = 'EUR'")
        seen.append(connection.execute(epoch).fetchone())
        connection.execute("UPDATE tenant_billing SET vat_id = 'x'")
        seen.append(connection.execute(epoch).fetchone())
    assert seen == [(0,), (1,), (2,), (3,), (3,)]
