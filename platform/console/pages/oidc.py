"""Signing in by the identity provider: `/console/oidc/start` and the address it comes back to, `/console/oidc/callback`.

Invariant: what an attempt must match is in a cookie of the browser that began it, encrypted, for ten minutes.
"""

import base64
from dataclasses import dataclass
from typing import Final

import msgspec
from cryptography.fernet import Fernet, InvalidToken
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from loraplex.platform.auth.identity_provider import Attempt, IdentityProvider, new_attempt
from loraplex.platform.console.endpoint import ConsoleEndpoint
from loraplex.platform.console.forms import Entered
from loraplex.platform.services.people.errors import AlreadyMember, LinkNotValid, SignInRefused
from loraplex.platform.services.people.provider_sign_in import accept_by_provider, sign_in_by_provider
from loraplex.platform.services.people.sessions import Area
from loraplex.platform.services.people.sign_in import SignedIn

START: Final = "/console/oidc/start"
CALLBACK: Final = "/console/oidc/callback"
DOMAIN: Final = b"loraplex/oidc-attempt/v1"
LIFETIME_S: Final = 600
NOT_BEGUN: Final = "This sign-in was not begun in this browser, or took longer than ten minutes. Begin again."


def oidc_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes; without a provider there are none."""
    router = APIRouter()
    provider = endpoint.dependencies.identity_provider
    if provider is not None:
        pages = ProviderPages(endpoint, provider)
        router.add_api_route(START, pages.start, methods=["GET"], response_model=None)
        router.add_api_route(CALLBACK, pages.callback, methods=["GET"], response_model=None)
    return router


@dataclass(frozen=True, slots=True)
class ProviderPages:
    """The way to the provider and back."""

    endpoint: ConsoleEndpoint
    provider: IdentityProvider

    async def start(
        self, request: Request, area: str = "tenant", token: str = "", next: str = ""
    ) -> Response:
        """Send the browser to the provider. `token`: of an invitation to accept."""
        attempt = new_attempt("operator" if area == "operator" else "tenant", invitation=token, page=next)
        try:
            address = await self.provider.begin(self._redirect_uri(request), attempt)
        except SignInRefused as error:
            return self._refused(request, str(error))
        response = RedirectResponse(address, 303)
        sealed = self._fernet.encrypt(msgspec.json.encode(attempt)).decode()
        self.endpoint.cookies.leave_attempt(request, response, sealed, LIFETIME_S)
        return response

    async def callback(self, request: Request) -> Response:
        """Check the provider's answer, and sign in."""
        attempt = self._attempt(request)
        try:
            if attempt is None:
                raise SignInRefused(NOT_BEGUN)
            response = self.endpoint.enter(request, await self._sign_in(request, attempt), attempt.page)
        except (SignInRefused, LinkNotValid, AlreadyMember) as error:
            response = self._refused(request, str(error))
        self.endpoint.cookies.drop_attempt(request, response)
        return response

    async def _sign_in(self, request: Request, attempt: Attempt) -> SignedIn:
        dependencies = self.endpoint.dependencies
        answer = dict(request.query_params)
        identity = await self.provider.finish(self._redirect_uri(request), attempt, answer)
        address, agent = dependencies.addresses.of(request), request.headers.get("user-agent")
        if attempt.invitation:
            return await accept_by_provider(
                dependencies.database, identity, attempt.invitation, address, agent
            )
        area: Area | None = "operator" if attempt.area == "operator" else None
        return await sign_in_by_provider(dependencies.database, identity, address, agent, area=area)

    def _attempt(self, request: Request) -> Attempt | None:
        sealed = self.endpoint.cookies.attempt(request)
        try:
            return msgspec.json.decode(self._fernet.decrypt(sealed or "", ttl=LIFETIME_S), type=Attempt)
        except (InvalidToken, ValueError):
            return None

    def _refused(self, request: Request, text: str) -> Response:
        form = Entered(errors={"": text})
        return self.endpoint.page(request, None, "sign_in/sign_in.html", status=403, form=form)

    def _redirect_uri(self, request: Request) -> str:
        return f"{self.endpoint.origin.of(request)}{CALLBACK}"

    @property
    def _fernet(self) -> Fernet:
        return Fernet(base64.urlsafe_b64encode(self.endpoint.dependencies.derive_key(DOMAIN)))
