"""Signing in by a real provider: npm's `oidc-provider`, driven as a browser drives it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import httpx
import pytest
from selectolax.lexbor import LexborHTMLParser
from tests.platform.web.account.oidc_browser import CALLBACK, accept, with_provider
from tests.platform.web.browser import Console
from tests.tenants.people.people_world import acting

from loraplex.platform.auth.identity_provider import IdentityProvider, ProviderOptions
from loraplex.tenants.people import team

PACKAGE, CLIENT, SECRET = "oidc-provider@9", "loraplex", "a secret of the client"
CACHE = Path(__file__).resolve().parents[4] / ".loraplex-test" / "oidc-provider"
SCRIPT = Path(__file__).with_name("oidc_provider.mjs")
INSTALL_S = 120.0
"""npm needs some 20 s for its 34 packages, once in a working tree."""


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running provider with one client, this server."""
    folder = tmp_path_factory.mktemp("provider")
    (folder / "node_modules").symlink_to(installed())
    shutil.copy(SCRIPT, folder)
    process = subprocess.Popen(
        ["node", SCRIPT.name, CLIENT, SECRET, CALLBACK],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def installed() -> Path:
    """The packages of the provider, installed once and kept for later runs."""
    if not (CACHE / "node_modules").is_dir():
        for program in ("node", "npm"):
            if shutil.which(program) is None:
                give_up(f"{program} is not on this machine")
        draft = CACHE.with_name(f"{CACHE.name}.{os.getpid()}")
        draft.mkdir(parents=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(draft)]
        try:
            done = subprocess.run(
                [*command, PACKAGE], check=False, capture_output=True, text=True, timeout=INSTALL_S
            )
        except subprocess.TimeoutExpired:
            shutil.rmtree(draft)
            give_up(f"npm did not install {PACKAGE} in {INSTALL_S:g} s")
        if done.returncode != 0:
            shutil.rmtree(draft)
            give_up(f"npm could not install {PACKAGE}: {done.stderr[-500:]}")
        try:
            draft.rename(CACHE)
        except OSError:  # Another run was faster.
            shutil.rmtree(draft)
    return CACHE / "node_modules"


def give_up(reason: str) -> NoReturn:
    """Skip the tests of this module; where `CI` is set they must run."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


async def signed_in_at(issuer: str, address: str, person: str) -> httpx.URL:
    """Sign in and consent at the provider; return the address to which it sends the browser back."""
    async with httpx.AsyncClient() as browser:
        response = await browser.get(address)
        while not response.headers.get("location", "").startswith(CALLBACK):
            if response.is_redirect:
                response = await browser.get(response.url.join(response.headers["location"]))
                continue
            assert response.status_code == 200 and str(response.url).startswith(issuer), response.text
            form = LexborHTMLParser(response.text).css_first("form[method=post]")
            assert form is not None
            fields = {
                str(node.attributes["name"]): node.attributes.get("value") or ""
                for node in form.css("input[name]")
            }
            if "login" in fields:
                fields |= {"login": person, "password": "any"}
            response = await browser.post(str(form.attributes["action"]), data=fields)
        return httpx.URL(response.headers["location"])


async def test_a_person_joins_and_signs_in_again(console: Console, issuer: str) -> None:
    options = ProviderOptions(issuer=issuer, client_id=CLIENT, client_secret=SECRET, name="Provider")
    with_provider(console, IdentityProvider(options))
    admin = await console.signed_in("admin")
    assert admin.session.tenant_id is not None
    async with acting(console.database, admin.session) as uow:
        token = (await team.invite(uow, admin.session.tenant_id, "mara@example.com", "viewer")).token

    async def enter(person: str, **query: str) -> httpx.Response:
        http = await console.browser()
        started = await http.get("/console/oidc/start", params=query)
        back = await signed_in_at(issuer, started.headers["location"], person)
        assert back.params["iss"] == issuer
        response = await http.get(back.raw_path.decode())
        return await accept(http, response) if "token" in query else response

    joined = await enter("mara", token=token)
    assert (joined.status_code, joined.headers["location"]) == (303, "/console")
    again = await enter("mara")
    assert again.status_code == 303 and "loraplex=" in again.headers["set-cookie"]
    unknown = await enter("eve")
    assert unknown.status_code == 403 and "No account is linked" in unknown.text
