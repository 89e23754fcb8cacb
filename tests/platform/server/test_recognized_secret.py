"""The secret of a start: the database knows it by its fingerprint, refuses another, and voids what it cannot open when told to."""

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import psycopg
import pytest
from tests.tenants.registry_records import make_tenant

from loraplex.platform.config import Settings, load_settings
from loraplex.platform.server.recognized_secret import recognized_secret
from loraplex.platform.server.secret import SECRET_FILE, derive, fingerprint
from loraplex.platform.startup_errors import SecretRefused
from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.errors import SecondFactorState, StoredResponseUnreadable, WebhookSecretUnreadable
from loraplex.tenants.idempotency import RepeatableRequest
from loraplex.tenants.people.codes import SecondFactorSecrets
from loraplex.tenants.stored_responses import EncryptedResponses, StoredResponse
from loraplex.tenants.unit_of_work import unit_of_work
from loraplex.tenants.webhooks import use_cases as webhooks
from loraplex.tenants.webhooks.encrypted_secrets import WebhookSecrets

OLD: Final = "o" * 32
NEW: Final = "n" * 32


def settings(folder: Path, secret: str | None = None) -> Settings:
    folder.mkdir(exist_ok=True)
    return load_settings({"data_dir": folder, "secret": secret})


async def start(database: Database, given: Settings, *, accept: bool = False) -> tuple[bytes, list[str]]:
    said: list[str] = []
    return await recognized_secret(given, database, said.append, accept_new=accept), said


def rows(database: Database, query: str) -> list[Any]:
    with psycopg.connect(database.url) as connection:
        return connection.execute(query).fetchall()


async def seal(database: Database, secret: bytes) -> dict[str, Any]:
    """Store one of each that the secret seals."""
    tenant_id, person = await make_tenant(database, "acme"), uuid4()

    def key(*parts: bytes) -> bytes:
        return derive(secret, *parts)

    rules = webhooks.WebhookRules(WebhookSecrets(key), True)
    responses = EncryptedResponses(key, timedelta(hours=1))
    request = RepeatableRequest("key", "once", "POST /x", b"\0" * 32, tenant_id)

    async def work() -> StoredResponse:
        return StoredResponse(200, [], b"made")

    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        issued = await webhooks.create(uow, tenant_id, rules, "https://example.com/x", ["adapter.ready"])
        await uow.once(request, responses, work)
    totp = SecondFactorSecrets(key).encrypt(person, "JBSWY3DPEHPK3PXP")
    with psycopg.connect(database.url, autocommit=True) as connection:
        insert = (
            "INSERT INTO users (id, email, name, totp_secret, totp_confirmed_at) VALUES (%s, %s, 'x', %s, %s)"
        )
        connection.execute(insert, (person, "a@example.com", totp, datetime.now(UTC)))
        connection.execute(insert, (uuid4(), "begun@example.com", totp, None))
        connection.execute("INSERT INTO recovery_codes VALUES (%s, %s)", (person, b"\0" * 32))
    return {"tenant": tenant_id, "person": person, "endpoint": issued.id, "request": request}


async def test_the_first_start_makes_the_secret_that_later_ones_have(
    database: Database, tmp_path: Path
) -> None:
    given = settings(tmp_path / "data")
    secret, said = await start(database, given)
    assert said == [] and (await start(database, given)) == (secret, [])
    assert (given.data_dir / SECRET_FILE).read_bytes().strip() == secret
    (stored,) = rows(database, "SELECT secret_fingerprint FROM installation")
    assert stored == (fingerprint(secret),) and secret not in stored[0]


async def test_a_lost_secret_is_refused_and_none_is_made(database: Database, tmp_path: Path) -> None:
    given = settings(tmp_path / "data")
    await start(database, given)
    (given.data_dir / SECRET_FILE).unlink()
    for folder in (given, settings(tmp_path / "another gateway's")):
        with pytest.raises(SecretRefused, match=r"is missing: .*LORAPLEX_SECRET .*serve --accept-new-secret"):
            await start(database, folder)
        assert not (folder.data_dir / SECRET_FILE).exists()


async def test_a_secret_lost_before_the_upgrade_is_refused_too(database: Database, tmp_path: Path) -> None:
    await seal(database, OLD.encode())
    with pytest.raises(SecretRefused, match="is missing"):
        await start(database, settings(tmp_path / "data"))
    secret, _ = await start(database, settings(tmp_path / "data", OLD))
    assert rows(database, "SELECT secret_fingerprint FROM installation") == [(fingerprint(secret),)]


