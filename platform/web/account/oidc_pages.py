"""Signing in by the identity provider: `/console/oidc/start` and the address it comes back to, `/console/oidc/callback`. Only where a
provider is set.

Starts and callbacks of a client network count as forms without a session do.

Invariant: what an attempt must match is in a cookie of the browser that began it, encrypted, for ten minutes. An invitation is
accepted by the form that names account and tenant, never by coming back alone.
"""

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from loraplex.platform.auth.identity_provider import Attempt, IdentityProvider, ProviderIdentity, new_attempt
from loraplex.platform.auth.provider_sign_in import (
    accept_by_provider,
    find_invitation,
    sign_in_by_provider,
)
from loraplex.platform.web.account.sealed_values import SealedValues, ValueT
from loraplex.platform.web.console.error_pages import USED_UP
from loraplex.platform.web.console.form_routes import OpenSubmission, submits_as_anybody
from loraplex.platform.web.console.forms import Entered
from loraplex.platform.web.console.page import OpenPage, opens_to_anybody, slowed
from loraplex.tenants.errors import (
    AlreadyMember,
    LinkNotValid,
    SignInRefused,
    SignInSlowed,
)
from loraplex.tenants.people.sessions import Area

START: Final = "/console/oidc/start"
CALLBACK: Final = "/console/oidc/callback"
LIFETIME_S: Final = 600
ACCEPT: Final = "/console/oidc/accept"
NOT_BEGUN: Final = "This sign-in was not begun in this browser, or took longer than ten minutes. Begin again."


class Acceptance(msgspec.Struct, frozen=True):
    """An invitation that the person whom the provider signed in has yet to accept. `attempt`: the attempt's state, which the form
    repeats: another attempt in the same browser would take the place of the invitation that is shown.
    """

    identity: ProviderIdentity
    invitation: str
    attempt: str


ATTEMPTS: Final = SealedValues(b"loraplex/oidc-attempt/v1", Attempt, LIFETIME_S)
ACCEPTANCES: Final = SealedValues(b"loraplex/oidc-acceptance/v1", Acceptance, LIFETIME_S)


async def identity_provider(request: Request) -> IdentityProvider:
    """Return the identity provider."""
    provider: IdentityProvider = request.app.state.endpoint.dependencies.identity_provider
    return provider


Provider = Annotated[IdentityProvider, Depends(identity_provider)]
Visitor = Annotated[OpenPage, opens_to_anybody()]
OpenForm = Annotated[OpenSubmission, submits_as_anybody()]

router = APIRouter()


@router.get(START)
async def start(
    page: Visitor, provider: Provider, area: str = "tenant", token: str = "", next: str = ""
) -> Response:
    """Send the browser to the provider. `token`: of an invitation to accept."""
    attempt = new_attempt("operator" if area == "operator" else "tenant", invitation=token, page=next)
    try:
        page.endpoint.count_try(page.http)
        address = await provider.begin(_redirect_uri(page), attempt)
    except (SignInRefused, SignInSlowed) as error:
        return _refused(page, error)
    response = RedirectResponse(address, 303)
    _keep(page, response, ATTEMPTS, attempt)
    return response


@router.get(CALLBACK)
async def callback(page: Visitor, provider: Provider) -> Response:
    """Check the provider's answer, and sign in; with an invitation, ask whether it is accepted."""
    attempt = _kept(page, ATTEMPTS)
    try:
        if attempt is None:
            raise SignInRefused(NOT_BEGUN)
        page.endpoint.count_try(page.http)
        answer = dict(page.http.query_params)
        identity = await provider.finish(_redirect_uri(page), attempt, answer)
        page.endpoint.give_back_try(page.http)
        if attempt.invitation:
            return await _ask(page, Acceptance(identity, attempt.invitation, attempt.state))
        response = await _enter(page, identity, attempt)
    except SignInSlowed as error:
        # The provider's answer stays good: the browser may bring it again.
        return _refused(page, error)
    except (SignInRefused, LinkNotValid) as error:
        response = _refused(page, error)
    page.cookies.drop_attempt(response)
    return response


@router.post(ACCEPT)
async def accept(submission: OpenForm) -> Response:
    """Accept the invitation, and sign in."""
    dependencies, accepted = submission.dependencies, _kept(submission, ACCEPTANCES)
    try:
        if accepted is None or accepted.attempt != submission.form.text("attempt"):
            raise SignInRefused(NOT_BEGUN)
        signed_in = await accept_by_provider(
            dependencies.database,
            accepted.identity,
            accepted.invitation,
            submission.client,
            publisher=dependencies.policy_publisher,
        )
        response = submission.enter(signed_in)
    except (SignInRefused, LinkNotValid, AlreadyMember) as error:
        response = _refused(submission, error)
    submission.cookies.drop_attempt(response)
    return response


async def _ask(page: OpenPage, acceptance: Acceptance) -> Response:
    """Show what is accepted, as whom. Raises `LinkNotValid`, `SignInRefused`."""
    identity = acceptance.identity
    link = await find_invitation(page.dependencies.database, identity, acceptance.invitation)
    response = page.show(
        "account/accept_by_provider.html", link=link, identity=identity, attempt=acceptance.attempt
    )
    _keep(page, response, ACCEPTANCES, acceptance)
    return response


async def _enter(page: OpenPage, identity: ProviderIdentity, attempt: Attempt) -> Response:
    area: Area | None = "operator" if attempt.area == "operator" else None
    signed_in = await sign_in_by_provider(page.dependencies.database, identity, page.client, area=area)
    return page.enter(signed_in, attempt.page)


def _keep(page: OpenPage, response: Response, values: SealedValues[ValueT], value: ValueT) -> None:
    """Leave a value in the browser; only `_kept` of the same values reads it."""
    sealed = values.seal(page.dependencies.derive_key, value)
    page.cookies.leave_attempt(response, sealed, LIFETIME_S)


def _kept(page: OpenPage, values: SealedValues[ValueT]) -> ValueT | None:
    return values.open(page.dependencies.derive_key, page.cookies.attempt() or "")


def _refused(page: OpenPage, error: Exception) -> Response:
    form = Entered(errors={"": USED_UP if isinstance(error, LinkNotValid) else str(error)})
    response = page.show("account/sign_in.html", status=403, form=form, signs_up=False)
    return slowed(response, error) if isinstance(error, SignInSlowed) else response


def _redirect_uri(page: OpenPage) -> str:
    return f"{page.endpoint.origin.of(page.http)}{CALLBACK}"
