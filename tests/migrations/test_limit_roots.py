"""Keys of before get their parents and the roots whose limits they share; tenants where that changes anything are rebuilt."""

import psycopg
import pytest

from loraplex.platform.datastores.embedded.binaries import POSTGRES_MAJORS
from loraplex.platform.datastores.migrations import downgrade, upgrade

pytestmark = pytest.mark.parametrize("postgres_major", POSTGRES_MAJORS, indirect=True)
# Of `acme`, a person made A, which minted B, which minted C and D; R replaced B. E is of the operator, F of another tenant.
FORMER = """
    INSERT INTO tenants (id, name) VALUES
        ('00000000-0000-0000-0000-000000000001', 'acme'), ('00000000-0000-0000-0000-000000000002', 'other');
    INSERT INTO api_keys (id, tenant_id, key_id, environment, name, secret_sha256, scopes, created_by, revoked_at)
    SELECT gen_random_uuid(), tenant::uuid, key_id, CASE WHEN tenant IS NULL THEN 'op' ELSE 'live' END, 'k',
        decode(repeat('00', 32), 'hex'), '{}', created_by, CASE key_id WHEN 'B' THEN now() END
    FROM (VALUES
        ('00000000-0000-0000-0000-000000000001', 'A', 'ann@example.com'), ('00000000-0000-0000-0000-000000000001', 'B', 'A'),
        ('00000000-0000-0000-0000-000000000001', 'C', 'B'), ('00000000-0000-0000-0000-000000000001', 'D', 'B'),
        ('00000000-0000-0000-0000-000000000001', 'R', 'A'), (NULL, 'E', NULL),
        ('00000000-0000-0000-0000-000000000002', 'F', 'A'), ('00000000-0000-0000-0000-000000000002', 'G', NULL)
    ) AS former (tenant, key_id, created_by);
    UPDATE api_keys SET replaced_by = (SELECT id FROM api_keys WHERE key_id = 'R') WHERE key_id = 'B';
    INSERT INTO quotas (id, tenant_id, api_key_id, requests_per_minute, max_keys)
    SELECT gen_random_uuid(), tenant_id, id, CASE key_id WHEN 'A' THEN NULL ELSE 2 END, 5 FROM api_keys
    WHERE key_id IN ('A', 'B', 'D', 'G', 'R');
    INSERT INTO admission_epochs (tenant_id, epoch) SELECT id, 7 FROM tenants;
"""
KEYS = """
    SELECT k.key_id, p.key_id, r.key_id FROM api_keys k
    LEFT JOIN api_keys p ON p.id = k.parent_id LEFT JOIN api_keys r ON r.id = k.limit_root ORDER BY 1
"""
MINTED_BEFORE = """
    INSERT INTO api_keys (id, tenant_id, key_id, environment, name, secret_sha256, scopes, created_by)
    SELECT gen_random_uuid(), tenant_id, 'Z', environment, name, secret_sha256, scopes, 'D' FROM api_keys WHERE key_id = 'D'
"""
# It rotates Z on behalf of a person: the new key has the limits of the old one, and nothing tells its parent.
ROTATED_BEFORE = """
    INSERT INTO api_keys (id, tenant_id, key_id, environment, name, secret_sha256, scopes, created_by)
    SELECT gen_random_uuid(), tenant_id, 'ZZ', environment, name, secret_sha256, scopes, 'ann@example.com'
    FROM api_keys WHERE key_id = 'Z';
    INSERT INTO quotas (id, tenant_id, api_key_id, requests_per_minute)
    SELECT gen_random_uuid(), tenant_id, id, 2 FROM api_keys WHERE key_id = 'ZZ';
    UPDATE api_keys SET revoked_at = now(), replaced_by = (SELECT id FROM api_keys WHERE key_id = 'ZZ') WHERE key_id = 'Z';
"""
OUTDATED = "SELECT t.name, e.fenced_epoch, e.fence > 0 FROM admission_epochs e JOIN tenants t ON t.id = tenant_id ORDER BY 1"


def test_keys_of_before_are_bound(empty_database_url: str) -> None:
    upgrade(empty_database_url, "0027")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(FORMER)
    upgrade(empty_database_url)
    with psycopg.connect(empty_database_url) as connection:
        assert connection.execute(KEYS).fetchall() == [
            ("A", None, None),
            ("B", "A", "B"),
            ("C", "B", "B"),
            ("D", "B", "B"),
            ("E", None, None),
            ("F", None, None),
            ("G", None, "G"),
            ("R", "B", "B"),
        ]
        # A gateway of the release before mints one more.
        connection.execute(MINTED_BEFORE)
        assert connection.execute(KEYS).fetchall()[-1] == ("Z", "D", "B")
        assert connection.execute(OUTDATED).fetchall() == [("acme", 7, True), ("other", 0, False)]
        connection.execute(ROTATED_BEFORE)
        assert connection.execute(KEYS).fetchall()[-1] == ("ZZ", "Z", "B")
    downgrade(empty_database_url, "0027")
    upgrade(empty_database_url)