@pytest.mark.parametrize("only", ["webhook_endpoints", "users"])
async def test_another_secret_is_refused_at_the_first_start_after_the_upgrade(
    database: Database, tmp_path: Path, only: str
) -> None:
    await seal(database, OLD.encode())
    with psycopg.connect(database.url, autocommit=True) as connection:
        if only == "users":
            connection.execute("DELETE FROM webhook_endpoints")
        else:
            connection.execute("UPDATE users SET totp_secret = NULL, totp_confirmed_at = NULL")
    with pytest.raises(SecretRefused, match="has another server secret"):
        await start(database, settings(tmp_path / "data", NEW))
    assert rows(database, "SELECT FROM installation") == []
    assert (await start(database, settings(tmp_path / "data", OLD)))[1] == []


async def test_what_an_older_secret_has_left_unreadable_refuses_no_upgrade(
    database: Database, tmp_path: Path
) -> None:
    await seal(database, OLD.encode())
    with psycopg.connect(database.url, autocommit=True) as connection:
        newer = SecondFactorSecrets(partial(derive, NEW.encode())).encrypt(person := uuid4(), "JBSWY3DP")
        insert = "INSERT INTO users (id, email, name, totp_secret) VALUES (%s, 'new@example.com', 'x', %s)"
        connection.execute(insert, (person, newer))
    assert (await start(database, settings(tmp_path / "data", NEW)))[1] == []


async def test_another_secret_is_refused_and_voids_when_accepted(database: Database, tmp_path: Path) -> None:
    secret, _ = await start(database, settings(tmp_path, OLD))
    sealed = await seal(database, secret)
    with pytest.raises(SecretRefused, match="LORAPLEX_SECRET has another server secret"):
        await start(database, settings(tmp_path, NEW))
    before = rows(database, "SELECT sealed_secret FROM webhook_endpoints")
    assert before != [(b"",)]

    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute("INSERT INTO gateways (id) VALUES (gen_random_uuid())")
        with pytest.raises(SecretRefused, match="another gateway is live"):
            await start(database, settings(tmp_path, NEW), accept=True)
        connection.execute("UPDATE gateways SET seen_at = now() - interval '31 seconds'")
    _, (report,) = await start(database, settings(tmp_path, NEW), accept=True)
    assert "1 webhook secrets" in report and "1 second factors" in report
    assert "1 recovery codes" in report and "1 stored responses" in report
    (entry,) = rows(
        database, "SELECT actor, after FROM audit_entries WHERE action = 'installation.accept_secret'"
    )
    assert entry[0] == "serve" and entry[1]["webhook_secrets"] == entry[1]["stored_responses"] == 1
    assert (await start(database, settings(tmp_path, NEW), accept=True))[1] == [
        "the server secret is the one that the database knows: nothing is voided"
    ]
    # The old one is another one now, and opens nothing any more.
    with pytest.raises(SecretRefused, match="another server secret"):
        await start(database, settings(tmp_path, OLD))
    assert_void(database, sealed)


def assert_void(database: Database, sealed: dict[str, Any]) -> None:
    for secret in (OLD, NEW):

        def key(*parts: bytes, secret: str = secret) -> bytes:
            return derive(secret.encode(), *parts)

        ((endpoint,),) = rows(database, "SELECT sealed_secret FROM webhook_endpoints")
        with pytest.raises(WebhookSecretUnreadable):
            WebhookSecrets(key).decrypt(sealed["tenant"], sealed["endpoint"], endpoint)
        ((answer,),) = rows(database, "SELECT sealed_answer FROM idempotency_records")
        with pytest.raises(StoredResponseUnreadable):
            EncryptedResponses(key, timedelta(hours=1)).decrypt(sealed["request"], answer)
        people = "SELECT totp_secret, totp_confirmed_at IS NOT NULL FROM users ORDER BY email"
        (confirmed, begun) = rows(database, people)
        # The second factor is still asked for: what it was is forgotten, that there is one is not.
        assert confirmed == (b"", True) and begun == (None, False)
        with pytest.raises(SecondFactorState, match="loraplex user reset"):
            SecondFactorSecrets(key).decrypt(sealed["person"], confirmed[0])
    assert rows(database, "SELECT FROM recovery_codes") == []


async def test_a_voided_webhook_is_rotated_with_grace_and_signs_again(
    database: Database, tmp_path: Path
) -> None:
    secret, _ = await start(database, settings(tmp_path, OLD))
    sealed = await seal(database, secret)
    new, _ = await start(database, settings(tmp_path, NEW), accept=True)
    secrets = WebhookSecrets(lambda *parts: derive(new, *parts))
    rules = webhooks.WebhookRules(secrets, True)
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        issued = await webhooks.rotate(uow, sealed["tenant"], sealed["endpoint"], rules, 3600)
    ((encrypted, previous),) = rows(database, "SELECT sealed_secret, previous_secret FROM webhook_endpoints")
    assert previous is None
    assert secrets.decrypt(sealed["tenant"], sealed["endpoint"], encrypted) == issued.secret
