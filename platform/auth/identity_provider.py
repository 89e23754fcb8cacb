"""Sign-in by an OpenID Connect provider: authorization code with PKCE (RFC 7636), state, nonce, and the issuer of the answer
(RFC 9207).

Invariant: an identity is accepted only if this provider signed it for this client and this attempt, with a verified email.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final

import httpx2
import msgspec
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from loraplex.platform.auth.provider_documents import Document, ProviderDocument
from loraplex.tenants.errors import SignInRefused

SCOPE: Final = "openid email profile"
ALGORITHMS: Final = ("RS256", "PS256", "ES256", "RS384", "PS384", "ES384", "RS512", "PS512", "ES512", "EdDSA")
"""Signatures with a key of the provider; never `none`, never one with a shared secret."""
TIMEOUT_S: Final = 10.0
MAX_CONNECTIONS: Final = 8
"""Calls to the provider at once; further ones wait for `TIMEOUT_S` at most."""
LEEWAY_S: Final = 60
MAX_NAME_LENGTH: Final = 100
ENDPOINTS: Final = ("authorization_endpoint", "token_endpoint", "jwks_uri")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions:
    """A provider and this server's registration there. `allowed_domains`: of email addresses; none: all are allowed."""

    issuer: str
    client_id: str
    client_secret: str | None = field(repr=False)
    name: str
    allowed_domains: Sequence[str] = ()


class Attempt(msgspec.Struct, frozen=True):
    """One attempt to sign in, kept by the browser that began it. `invitation`: the token of an invitation that it accepts, or
    empty; `page`: where it leads to.
    """

    state: str
    nonce: str
    verifier: str
    area: str
    invitation: str
    page: str


@dataclass(frozen=True, slots=True)
class ProviderIdentity:
    """A person as the provider knows it: by `subject`, for ever. `email` is verified and in lower case."""

    issuer: str
    subject: str
    email: str
    name: str


