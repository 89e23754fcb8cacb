"""An identity counts only if this provider signed it, for this client and this attempt, with a verified address."""

from collections.abc import Mapping
from typing import Any

import pytest
from joserfc.jwk import OctKey
from tests.platform.auth.small_provider import CALLBACK, CLIENT, ISSUER, OTHER_KEY, SECRET, SmallProvider

from loraplex.platform.auth.identity_provider import (
    IdentityProvider,
    ProviderIdentity,
    ProviderOptions,
    new_attempt,
)
from loraplex.tenants.errors import SignInRefused


async def signed_in(
    provider: SmallProvider,
    answer: Mapping[str, str | None] | None = None,
    domains: tuple[str, ...] = (),
) -> ProviderIdentity:
    """Go to the provider and back. `answer`: what the browser brings in place of the proper values; None removes one."""
    options = ProviderOptions(
        issuer=ISSUER, client_id=CLIENT, client_secret=SECRET, name="Acme SSO", allowed_domains=domains
    )
    client = IdentityProvider(options, provider.transport)
    attempt = new_attempt("tenant")
    address = await client.begin(CALLBACK, attempt)
    assert address.startswith(f"{ISSUER}/authorize?") and attempt.verifier not in address
    back = {**provider.authorize(address), **(answer or {})}
    return await client.finish(
        CALLBACK, attempt, {name: text for name, text in back.items() if text is not None}
    )


async def test_a_person_comes_back_with_a_verified_address() -> None:
    assert await signed_in(SmallProvider()) == ProviderIdentity(
        ISSUER, "subject-1", "mara@example.com", "Mara"
    )
    assert await signed_in(SmallProvider(), domains=("example.com",))
    only_userinfo = SmallProvider(
        claims={"email": None, "email_verified": None, "name": None},
        userinfo={"sub": "subject-1", "email": "mara@example.com", "email_verified": True},
    )
    assert (await signed_in(only_userinfo)).name == "mara"


def test_attempts_differ() -> None:
    first, second = new_attempt("tenant"), new_attempt("tenant")
    assert len({first.state, first.nonce, first.verifier, second.state, second.nonce, second.verifier}) == 6


@pytest.mark.parametrize(
    "answer",
    [
        {"state": "another"},
        {"state": None},
        {"iss": "https://evil.example.com"},
        {"iss": None},
        {"code": None},
        {"code": None, "error": "access_denied"},
    ],
    ids=str,
)
async def test_an_answer_of_another_attempt_or_issuer_is_refused(answer: dict[str, str | None]) -> None:
    with pytest.raises(SignInRefused):
        await signed_in(SmallProvider(), answer)


async def test_a_provider_that_names_no_issuer_need_not_answer_with_one() -> None:
    silent = SmallProvider(metadata={"authorization_response_iss_parameter_supported": None})
    assert (await signed_in(silent, {"iss": None})).subject == "subject-1"
    with pytest.raises(SignInRefused, match="another identity provider"):
        await signed_in(silent, {"iss": "https://evil.example.com"})


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "another"},
        {"nonce": None},
        {"iss": "https://evil.example.com"},
        {"aud": "another client"},
        {"aud": ["another client"]},
        {"aud": [CLIENT, "another client"]},
        {"exp": 1},
        {"sub": None},
        {"email_verified": False},
        {"email_verified": "true"},
        {"email": "mara@e\N{KELVIN SIGN}ample.com"},
        {"email_verified": None},
        {"email": None, "email_verified": None},
    ],
    ids=str,
)
async def test_an_identity_that_is_not_of_this_attempt_is_refused(claims: dict[str, Any]) -> None:
    with pytest.raises(SignInRefused):
        await signed_in(SmallProvider(claims=claims, userinfo={"sub": "subject-1"}))


async def test_a_userinfo_of_another_person_is_refused() -> None:
    mixed = SmallProvider(
        claims={"email": None},
        userinfo={"sub": "subject-2", "email": "eve@example.com", "email_verified": True},
    )
    with pytest.raises(SignInRefused, match="another person"):
        await signed_in(mixed)


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [(OTHER_KEY, "RS256"), (OctKey.import_key("a secret of the client, long enough"), "HS256")],
    ids=["another key", "a shared secret"],
)
async def test_only_the_providers_key_signs(key: Any, algorithm: str) -> None:
    with pytest.raises(SignInRefused):
        await signed_in(SmallProvider(key=key, algorithm=algorithm))


async def test_other_domains_are_refused() -> None:
    for domains in (("example.org",), ("ple.com",), ("mara@example.com",)):
        with pytest.raises(SignInRefused, match="may not sign in"):
            await signed_in(SmallProvider(), domains=domains)


@pytest.mark.parametrize("path", ["/.well-known/openid-configuration", "/token", "/jwks"])
async def test_a_provider_that_fails_signs_no_one_in(path: str) -> None:
    with pytest.raises(SignInRefused):
        await signed_in(SmallProvider(statuses={path: 500}))


async def test_a_provider_with_another_issuer_is_not_trusted() -> None:
    for issuer in ("https://evil.example.com", f"{ISSUER}/", None):
        with pytest.raises(SignInRefused, match="another issuer"):
            await signed_in(SmallProvider(metadata={"issuer": issuer}))
