"""Every route of the planes and the scope it asks for: the table that the matrix of roles is derived from.

A route that is not in it fails `test_route_roles.py`; one with an id in its path also needs a case in
`test_route_isolation.py`.
"""

from typing import Final

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

ANY_KEY: Final = "any key of a tenant"
OPERATOR: Final = "an operator's key"
SCOPES: Final = {
    "POST /v1/chat/completions": "inference",
    "POST /v1/completions": "inference",
    "POST /v1/messages": "inference",
    "POST /v1/messages/count_tokens": "inference",
    "POST /v1/responses": "inference",
    "POST /v1/responses/input_tokens": "inference",
    "POST /v1/decisions": "inference",
    "POST /v1/tokenize": "inference",
    "POST /v1/detokenize": "inference",
    "GET /v1/models": "inference",
    "GET /v1/models/{name:path}": "inference",
    "GET /tenant/v1/me": ANY_KEY,
    "GET /tenant/v1/audit": "tenant:admin",
    "GET /tenant/v1/keys": "keys:write",
    "POST /tenant/v1/keys": "keys:write",
    "GET /tenant/v1/keys/{key_id}": "keys:write",
    "PATCH /tenant/v1/keys/{key_id}": "keys:write",
    "DELETE /tenant/v1/keys/{key_id}": "keys:write",
    "POST /tenant/v1/keys/{key_id}/rotate": "keys:write",
    "GET /tenant/v1/adapters": "adapters:read",
    "POST /tenant/v1/adapters": "adapters:write",
    "GET /tenant/v1/adapters/{name}": "adapters:read",
    "PATCH /tenant/v1/adapters/{name}": "adapters:write",
    "DELETE /tenant/v1/adapters/{name}": "adapters:write",
    "GET /tenant/v1/adapters/{name}/versions": "adapters:read",
    "GET /tenant/v1/adapters/{name}/versions/{version}": "adapters:read",
    "PATCH /tenant/v1/adapters/{name}/versions/{version}": "adapters:write",
    "DELETE /tenant/v1/adapters/{name}/versions/{version}": "adapters:write",
    "POST /tenant/v1/adapters/{name}/versions/{version}/deprecate": "adapters:write",
    "GET /tenant/v1/adapters/{name}/versions/{version}/decision-calibration": "adapters:read",
    "PUT /tenant/v1/adapters/{name}/versions/{version}/decision-calibration": "adapters:write",
    "POST /tenant/v1/adapters/{name}/versions/{version}/restore": "adapters:write",
    "GET /tenant/v1/adapters/{name}/aliases": "adapters:read",
    "GET /tenant/v1/adapters/{name}/aliases/{alias}": "adapters:read",
    "PUT /tenant/v1/adapters/{name}/aliases/{alias}": "adapters:write",
    "DELETE /tenant/v1/adapters/{name}/aliases/{alias}": "adapters:write",
    "POST /tenant/v1/adapters/{name}/aliases/{alias}/rollback": "adapters:write",
    "POST /tenant/v1/adapters/{name}/versions": "adapters:write",
    "POST /tenant/v1/adapters/{name}/uploads": "adapters:write",
    "GET /tenant/v1/uploads/{upload_id}": "adapters:write",
    "DELETE /tenant/v1/uploads/{upload_id}": "adapters:write",
    "PUT /tenant/v1/uploads/{upload_id}/{file}/parts/{number}": "adapters:write",
    "POST /tenant/v1/uploads/{upload_id}/complete": "adapters:write",
    "GET /tenant/v1/suites": "adapters:read",
    "POST /tenant/v1/suites": "adapters:write",
    "GET /tenant/v1/suites/{name}": "adapters:read",
    "GET /tenant/v1/suites/{name}/content": "adapters:read",
    "DELETE /tenant/v1/suites/{name}": "adapters:write",
    "POST /tenant/v1/adapters/{name}/versions/{version}/evaluations": "adapters:write",
    "GET /tenant/v1/adapters/{name}/versions/{version}/evaluations": "adapters:read",
    "GET /tenant/v1/evaluations/{evaluation_id}": "adapters:read",
    "GET /tenant/v1/evaluations/{evaluation_id}/report": "adapters:read",
    "POST /tenant/v1/evaluations/{evaluation_id}/cancel": "adapters:write",
    "GET /tenant/v1/adapters/{name}/aliases/{alias}/gate": "adapters:read",
    "PUT /tenant/v1/adapters/{name}/aliases/{alias}/gate": "adapters:write",
    "DELETE /tenant/v1/adapters/{name}/aliases/{alias}/gate": "adapters:write",
    "GET /operator/v1/suites": OPERATOR,
    "POST /operator/v1/suites": OPERATOR,
    "DELETE /operator/v1/suites/{name}": OPERATOR,
    "GET /tenant/v1/data-policy": ANY_KEY,
    "PUT /tenant/v1/data-policy": "tenant:admin",
    "POST /tenant/v1/suites/from-requests": "adapters:write",
    "GET /tenant/v1/users": "tenant:admin",
    "POST /tenant/v1/users": "tenant:admin",
    "PATCH /tenant/v1/users/{user_id}": "tenant:admin",
    "DELETE /tenant/v1/users/{user_id}": "tenant:admin",
    "GET /tenant/v1/webhooks": "billing:read",
    "POST /tenant/v1/webhooks": "tenant:admin",
    "GET /tenant/v1/webhooks/{webhook_id}": "billing:read",
    "PATCH /tenant/v1/webhooks/{webhook_id}": "tenant:admin",
    "DELETE /tenant/v1/webhooks/{webhook_id}": "tenant:admin",
    "POST /tenant/v1/webhooks/{webhook_id}/rotate": "tenant:admin",
    "GET /tenant/v1/webhooks/{webhook_id}/deliveries": "billing:read",
    "POST /tenant/v1/webhooks/{webhook_id}/deliveries/{delivery_id}/replay": "tenant:admin",
    "DELETE /tenant/v1/webhooks/{webhook_id}/deliveries/{delivery_id}": "tenant:admin",
    "GET /tenant/v1/quotas": "usage:read",
    "GET /tenant/v1/events": "usage:read",
    "GET /tenant/v1/limits/explain/{request_id}": "usage:read",
    "GET /tenant/v1/usage": "usage:read",
    "GET /tenant/v1/requests": "usage:read",
    "GET /tenant/v1/requests/{request_id}": "usage:read",
    "GET /tenant/v1/requests/{request_id}/timeline": "usage:read",
    "GET /tenant/v1/keys/{key_id}/quotas": "keys:write",
    "PUT /tenant/v1/keys/{key_id}/quotas": "keys:write",
    "GET /tenant/v1/adapters/{name}/quotas": "adapters:read",
    "PUT /tenant/v1/adapters/{name}/quotas": "adapters:write",
    "GET /tenant/v1/billing/rate-card": "billing:read",
    "GET /tenant/v1/billing/credits": "billing:read",
    "GET /tenant/v1/billing/invoices": "billing:read",
    "GET /tenant/v1/billing/invoices/{invoice_id}": "billing:read",
    "GET /operator/v1/tenants": OPERATOR,
    "POST /operator/v1/tenants": OPERATOR,
    "GET /operator/v1/tenants/{tenant_id}": OPERATOR,
    "DELETE /operator/v1/tenants/{tenant_id}": OPERATOR,
    "POST /operator/v1/tenants/{tenant_id}/users": OPERATOR,
    "POST /operator/v1/tenants/{tenant_id}/suspend": OPERATOR,
    "POST /operator/v1/tenants/{tenant_id}/resume": OPERATOR,
    "PATCH /operator/v1/tenants/{tenant_id}/tier": OPERATOR,
    "GET /operator/v1/tenants/{tenant_id}/billing": OPERATOR,
    "PATCH /operator/v1/tenants/{tenant_id}/billing": OPERATOR,
    "GET /operator/v1/tenants/{tenant_id}/quotas": OPERATOR,
    "PATCH /operator/v1/tenants/{tenant_id}/quotas": OPERATOR,
    "GET /operator/v1/rate-cards": OPERATOR,
    "POST /operator/v1/rate-cards": OPERATOR,
    "POST /operator/v1/rate-cards/preview": OPERATOR,
    "GET /operator/v1/tenants/{tenant_id}/credits": OPERATOR,
    "POST /operator/v1/tenants/{tenant_id}/credits": OPERATOR,
    "GET /operator/v1/invoices": OPERATOR,
    "POST /operator/v1/invoices/preview": OPERATOR,
    "POST /operator/v1/invoices/finalize": OPERATOR,
    "GET /operator/v1/invoices/{invoice_id}": OPERATOR,
    "POST /operator/v1/invoices/{invoice_id}/paid": OPERATOR,
    "POST /operator/v1/invoices/{invoice_id}/void": OPERATOR,
    "GET /operator/v1/engine": OPERATOR,
    "GET /operator/v1/engine/adapters": OPERATOR,
    "POST /operator/v1/engines": OPERATOR,
    "POST /operator/v1/engines/{number}/drain": OPERATOR,
    "GET /operator/v1/audit": OPERATOR,
    "GET /operator/v1/usage": OPERATOR,
    "POST /operator/v1/usage/corrections": OPERATOR,
}
DOCUMENTATION: Final = {"/openapi.json", "/docs", "/docs/", "/docs/static/{name:path}"}


def in_process(app: FastAPI) -> httpx.AsyncClient:
    """A client without a socket between: these tests make very many requests."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def routes_of(app: FastAPI) -> set[str]:
    """`METHOD /path` of every route that asks for a key."""
    found = set()
    for context in iter_route_contexts(app.routes):
        if isinstance(context.original_route, APIRoute):
            found |= {f"{method} {context.path}" for method in context.methods or ()}
        elif context.path not in DOCUMENTATION:
            found.add(f"{type(context.original_route).__name__} {context.path}")
    return found
