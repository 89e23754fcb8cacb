"""The gateway of the inference plane's tests, and an operator's client: all planes are one application."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tests.platform.web.gateway import Gateway

from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database


@dataclass
class Operator:
    """Requests with an operator's key."""

    gateway: Gateway
    client: httpx.AsyncClient

    async def get(self, path: str) -> httpx.Response:
        return await self.client.get(path)

    async def post(self, path: str, body: object = None, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def patch(self, path: str, body: object, etag: str) -> httpx.Response:
        return await self.client.patch(path, json=body, headers={"if-match": etag})

    async def delete(self, path: str) -> httpx.Response:
        return await self.client.delete(path)

    async def as_tenant(self, method: str, path: str, key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return await self.client.request(method, path, headers=headers)

    async def tenant(self, name: str = "harbor") -> tuple[str, str]:
        """A new tenant's path and its first key."""
        response = await self.post("/tenants", {"name": name})
        assert response.status_code == 201, response.text
        return f"/tenants/{response.json()['id']}", response.json()["api_key"]


@pytest.fixture
async def operator(start_gateway: Any, database: Database) -> AsyncIterator[Operator]:
    gateway = await start_gateway()
    async with database.as_operator() as session:
        key = (await KeyRepository(session).create(None, "operator", ["operator"])).plaintext
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"{gateway.url}/operator/v1", headers=headers) as client:
        yield Operator(gateway, client)
