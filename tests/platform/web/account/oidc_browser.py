"""A browser at a console with an identity provider."""

from dataclasses import dataclass, replace

import httpx
from tests.platform.auth.small_provider import CLIENT, ISSUER, SECRET, SmallProvider
from tests.platform.web.browser import ORIGIN, Console, Page

from loraplex.platform.auth.identity_provider import IdentityProvider, ProviderOptions
from loraplex.platform.web.app import create_app
from loraplex.platform.web.console_app import ConsoleOptions, add_console

CALLBACK = f"{ORIGIN}/console/oidc/callback"


def with_provider(console: Console, provider: IdentityProvider, origin: str = ORIGIN) -> None:
    """Let people of the console sign in by the provider; `origin`: the address that people use."""
    console.dependencies = replace(console.dependencies, identity_provider=provider)
    console.app = create_app(console.dependencies)
    add_console(console.app, console.dependencies, ConsoleOptions(public_url=origin))


def small_provider(console: Console) -> SmallProvider:
    """Let people of the console sign in by a provider whose answers a test chooses."""
    provider = SmallProvider(callback=CALLBACK)
    options = ProviderOptions(issuer=ISSUER, client_id=CLIENT, client_secret=SECRET, name="Acme SSO")
    with_provider(console, IdentityProvider(options, provider.transport))
    return provider


@dataclass
class Way:
    """The way of one browser to the provider and back. `query`: what it comes back with."""

    http: httpx.AsyncClient
    query: dict[str, str]

    async def back(self, http: httpx.AsyncClient | None = None) -> httpx.Response:
        """Come back, in the same browser or in another one."""
        return await (http or self.http).get("/console/oidc/callback", params=self.query)

    async def join(self) -> httpx.Response:
        """Come back, and accept the invitation that the page names."""
        asked = await self.back()
        return await accept(self.http, asked)


async def accept(http: httpx.AsyncClient, asked: httpx.Response) -> httpx.Response:
    """Send the form of the page that asks whether an invitation is accepted."""
    assert asked.status_code == 200, asked.text
    fields = Page(asked).form("/console/oidc/accept")
    return await http.post("/console/oidc/accept", data=fields, headers={"origin": ORIGIN})


async def begin(console: Console, provider: SmallProvider, **query: str) -> Way:
    """Go to the provider in a new browser, and sign in there."""
    http = await console.browser()
    started = await http.get("/console/oidc/start", params=query)
    assert started.status_code == 303
    return Way(http, provider.authorize(started.headers["location"]))
