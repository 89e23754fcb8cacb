"""`/tenant/v1/webhooks`: where a tenant's events go, and what became of them. A webhook of another tenant is 404."""

from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.etags import if_match
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.request_bodies import request_model
from loraplex.platform.web.responses import ApiResponse, documented
from loraplex.platform.web.schemas.webhooks import (
    DeliveryDocument,
    NewWebhookBody,
    NewWebhookDocument,
    WebhookDocument,
    WebhookPatch,
    WebhookRotateBody,
    delivery_document,
    new_webhook_document,
    to_response,
)
from loraplex.platform.web.sorting import SortOrder, by_time
from loraplex.tenants.errors import DeliveryNotFound, WebhookNotFound
from loraplex.tenants.ids import canonical_uuid
from loraplex.tenants.models import WebhookEndpoint
from loraplex.tenants.scopes import BILLING_READ, TENANT_ADMIN
from loraplex.tenants.unit_of_work import UnitOfWork
from loraplex.tenants.webhooks import use_cases as webhooks
from loraplex.tenants.webhooks.endpoints import Delivery, WebhookRepository
from loraplex.tenants.webhooks.use_cases import IssuedWebhook, WebhookRules

OLDEST_FIRST: Final[SortOrder[WebhookEndpoint, tuple[datetime, UUID]]] = by_time(
    lambda record: (record.created_at, record.id)
)
NEWEST_FIRST: Final[SortOrder[Delivery, tuple[datetime, UUID]]] = by_time(
    lambda delivery: (delivery[0].created_at, delivery[0].id)
)
FILTERS: Final = {"state": "Only deliveries in this state: `pending`, `delivered` or `dead`."}


def webhooks_router(
    endpoint: ManagementEndpoint, authenticator: Authenticator, rules: WebhookRules
) -> APIRouter:
    router = APIRouter()
    reader = Depends(authenticator.requires(BILLING_READ))
    admin = Depends(authenticator.requires(TENANT_ADMIN))
    _add_reads(router, endpoint, reader)
    _add_issuing(router, endpoint, admin, rules)
    _add_changes(router, endpoint, admin, rules)
    _add_deliveries(router, endpoint, reader, admin)
    return router


def _add_reads(router: APIRouter, endpoint: ManagementEndpoint, reader: Any) -> None:
    @router.get("/webhooks", **listed(WebhookDocument))
    async def list_webhooks(request: Request, caller: Annotated[Caller, reader]) -> Response:
        return await endpoint.listing(
            request,
            caller,
            OLDEST_FIRST,
            lambda session, page: WebhookRepository(session, caller.tenant_id).page(page.after, page.fetch),
            to_response,
        )

    @router.get("/webhooks/{webhook_id}", responses=documented(response=WebhookDocument))
    async def get_webhook(webhook_id: str, caller: Annotated[Caller, reader]) -> Response:
        async def work(session: AsyncSession) -> ApiResponse:
            repository = WebhookRepository(session, caller.tenant_id)
            return webhook_response(await repository.get(_webhook_id(webhook_id)))

        return await endpoint.read(caller, work)


def _add_issuing(router: APIRouter, endpoint: ManagementEndpoint, admin: Any, rules: WebhookRules) -> None:
    new = documented(409, 422, response=NewWebhookDocument, status=201)
    rotation = described(WebhookRotateBody, optional_body=True, repeatable=True)

    @router.post(
        "/webhooks", status_code=201, responses=new, openapi_extra=described(NewWebhookBody, repeatable=True)
    )
    async def create_webhook(
        request: Request,
        caller: Annotated[Caller, admin],
        body: Annotated[NewWebhookBody, request_model(NewWebhookBody)],
    ) -> Response:
        """Add an address for events: at most 16. Messages are signed as Standard Webhooks says, with the secret."""

        async def work(uow: UnitOfWork) -> ApiResponse:
            return issued_response(await webhooks.create(uow, rules, caller.tenant_id, body.url, body.events))

        return await endpoint.perform(request, caller, work)

    @router.post("/webhooks/{webhook_id}/rotate", status_code=201, responses=new, openapi_extra=rotation)
    async def rotate_secret(
        webhook_id: str,
        request: Request,
        caller: Annotated[Caller, admin],
        body: Annotated[WebhookRotateBody, request_model(WebhookRotateBody, optional=True)],
    ) -> Response:
        """Replace the secret. For `grace_seconds`, messages have a signature with each of both."""

        async def work(uow: UnitOfWork) -> ApiResponse:
            identity = _webhook_id(webhook_id)
            return issued_response(
                await webhooks.rotate(uow, rules, caller.tenant_id, identity, body.grace_seconds)
            )

        return await endpoint.perform(request, caller, work)


