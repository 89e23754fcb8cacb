"""Sign-in by an OpenID Connect provider: authorization code with PKCE (RFC 7636), state, nonce, and the issuer of the answer
(RFC 9207).

Invariant: an identity is accepted only if this provider signed it for this client and this attempt, with a verified email.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2
import msgspec
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from loraplex.tenants.errors import SignInRefused

SCOPE: Final = "openid email profile"
ALGORITHMS: Final = ("RS256", "PS256", "ES256", "RS384", "PS384", "ES384", "RS512", "PS512", "ES512", "EdDSA")
"""Signatures with a key of the provider; never `none`, never one with a shared secret."""
TIMEOUT_S: Final = 10.0
LEEWAY_S: Final = 60
MAX_NAME_LENGTH: Final = 100


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
    """The provider of one installation. Every method raises `SignInRefused` when the provider fails or is not to be trusted."""

    def __init__(self, options: ProviderOptions, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        """`transport`: takes the place of the network."""
        self._options = options
        self._transport = transport

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
        async with self._client(redirect_uri) as client:
            metadata = await self._metadata(client)
            address, _ = client.create_authorization_url(
                metadata["authorization_endpoint"],
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
        async with self._client(redirect_uri) as client:
            metadata = await self._metadata(client)
            self._check_answer(metadata, answer)
            token = await _trusting(
                client.fetch_token(
                    metadata["token_endpoint"],
                    grant_type="authorization_code",
                    code=answer["code"],
                    code_verifier=attempt.verifier,
                )
            )
            claims = await self._claims(client, metadata, token, attempt)
            if "email" not in claims and "userinfo_endpoint" in metadata:
                claims |= await self._userinfo(client, metadata["userinfo_endpoint"], claims["sub"])
        return self._identity(claims)

    def _client(self, redirect_uri: str) -> AsyncOAuth2Client:
        secret = self._options.client_secret
        return AsyncOAuth2Client(
            self._options.client_id,
            secret,
            token_endpoint_auth_method="none" if secret is None else "client_secret_basic",
            scope=SCOPE,
            redirect_uri=redirect_uri,
            code_challenge_method="S256",
            timeout=TIMEOUT_S,
            follow_redirects=False,
            transport=self._transport,
        )

    async def _metadata(self, client: AsyncOAuth2Client) -> dict[str, Any]:
        found = await _document(
            client, f"{self._options.issuer.rstrip('/')}/.well-known/openid-configuration"
        )
        if found.get("issuer") != self._options.issuer:
            raise SignInRefused("The identity provider has another issuer than the one that is configured.")
        return found

    def _check_answer(self, metadata: Mapping[str, Any], answer: Mapping[str, str]) -> None:
        issuer = answer.get("iss")
        promised = metadata.get("authorization_response_iss_parameter_supported") is True
        if issuer != self._options.issuer and (issuer is not None or promised):
            raise SignInRefused("This answer comes from another identity provider.")
        if "code" not in answer:
            raise SignInRefused(f"{self._options.name} did not sign you in. Begin again.")

    async def _claims(
        self,
        client: AsyncOAuth2Client,
        metadata: Mapping[str, Any],
        token: Mapping[str, Any],
        attempt: Attempt,
    ) -> dict[str, Any]:
        keys: Any = await _document(client, metadata["jwks_uri"])
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
            raise SignInRefused("The identity provider's answer is not valid for this sign-in.") from error
        return dict(claims)

    async def _userinfo(self, client: AsyncOAuth2Client, address: str, subject: str) -> dict[str, Any]:
        found = await _document(client, address, authorized=True)
        if found.get("sub") != subject:
            raise SignInRefused("The identity provider answered for another person.")
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


def new_attempt(area: str, *, invitation: str = "", page: str = "") -> Attempt:
    """Return an attempt with a state, a nonce and a verifier of its own."""
    token = secrets.token_urlsafe
    return Attempt(token(32), token(32), token(48), area, invitation, page)


async def _document(client: AsyncOAuth2Client, address: str, *, authorized: bool = False) -> dict[str, Any]:
    response = await _trusting(client.request("GET", address, withhold_token=not authorized))
    try:
        response.raise_for_status()
        found = response.json()
    except (httpx2.HTTPError, ValueError) as error:
        raise SignInRefused(_AWAY) from error
    if not isinstance(found, dict):
        raise SignInRefused(_AWAY)
    return found


_AWAY: Final = "The identity provider does not answer as it should; try again."


async def _trusting(request: Any) -> Any:
    try:
        return await request
    except (httpx2.HTTPError, AuthlibBaseError) as error:
        raise SignInRefused(_AWAY) from error
