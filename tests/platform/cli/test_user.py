"""`loraplex user` against a real database: links alone on standard output, people in a list, exit codes."""

import asyncio
import json
import re
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from psycopg import sql
from typer.testing import CliRunner, Result

from loraplex.platform.cli import tenant, user
from loraplex.platform.cli.main import main
from loraplex.platform.server.gateway_address import GatewayAddress, announced
from loraplex.platform.server.serve_gateway import first_run_notice
from loraplex.tenants.administration.invitations import Acceptance, accept_invitation
from loraplex.tenants.database import Database
from loraplex.tenants.people.sessions import Client, SignedIn


@pytest.fixture(autouse=True)
def configured(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("LORAPLEX_PUBLIC_URL", "https://llm.example.com")
    monkeypatch.delenv("REDIS_URL", raising=False)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(user.app, arguments)


def token_of(address: str) -> str:
    return parse_qs(urlsplit(address).query)["token"][0]


def until(printed: Result) -> datetime:
    """The time until which a link is said to work."""
    found = re.search(r"until (\d{4}-\d\d-\d\d \d\d:\d\d) UTC", printed.stderr)
    assert found is not None, printed.stderr
    return datetime.strptime(f"{found[1]} +0000", "%Y-%m-%d %H:%M %z")


def expiry(database_url: str, table: str) -> datetime:
    """When the newest link of a table ends."""
    with psycopg.connect(database_url) as connection:
        query = sql.SQL("SELECT max(expires_at) FROM {}").format(sql.Identifier(table))
        row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]  # type: ignore[no-any-return]


async def accept(database_url: str, token: str, email: str) -> SignedIn:
    database = Database(database_url)
    entered = Acceptance(name="Ada", email=email, password="a long enough password")
    try:
        client = Client(None, None)
        return await accept_invitation(database, token, entered, client, derive_key=lambda *_: bytes(32))
    finally:
        await database.close()


def test_open_signs_in_the_only_admin_of_a_tenant(database_url: str) -> None:
    assert CliRunner().invoke(tenant.app, ("create", "acme")).exit_code == 0
    for email, role in (("ada@example.com", "admin"), ("bob@example.com", "developer")):
        invited = command("create", email, "--tenant", "acme", "--role", role)
        asyncio.run(accept(database_url, token_of(invited.stdout.strip()), ""))
    opened = CliRunner().invoke(main, ("open", "--tenant", "acme"))
    assert opened.stdout.startswith("https://llm.example.com/console/") and "ada@" in opened.stderr
    unclear = CliRunner().invoke(main, ("open",))
    assert unclear.exit_code == 1 and "--user EMAIL: ada@example.com, bob@example.com" in unclear.stderr


def test_create_prints_a_link_alone_and_list_shows_who_accepted(database_url: str) -> None:
    assert CliRunner().invoke(tenant.app, ("create", "acme")).exit_code == 0
    created = command("create", "ada@example.com", "--tenant", "acme", "--role", "developer")
    assert created.exit_code == 0 and len(created.stdout.split()) == 1
    assert created.stdout.startswith("https://llm.example.com/console/sign-in?token=")
    assert "By this link ada@example.com joins the tenant acme as developer. It works once" in created.stderr
    assert until(created) <= expiry(database_url, "invitations") < until(created) + timedelta(minutes=2)
    assert json.loads(command("list", "--json").stdout) == []
    opened = asyncio.run(accept(database_url, token_of(created.stdout.strip()), ""))
    assert (opened.session.tenant_name, opened.session.role) == ("acme", "developer")
    (listed,) = json.loads(command("list", "--json").stdout)
    assert (listed["email"], listed["tenants"], listed["operator"]) == (
        "ada@example.com",
        ["acme:developer"],
        False,
    )
    assert "ada@example.com" in command("list").stdout
    answered = command("reset", "ada@example.com", "--second-factor", "--json")
    assert "ada@example.com sets a new password, without a second factor" in answered.stderr
    reset = json.loads(answered.stdout)
    assert reset["url"].startswith("https://llm.example.com/console/sign-in?token=")
    late = expiry(database_url, "one_time_links") - datetime.fromisoformat(reset["expires_at"])
    assert timedelta() <= late < timedelta(minutes=1)


def test_a_link_to_an_operator_says_what_it_is_for_and_until_when(database_url: str) -> None:
    created = command("create", "--operator")
    assert created.stdout.startswith("https://llm.example.com/operator/console/sign-in?token=")
    assert "By this link its holder becomes an operator. It works once" in created.stderr
    assert until(created) <= expiry(database_url, "invitations") < until(created) + timedelta(minutes=2)


def test_links_lead_to_a_gateway_that_runs_on_the_data_directory(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LORAPLEX_PUBLIC_URL")
    assert CliRunner().invoke(tenant.app, ("create", "acme")).exit_code == 0
    invite = ("create", "ada@example.com", "--tenant", "acme")
    headless = GatewayAddress("http://127.0.0.1:1", None)
    with announced(tmp_path, headless):
        refused = command(*invite)
        assert refused.exit_code == 1 and refused.stdout == ""
        assert f"no server with a console runs on {tmp_path}" in refused.stderr
        assert "public_url" in refused.stderr and "Traceback" not in refused.stderr
        with announced(tmp_path, GatewayAddress("http://127.0.0.1:1", "https://[::1]:8443")):
            assert command(*invite).stdout.startswith("https://[::1]:8443/console/sign-in?token=")
        assert command("create", "--operator").exit_code == 1
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM invitations").fetchone() == (1,)


@pytest.mark.parametrize(
    "arguments", [(), ("ada@example.com",), ("--tenant", "acme"), ("--operator", "--tenant", "acme")]
)
def test_create_needs_a_tenant_or_operator(arguments: tuple[str, ...]) -> None:
    refused = command("create", *arguments)
    assert refused.exit_code == 2 and "--tenant NAME, or --operator" in refused.output


async def test_the_first_operator_comes_by_the_link_that_serve_prints(database: Database) -> None:
    root = "http://127.0.0.1:8000"
    notice = partial(first_run_notice, database, root)
    collected = await notice(shows_link=False)
    first, second = await notice(shows_link=True), await notice(shows_link=True)
    assert first is not None and collected == second and "token=" not in str(second)
    assert "loraplex user create --operator" in str(second)
    with psycopg.connect(database.url) as connection:
        connection.execute("UPDATE invitations SET created_at = created_at - interval '61 minutes'")
    hourly = await notice(shows_link=True)
    assert hourly is not None and hourly.split()[-1] != first.split()[-1]
    address = hourly.split()[-1]
    assert address.startswith(f"{root}/operator/console/sign-in?token=")
    opened = await accept(database.url, token_of(address), "Ada@example.com")
    assert opened.session.operator and opened.session.tenant_id is None
    assert opened.session.scopes == {"operator"}
    assert await notice(shows_link=True) is None
