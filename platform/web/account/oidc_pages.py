"""Signing in by the identity provider: `/console/oidc/start` and the address it comes back to, `/console/oidc/callback`.

Invariant: what an attempt must match is in a cookie of the browser that began it, encrypted, for ten minutes. An invitation is
accepted by the form that names account and tenant, never by coming back alone.
"""

import base64
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec
from cryptography.fernet import Fernet, InvalidToken
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from loraplex.platform.auth.identity_provider import Attempt, IdentityProvider, ProviderIdentity, new_attempt
from loraplex.platform.services.people.errors import (
    AlreadyMember,
    LinkNotValid,
    SignInRefused,
    SignInSlowed,
)
from loraplex.platform.services.people.provider_sign_in import (
    accept_by_provider,
    find_invitation,
    sign_in_by_provider,
)
from loraplex.platform.services.people.sessions import Area
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.error_pages import USED_UP
from loraplex.platform.web.console.forms import Entered, Form, read_open_form

START: Final = "/console/oidc/start"
CALLBACK: Final = "/console/oidc/callback"
DOMAIN: Final = b"loraplex/oidc-attempt/v1"
LIFETIME_S: Final = 600
ACCEPT: Final = "/console/oidc/accept"
ACCEPT_DOMAIN: Final = b"loraplex/oidc-acceptance/v1"
FORM = Depends(read_open_form)
KeptT = TypeVar("KeptT", bound=msgspec.Struct)
NOT_BEGUN: Final = "This sign-in was not begun in this browser, or took longer than ten minutes. Begin again."


class Acceptance(msgspec.Struct, frozen=True):
    """An invitation that the person whom the provider signed in has yet to accept. `attempt`: the attempt's state, which the form
    repeats: another attempt in the same browser would take the place of the invitation that is shown.
    """

    identity: ProviderIdentity
    invitation: str
    attempt: str


def oidc_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes; without a provider there are none."""
    router = APIRouter()
    provider = endpoint.dependencies.identity_provider
    if provider is not None:
        pages = ProviderPages(endpoint, provider)
        router.add_api_route(START, pages.start, methods=["GET"], response_model=None)
        router.add_api_route(CALLBACK, pages.callback, methods=["GET"], response_model=None)
        router.add_api_route(ACCEPT, pages.accept, methods=["POST"], response_model=None)
    return router


@dataclass(frozen=True, slots=True)
class ProviderPages:
    """The way to the provider and back. Starts and callbacks of a client network count as forms without a session do."""

    endpoint: ConsoleEndpoint
    provider: IdentityProvider

    async def start(
        self, request: Request, area: str = "tenant", token: str = "", next: str = ""
    ) -> Response:
        """Send the browser to the provider. `token`: of an invitation to accept."""
        attempt = new_attempt("operator" if area == "operator" else "tenant", invitation=token, page=next)
        try:
            self.endpoint.count_try(request)
            address = await self.provider.begin(self._redirect_uri(request), attempt)
        except (SignInRefused, SignInSlowed) as error:
            return self._refused(request, error)
        response = RedirectResponse(address, 303)
        self._keep(request, response, DOMAIN, attempt)
        return response

    async def callback(self, request: Request) -> Response:
        """Check the provider's answer, and sign in; with an invitation, ask whether it is accepted."""
        attempt = self._kept(request, DOMAIN, Attempt)
        try:
            if attempt is None:
                raise SignInRefused(NOT_BEGUN)
            self.endpoint.count_try(request)
            answer = dict(request.query_params)
            identity = await self.provider.finish(self._redirect_uri(request), attempt, answer)
            self.endpoint.give_back_try(request)
            if attempt.invitation:
                return await self._ask(request, Acceptance(identity, attempt.invitation, attempt.state))
            response = await self._enter(request, identity, attempt)
        except SignInSlowed as error:
            # The provider's answer stays good: the browser may bring it again.
            return self._refused(request, error)
        except (SignInRefused, LinkNotValid) as error:
            response = self._refused(request, error)
        self.endpoint.cookies.drop_attempt(request, response)
        return response

    async def accept(self, request: Request, form: Annotated[Form, FORM]) -> Response:
        """Accept the invitation, and sign in."""
        dependencies, accepted = self.endpoint.dependencies, self._kept(request, ACCEPT_DOMAIN, Acceptance)
        address, agent = dependencies.addresses.of(request), request.headers.get("user-agent")
        try:
            if accepted is None or accepted.attempt != form.text("attempt"):
                raise SignInRefused(NOT_BEGUN)
            signed_in = await accept_by_provider(
                *(dependencies.database, accepted.identity, accepted.invitation, address, agent),
                publisher=dependencies.policy_publisher,
            )
            response = self.endpoint.enter(request, signed_in)
        except (SignInRefused, LinkNotValid, AlreadyMember) as error:
            response = self._refused(request, error)
        self.endpoint.cookies.drop_attempt(request, response)
        return response

    async def _ask(self, request: Request, acceptance: Acceptance) -> Response:
        """Show what is accepted, as whom. Raises `LinkNotValid`, `SignInRefused`."""
        database, identity = self.endpoint.dependencies.database, acceptance.identity
        link = await find_invitation(database, identity, acceptance.invitation)
        response = self.endpoint.page(
            *(request, None, "account/accept_by_provider.html"),
            link=link,
            identity=identity,
            attempt=acceptance.attempt,
        )
        self._keep(request, response, ACCEPT_DOMAIN, acceptance)
        return response

    async def _enter(self, request: Request, identity: ProviderIdentity, attempt: Attempt) -> Response:
        dependencies = self.endpoint.dependencies
        address, agent = dependencies.addresses.of(request), request.headers.get("user-agent")
        area: Area | None = "operator" if attempt.area == "operator" else None
        signed_in = await sign_in_by_provider(dependencies.database, identity, address, agent, area=area)
        return self.endpoint.enter(request, signed_in, attempt.page)

    def _keep(self, request: Request, response: Response, domain: bytes, value: msgspec.Struct) -> None:
        """Leave an encrypted value in the browser; only `_kept` of the same domain reads it."""
        sealed = self._fernet(domain).encrypt(msgspec.json.encode(value)).decode()
        self.endpoint.cookies.leave_attempt(request, response, sealed, LIFETIME_S)

    def _kept(self, request: Request, domain: bytes, wanted: type[KeptT]) -> KeptT | None:
        sealed = self.endpoint.cookies.attempt(request)
        try:
            opened = self._fernet(domain).decrypt(sealed or "", ttl=LIFETIME_S)
            return msgspec.json.decode(opened, type=wanted)
        except (InvalidToken, ValueError):
            return None

    def _refused(self, request: Request, error: Exception) -> Response:
        form = Entered(errors={"": USED_UP if isinstance(error, LinkNotValid) else str(error)})
        status = 429 if isinstance(error, SignInSlowed) else 403
        template = "account/sign_in.html"
        response = self.endpoint.page(request, None, template, status=status, form=form, signs_up=False)
        if isinstance(error, SignInSlowed):
            response.headers["retry-after"] = str(error.retry_after_s)
        return response

    def _redirect_uri(self, request: Request) -> str:
        return f"{self.endpoint.origin.of(request)}{CALLBACK}"

    def _fernet(self, domain: bytes) -> Fernet:
        return Fernet(base64.urlsafe_b64encode(self.endpoint.dependencies.derive_key(domain)))
