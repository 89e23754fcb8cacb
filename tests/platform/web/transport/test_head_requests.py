"""HEAD on every route: what GET answers, without the body, and an access line of its own."""

import re
from typing import Final
from uuid import uuid4

import httpx
from tests.platform.web.gateway import StartGateway, start_gateway
from tests.platform.web.route_table import DOCUMENTATION, OPERATOR, SCOPES, routes_of

from loraplex.platform.observability.request_record import FinishedRequest
from loraplex.tenants.api_keys.keys import KeyRepository

__all__ = ["start_gateway"]

CHANGING: Final = frozenset({"date", "x-request-id", "transfer-encoding"})
"""Of each response alone; how long a body of unknown length is says its own framing."""


def path_of(route: str) -> str:
    """The path of a route, with ids that nothing has."""
    return re.sub(r"\{[^}]+\}", str(uuid4()), route.partition(" ")[2])


def lasting(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name not in CHANGING}


async def test_head_is_answered_as_get_without_the_body(start_gateway: StartGateway) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("admins", ("tenant:admin",))
    async with gateway.database.as_operator() as session:
        operator = (await KeyRepository(session).create(None, "operator", ["operator"])).plaintext
    planes = sorted(route for route in routes_of(gateway.app) if route.startswith("GET "))
    documents = [f"GET {path}" for path in DOCUMENTATION]
    statuses = set()
    # On one connection: a body behind HEAD would be read as the next response.
    async with httpx.AsyncClient(
        base_url=gateway.url, limits=httpx.Limits(max_connections=1), timeout=30
    ) as client:
        for route in (*planes, *documents, "GET /tenant/v1/usage?format=csv"):
            for key in (admin if SCOPES.get(route) != OPERATOR else operator, "none"):
                path, headers = path_of(route), {"authorization": f"Bearer {key}"}
                asked = await client.get(path, headers=headers)
                head = await client.head(path, headers=headers)
                assert (head.status_code, head.content) == (asked.status_code, b""), route
                assert lasting(head) == lasting(asked), route
                statuses.add(head.status_code)
    assert statuses == {200, 303, 401, 404}


async def test_head_where_there_is_no_get_is_refused_as_get(start_gateway: StartGateway) -> None:
    gateway = await start_gateway()
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for path in ("/v1/chat/completions", "/v1/tokenize"):
            assert (await client.head(path)).status_code == (await client.get(path)).status_code == 405
    assert gateway.recorder.timings == []


async def test_head_has_an_access_line_of_its_route(start_gateway: StartGateway) -> None:
    seen: list[FinishedRequest] = []
    gateway = await start_gateway(observers=[seen.append])
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        await client.head("/v1/models", headers={"authorization": f"Bearer {gateway.key}"})
    (finished,) = seen
    assert (finished.method, finished.handler, finished.status) == ("HEAD", "/v1/models", 200)
    assert finished.tenant_id is not None