class IdentityProvider:
    """The provider of one installation, with one client for all who sign in: its TLS context takes 20 ms of a core to build.

    Every method raises `SignInRefused` when the provider fails or is not to be trusted.
    """

    def __init__(
        self,
        options: ProviderOptions,
        transport: httpx2.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`transport`: takes the place of the network."""
        self._options = options
        secret = options.client_secret
        self._client = AsyncOAuth2Client(
            options.client_id,
            secret,
            token_endpoint_auth_method="none" if secret is None else "client_secret_basic",
            scope=SCOPE,
            code_challenge_method="S256",
            timeout=TIMEOUT_S,
            limits=httpx2.Limits(max_connections=MAX_CONNECTIONS),
            follow_redirects=False,
            transport=transport,
            # What the provider sets for one person must not be sent for another.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        )
        self._metadata = ProviderDocument(self._fetch_metadata, clock)
        self._keys = ProviderDocument(self._fetch_keys, clock)

    async def close(self) -> None:
        """Close the connections to the provider."""
        await self._client.aclose()

    @property
    def name(self) -> str:
        """The provider's name for people."""
        return self._options.name

    @property
    def allowed_domains(self) -> Sequence[str]:
        """The domains of email addresses that may sign in; none: all."""
        return self._options.allowed_domains

    async def begin(self, redirect_uri: str, attempt: Attempt) -> str:
        """Return the provider's address to which the browser goes for this attempt."""
        metadata = await self._metadata.current()
        address, _ = self._client.create_authorization_url(
            metadata["authorization_endpoint"],
            redirect_uri=redirect_uri,
            state=attempt.state,
            nonce=attempt.nonce,
            code_verifier=attempt.verifier,
        )
        return str(address)

    async def finish(
        self, redirect_uri: str, attempt: Attempt, answer: Mapping[str, str]
    ) -> ProviderIdentity:
        """Return the identity that the provider answers for. `answer`: the query with which the browser came back."""
        if not secrets.compare_digest(answer.get("state", "").encode(), attempt.state.encode()):
            raise SignInRefused("This sign-in was not begun in this browser. Begin again.")
        metadata = await self._metadata.current()
        self._check_answer(metadata, answer)
        token = await _trusting(
            self._client.fetch_token(
                metadata["token_endpoint"],
                redirect_uri=redirect_uri,
                grant_type="authorization_code",
                code=answer["code"],
                code_verifier=attempt.verifier,
            )
        )
        claims = await self._claims(token, attempt)
        if "email" not in claims and "userinfo_endpoint" in metadata:
            claims |= await self._userinfo(metadata["userinfo_endpoint"], token, claims["sub"])
        return self._identity(claims)

    async def _fetch_metadata(self) -> Document:
        found = await self._fetch(f"{self._options.issuer.rstrip('/')}/.well-known/openid-configuration")
        if found.get("issuer") != self._options.issuer:
            raise SignInRefused("The identity provider has another issuer than the one that is configured.")
        if not all(isinstance(found.get(name), str) for name in ENDPOINTS):
            raise SignInRefused(_AWAY)
        return found

    async def _fetch_keys(self) -> Document:
        return await self._fetch((await self._metadata.current())["jwks_uri"])

    def _check_answer(self, metadata: Mapping[str, Any], answer: Mapping[str, str]) -> None:
        issuer = answer.get("iss")
        promised = metadata.get("authorization_response_iss_parameter_supported") is True
        if issuer != self._options.issuer and (issuer is not None or promised):
            raise SignInRefused("This answer comes from another identity provider.")
        if "code" not in answer:
            raise SignInRefused(f"{self._options.name} did not sign you in. Begin again.")

    async def _claims(self, token: Mapping[str, Any], attempt: Attempt) -> dict[str, Any]:
        """Return the claims of a token; a provider may have changed its keys since they were fetched."""
        try:
            return self._valid_claims(token, attempt, await self._keys.current())
        except InvalidToken:
            pass
        try:
            return self._valid_claims(token, attempt, await self._keys.renewed())
        except InvalidToken as error:
            raise SignInRefused("The identity provider's answer is not valid for this sign-in.") from error

    def _valid_claims(self, token: Mapping[str, Any], attempt: Attempt, keys: Any) -> dict[str, Any]:
        try:
            decoded = jwt.decode(token["id_token"], KeySet.import_key_set(keys), algorithms=ALGORITHMS)
            claims = CodeIDToken(
                decoded.claims,
                decoded.header,
                options={
                    "iss": {"essential": True, "value": self._options.issuer},
                    "aud": {"essential": True, "value": self._options.client_id},
                    "nonce": {"essential": True, "value": attempt.nonce},
                },
                params={"nonce": attempt.nonce, "client_id": self._options.client_id},
            )
            claims.validate(leeway=LEEWAY_S)
        except (JoseError, AuthlibBaseError, KeyError, ValueError, TypeError) as error:
            raise InvalidToken from error
        return dict(claims)

    async def _userinfo(self, address: str, token: Mapping[str, Any], subject: str) -> Document:
        found = await self._fetch(address, {"authorization": f"Bearer {token['access_token']}"})
        if found.get("sub") != subject:
            raise SignInRefused("The identity provider answered for another person.")
        return found

    async def _fetch(self, address: str, headers: Mapping[str, str] | None = None) -> Document:
        request = self._client.request("GET", address, withhold_token=True, headers=headers)
        response = await _trusting(request)
        try:
            response.raise_for_status()
            found = response.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise SignInRefused(_AWAY) from error
        if not isinstance(found, dict):
            raise SignInRefused(_AWAY)
        return found

    def _identity(self, claims: Mapping[str, Any]) -> ProviderIdentity:
        subject, email = claims.get("sub"), claims.get("email")
        if (
            not isinstance(subject, str)
            or not isinstance(email, str)
            # In lower case some letters are ASCII that were not: another address would become this one.
            or not email.isascii()
            or claims.get("email_verified") is not True
        ):
            raise SignInRefused(f"{self._options.name} has no verified email address of you.")
        address = email.strip().lower()
        domains = self._options.allowed_domains
        if domains and address.rpartition("@")[2] not in domains:
            raise SignInRefused(f"Addresses such as {address[:100]} may not sign in here.")
        name = claims.get("name")
        readable = "".join(filter(str.isprintable, name)) if isinstance(name, str) else ""
        shown = readable.strip()[:MAX_NAME_LENGTH] or address.partition("@")[0]
        return ProviderIdentity(self._options.issuer, subject, address, shown)


class InvalidToken(Exception):
    """An ID token that these keys did not sign for this client and this attempt."""


def new_attempt(area: str, *, invitation: str = "", page: str = "") -> Attempt:
    """Return an attempt with a state, a nonce and a verifier of its own."""
    token = secrets.token_urlsafe
    return Attempt(token(32), token(32), token(48), area, invitation, page)


_AWAY: Final = "The identity provider does not answer as it should; try again."


async def _trusting(request: Any) -> Any:
    try:
        return await request
    except (httpx2.HTTPError, AuthlibBaseError) as error:
        raise SignInRefused(_AWAY) from error
