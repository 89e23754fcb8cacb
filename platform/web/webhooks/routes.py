"""`/tenant/v1/webhooks`: where a tenant's events go, and what became of them. A webhook of another tenant is 404."""

from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.path_ids import PathId
from loraplex.platform.web.planes import TenantRequest, requires
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import documented
from loraplex.platform.web.sorting import BY_CREATION
from loraplex.tenants.errors import DeliveryNotFound, WebhookNotFound
from loraplex.tenants.scopes import BILLING_READ, TENANT_ADMIN
from loraplex.tenants.webhooks import queries, use_cases
from loraplex.tenants.webhooks.receiver_urls import MAX_URL_LENGTH
from loraplex.tenants.webhooks.records import (
    EVENT_TYPES,
    MAX_GRACE_S,
    DeliveryDocument,
    NewWebhookDocument,
    WebhookDocument,
)

Reader = Annotated[TenantRequest, requires(BILLING_READ)]
Admin = Annotated[TenantRequest, requires(TENANT_ADMIN)]
WebhookId = Annotated[UUID, PathId(WebhookNotFound, "no such webhook")]
DeliveryId = Annotated[UUID, PathId(DeliveryNotFound, "this webhook has no such delivery")]
Url = Annotated[str, Field(min_length=1, max_length=MAX_URL_LENGTH)]
EventType = Annotated[str, WithJsonSchema({"type": "string", "enum": list(EVENT_TYPES)})]
EventTypes = Annotated[list[EventType], Field(min_length=1, max_length=2 * len(EVENT_TYPES))]
FILTERS: Final = {"state": "Only deliveries in this state: `pending`, `delivered` or `dead`."}
NEW: Final = documented(409, 422, response=NewWebhookDocument, status=201)

router = APIRouter()


class NewWebhookBody(RequestModel):
    """`url`: `https`, port 443 or 1024 to 65535, on a public address. `events`: the types of events that it receives."""

    url: Url
    events: EventTypes


class WebhookPatch(RequestModel):
    """The fields to change; those that are absent stay unchanged."""

    url: Url = Field(default_factory=str)
    events: EventTypes = Field(default_factory=list)


class WebhookRotateBody(RequestModel):
    """`grace_seconds`: how long messages are signed with the replaced secret, too."""

    grace_seconds: int = Field(default=24 * 3600, ge=0, le=MAX_GRACE_S)


@router.get("/webhooks", **listed(WebhookDocument))
async def list_webhooks(request: Reader) -> Response:
    page = request.page(BY_CREATION)
    return await request.listing(page, queries.webhooks, request.tenant_id, page)


@router.get("/webhooks/{webhook_id}", responses=documented(response=WebhookDocument))
async def get_webhook(request: Reader, webhook_id: WebhookId) -> Response:
    return await request.read(queries.webhook, request.tenant_id, webhook_id)


@router.post(
    "/webhooks", status_code=201, responses=NEW, openapi_extra=described(NewWebhookBody, repeatable=True)
)
async def create_webhook(
    request: Admin, body: Annotated[NewWebhookBody, request_model(NewWebhookBody)]
) -> Response:
    """Add an address for events: at most 16. Messages are signed as Standard Webhooks says, with the secret."""
    rules = request.dependencies.webhook_rules
    return await request.run(use_cases.create, request.tenant_id, rules, body.url, body.events)


@router.post(
    "/webhooks/{webhook_id}/rotate",
    status_code=201,
    responses=NEW,
    openapi_extra=described(WebhookRotateBody, optional_body=True, repeatable=True),
)
async def rotate_secret(
    request: Admin,
    webhook_id: WebhookId,
    body: Annotated[WebhookRotateBody, request_model(WebhookRotateBody, optional=True)],
) -> Response:
    """Replace the secret. For `grace_seconds`, messages have a signature with each of both."""
    rules = request.dependencies.webhook_rules
    return await request.run(use_cases.rotate, request.tenant_id, webhook_id, rules, body.grace_seconds)


@router.patch(
    "/webhooks/{webhook_id}",
    responses=documented(412, 428, response=WebhookDocument),
    openapi_extra=described(WebhookPatch, if_match=True),
)
async def change_webhook(
    request: Admin, webhook_id: WebhookId, body: Annotated[WebhookPatch, request_model(WebhookPatch)]
) -> Response:
    """Change URL or events. Deliveries that wait go to the new URL."""
    rules, given = request.dependencies.webhook_rules, body.model_dump(exclude_unset=True)
    return await request.run(
        use_cases.change,
        request.tenant_id,
        webhook_id,
        rules,
        url=given.get("url"),
        events=given.get("events"),
        seen=request.if_match,
    )


@router.delete("/webhooks/{webhook_id}", status_code=204, responses=documented())
async def delete_webhook(request: Admin, webhook_id: WebhookId) -> Response:
    """Delete the webhook and its deliveries, also those that wait."""
    return await request.run(use_cases.delete, request.tenant_id, webhook_id)


@router.get("/webhooks/{webhook_id}/deliveries", **listed(DeliveryDocument, FILTERS))
async def list_deliveries(request: Reader, webhook_id: WebhookId) -> Response:
    """Deliveries, newest first; `state=dead` lists those that were given up. They are kept for 30 days."""
    page = request.page(BY_CREATION, FILTERS)
    state = page.filters.get("state")
    return await request.listing(page, queries.deliveries, request.tenant_id, webhook_id, state, page)


@router.post(
    "/webhooks/{webhook_id}/deliveries/{delivery_id}/replay",
    status_code=202,
    responses=documented(409, 422, response=DeliveryDocument, status=202),
    openapi_extra=described(repeatable=True),
)
async def replay_delivery(request: Admin, webhook_id: WebhookId, delivery_id: DeliveryId) -> Response:
    """Repeat an ended delivery: the same event and id, with as many attempts as a new one."""
    return await request.run(use_cases.replay, request.tenant_id, webhook_id, delivery_id)


@router.delete("/webhooks/{webhook_id}/deliveries/{delivery_id}", status_code=204, responses=documented(409))
async def discard_delivery(request: Admin, webhook_id: WebhookId, delivery_id: DeliveryId) -> Response:
    """Delete an ended delivery, such as one that was given up."""
    return await request.run(use_cases.discard, request.tenant_id, webhook_id, delivery_id)