def _add_changes(router: APIRouter, endpoint: ManagementEndpoint, admin: Any, rules: WebhookRules) -> None:
    changed = documented(412, 428, response=WebhookDocument)

    @router.patch(
        "/webhooks/{webhook_id}", responses=changed, openapi_extra=described(WebhookPatch, if_match=True)
    )
    async def change_webhook(
        webhook_id: str,
        request: Request,
        caller: Annotated[Caller, admin],
        body: Annotated[WebhookPatch, request_model(WebhookPatch)],
    ) -> Response:
        """Change URL or events. Deliveries that wait go to the new URL."""
        seen, given = if_match(request), body.model_dump(exclude_unset=True)

        async def work(uow: UnitOfWork) -> ApiResponse:
            identity = _webhook_id(webhook_id)
            return webhook_response(
                await webhooks.change(uow, rules, caller.tenant_id, identity, **given, seen=seen)
            )

        return await endpoint.perform(request, caller, work)

    @router.delete("/webhooks/{webhook_id}", status_code=204, responses=documented())
    async def delete_webhook(webhook_id: str, request: Request, caller: Annotated[Caller, admin]) -> Response:
        """Delete the webhook and its deliveries, also those that wait."""

        async def work(uow: UnitOfWork) -> ApiResponse:
            await webhooks.delete(uow, caller.tenant_id, _webhook_id(webhook_id))
            return ApiResponse(204)

        return await endpoint.perform(request, caller, work)


def _add_deliveries(router: APIRouter, endpoint: ManagementEndpoint, reader: Any, admin: Any) -> None:
    @router.get("/webhooks/{webhook_id}/deliveries", **listed(DeliveryDocument, FILTERS))
    async def list_deliveries(
        webhook_id: str, request: Request, caller: Annotated[Caller, reader]
    ) -> Response:
        """Deliveries, newest first; `state=dead` lists those that were given up. They are kept for 30 days."""
        return await endpoint.listing(
            request,
            caller,
            NEWEST_FIRST,
            lambda session, page: WebhookRepository(session, caller.tenant_id).deliveries(
                _webhook_id(webhook_id), page.filters.get("state"), page.after, page.fetch
            ),
            delivery_document,
            FILTERS,
        )

    @router.post(
        "/webhooks/{webhook_id}/deliveries/{delivery_id}/replay",
        status_code=202,
        responses=documented(409, 422, response=DeliveryDocument, status=202),
        openapi_extra=described(repeatable=True),
    )
    async def replay_delivery(
        webhook_id: str, delivery_id: str, request: Request, caller: Annotated[Caller, admin]
    ) -> Response:
        """Repeat an ended delivery: the same event and id, with as many attempts as a new one."""

        async def work(uow: UnitOfWork) -> ApiResponse:
            identity, delivery = _webhook_id(webhook_id), canonical_uuid(delivery_id)
            if delivery is None:
                raise DeliveryNotFound("this webhook has no such delivery")
            replayed = await webhooks.replay(uow, caller.tenant_id, identity, delivery)
            return ApiResponse(202, delivery_document(replayed))

        return await endpoint.perform(request, caller, work)

    @router.delete(
        "/webhooks/{webhook_id}/deliveries/{delivery_id}", status_code=204, responses=documented(409)
    )
    async def discard_delivery(
        webhook_id: str, delivery_id: str, request: Request, caller: Annotated[Caller, admin]
    ) -> Response:
        """Delete an ended delivery, such as one that was given up."""

        async def work(uow: UnitOfWork) -> ApiResponse:
            identity, delivery = _webhook_id(webhook_id), canonical_uuid(delivery_id)
            if delivery is None:
                raise DeliveryNotFound("this webhook has no such delivery")
            await webhooks.discard(uow, caller.tenant_id, identity, delivery)
            return ApiResponse(204)

        return await endpoint.perform(request, caller, work)


def webhook_response(record: WebhookEndpoint) -> ApiResponse:
    return ApiResponse(200, to_response(record), etag=record.revision)


def issued_response(issued: IssuedWebhook) -> ApiResponse:
    return ApiResponse(
        201,
        new_webhook_document(issued),
        etag=issued.record.revision,
        headers={"cache-control": "no-store"},
    )


def _webhook_id(text: str) -> UUID:
    """Parse an id. Raises `WebhookNotFound`."""
    parsed = canonical_uuid(text)
    if parsed is None:
        raise WebhookNotFound("no such webhook")
    return parsed
