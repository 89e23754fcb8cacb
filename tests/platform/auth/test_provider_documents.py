"""What people without credentials can make this server ask the identity provider for, and how long its answers count."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import httpx2
import pytest
from joserfc.jwk import RSAKey
from tests.platform.auth.small_provider import CALLBACK, CLIENT, ISSUER, KEY, OTHER_KEY, SECRET, SmallProvider

from loraplex.platform.auth.identity_provider import IdentityProvider, ProviderOptions, new_attempt
from loraplex.platform.auth.provider_documents import FAILURE_S, LIFETIME_S, RENEWAL_S
from loraplex.tenants.errors import SignInRefused

DISCOVERY = "/.well-known/openid-configuration"
OPTIONS = ProviderOptions(issuer=ISSUER, client_id=CLIENT, client_secret=SECRET, name="Acme SSO")


@dataclass
class CountedProvider(SmallProvider):
    """Counts what it is asked for, and publishes `published` as its key."""

    asked: Counter[str] = field(default_factory=Counter)
    published: RSAKey = field(default_factory=lambda: KEY)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.client = IdentityProvider(OPTIONS, httpx2.MockTransport(self.count), lambda: self.now)

    async def count(self, request: httpx2.Request) -> httpx2.Response:
        self.asked[request.url.path] += 1
        await asyncio.sleep(0)
        if request.url.path == "/jwks":
            return httpx2.Response(200, json={"keys": [self.published.as_dict(private=False)]})
        return self.answer(request)

    async def start(self) -> None:
        await self.client.begin(CALLBACK, new_attempt("tenant"))

    async def sign_in(self) -> None:
        attempt = new_attempt("tenant")
        await self.client.finish(
            CALLBACK, attempt, self.authorize(await self.client.begin(CALLBACK, attempt))
        )

    async def refused(self) -> None:
        with pytest.raises(SignInRefused):
            await self.start()


async def test_sixty_starts_make_one_fetch() -> None:
    provider = CountedProvider()
    await asyncio.gather(*(provider.start() for _ in range(30)))
    for _ in range(30):
        await provider.start()
    assert provider.asked == {DISCOVERY: 1}


async def test_sign_ins_share_discovery_and_keys_for_an_hour() -> None:
    provider = CountedProvider()
    for provider.now in (0.0, LIFETIME_S - 1):
        await provider.sign_in()
    assert provider.asked == {DISCOVERY: 1, "/jwks": 1, "/token": 2}
    provider.now = LIFETIME_S
    await provider.sign_in()
    assert provider.asked == {DISCOVERY: 2, "/jwks": 2, "/token": 3}


async def test_a_provider_that_is_away_is_asked_once_in_five_seconds() -> None:
    provider = CountedProvider(statuses={DISCOVERY: 500})
    await asyncio.gather(*(provider.refused() for _ in range(10)))
    provider.now = FAILURE_S - 0.1
    await provider.refused()
    assert provider.asked == {DISCOVERY: 1}
    provider.now, provider.statuses = FAILURE_S, {}
    await provider.start()
    assert provider.asked == {DISCOVERY: 2}


async def test_what_a_provider_said_counts_while_it_is_away() -> None:
    provider = CountedProvider()
    await provider.start()
    provider.now, provider.statuses = LIFETIME_S, {DISCOVERY: 503}
    for _ in range(10):
        await provider.start()
    assert provider.asked == {DISCOVERY: 2}


async def test_a_new_key_of_the_provider_counts_within_a_minute() -> None:
    provider = CountedProvider()
    await provider.sign_in()
    provider.key = provider.published = OTHER_KEY
    with pytest.raises(SignInRefused):
        await provider.sign_in()
    provider.now = RENEWAL_S
    await provider.sign_in()
    assert provider.asked["/jwks"] == 2


async def test_a_provider_without_endpoints_is_refused() -> None:
    for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
        await CountedProvider(metadata={name: None}).refused()
    await CountedProvider(metadata={"token_endpoint": ["https://id.example.com/token"]}).refused()


async def test_no_cookie_of_one_sign_in_is_sent_for_another() -> None:
    cookies = list[str | None]()

    def answer(request: httpx2.Request) -> httpx2.Response:
        cookies.append(request.headers.get("cookie"))
        found = SmallProvider().answer(request)
        found.headers["set-cookie"] = "person=mara; Path=/"
        return found

    now = [0.0]
    client = IdentityProvider(OPTIONS, httpx2.MockTransport(answer), lambda: now[0])
    for now[0] in (0.0, LIFETIME_S):
        await client.begin(CALLBACK, new_attempt("tenant"))
    assert cookies == [None, None]
