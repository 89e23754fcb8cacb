"""While PostgreSQL is away, callers that this gateway has read recently are served on `/v1`, and all others get 503, never 401."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tests.platform.auth.authentication import make_key
from tests.platform.database_proxy import DatabaseProxy, Loss, proxied
from tests.platform.web.gateway import Gateway
from tests.platform.web.openai.test_moved_models import controller
from tests.tenants.suspension import suspend

from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.tenants import database as database_module
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.key_format import generate_key
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database

DIGEST = "a" * 64
MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT: Any = {"model": "pirate", "messages": MESSAGES, "max_tokens": 5}
LOSSES: list[Loss] = ["refused", "silent"]
# A key is looked up again for each request, so that every request meets the loss.
ALWAYS_LOOKED_UP = ServingConfig(key_cache_s=0.0)


@dataclass
class Served:
    """A gateway that reaches PostgreSQL through a proxy."""

    gateway: Gateway
    proxy: DatabaseProxy
    database: Database
    operator_key: str

    async def get(self, path: str, key: str | None = None) -> httpx.Response:
        headers = [("authorization", f"Bearer {key or self.gateway.key}")]
        return await self.gateway.get(path, headers)

    async def everything(self) -> dict[str, int]:
        """The statuses of all requests that a known caller makes."""
        post, get = self.gateway.post, self.get
        answers = {
            "chat": await post("/v1/chat/completions", CHAT),
            "stream": await post("/v1/chat/completions", CHAT | {"stream": True}),
            "completion": await post("/v1/completions", {"model": "demo/base", "prompt": "hello"}),
            "tokenize": await post("/v1/tokenize", {"model": "pirate", "messages": MESSAGES}),
            "model": await get("/v1/models/pirate"),
            "models": await get("/v1/models"),
        }
        return {name: answer.status_code for name, answer in answers.items()}


@pytest.fixture
async def served(start_gateway: Any, database: Database) -> AsyncIterator[Served]:
    async with proxied(database.url) as proxy:
        through = Database(proxy.url)
        gateway = await start_gateway(other=through, limits=ALWAYS_LOOKED_UP)
        operator_key = await make_key(database, ["operator"], tenant=None)
        gateway.database = database
        gateway.key = await gateway.tenant("acme", ("inference", "tenant:admin"))
        await gateway.adapter("acme", "pirate", DIGEST)
        yield Served(gateway, proxy, through, operator_key)
        await through.close()


@pytest.mark.parametrize("how", LOSSES)
async def test_known_callers_are_served_and_others_get_503(
    served: Served, how: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_well = dict.fromkeys(await served.everything(), 200)
    assert await served.everything() == all_well
    unread = await served.gateway.tenant("rival")
    monkeypatch.setattr(database_module, "SHORT_BOUND_SECONDS", 0.05)
    async with served.proxy.lost(how):
        assert await served.everything() == all_well
        assert served.database.breaker.is_open
        connections = served.proxy.connections
        assert await served.everything() == all_well
        wrong = await served.gateway.post("/v1/chat/completions", CHAT | {"temperature": 9})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
        unread_name = await served.gateway.post("/v1/chat/completions", CHAT | {"model": "parrot"})
        refused = [
            unread_name,
            await served.get("/v1/models/parrot"),
            await served.get("/v1/models", unread),
            await served.get("/v1/models", generate_key("live").plaintext),
            await served.get("/tenant/v1/me"),
            await served.get("/operator/v1/tenants", served.operator_key),
        ]
        for answer in refused:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "store_unavailable"), answer.url
            assert answer.headers["retry-after"] == "2"
        # While the breaker is open no request waits for PostgreSQL, nor asks it.
        assert served.proxy.connections == connections
    await served.database.ping()
    assert await served.everything() == all_well
    again = [
        await served.gateway.post("/v1/chat/completions", CHAT | {"model": "parrot"}),
        await served.get("/v1/models", unread),
        await served.get("/v1/models", generate_key("live").plaintext),
        await served.get("/tenant/v1/me"),
        await served.get("/operator/v1/tenants", served.operator_key),
    ]
    assert [answer.status_code for answer in again] == [404, 200, 401, 200, 200]


async def test_a_newer_policy_that_cannot_be_read_is_503_on_every_route(served: Served) -> None:
    names = await served.everything()
    async with served.proxy.lost("refused"):
        # Its key was revoked, or its tenant suspended, through another gateway.
        served.gateway.admissions.policy_epoch = 1_000
        assert await served.everything() == dict.fromkeys(names, 503)
        # Whatever is asked next, none of the tenant's keys is known any more.
        served.gateway.admissions.policy_epoch = 0
        assert await served.everything() == dict.fromkeys(names, 503)
    await served.database.ping()
    assert await served.everything() == dict.fromkeys(names, 200)


async def test_models_that_were_not_listed_are_503(served: Served) -> None:
    assert (await served.gateway.post("/v1/chat/completions", CHAT)).status_code == 200
    async with served.proxy.lost("refused"):
        assert (await served.get("/v1/models")).status_code == 503
        assert (await served.get("/v1/models/pirate")).status_code == 200
        assert (await served.get("/v1/models/demo/base")).status_code == 200


@pytest.mark.parametrize("change", ["revoke", "suspend"])
async def test_what_another_gateway_published_ends_service_here(
    start_gateway: Any, database: Database, valkey_url: str, change: str
) -> None:
    """With the counters of a real Valkey. Requests with an adapter and without, with admission and without."""
    async with proxied(database.url) as proxy:
        through = Database(proxy.url)
        async with controller(through, valkey_url) as here, controller(database, valkey_url) as elsewhere:
            gateway = await start_gateway(other=through, limits=ALWAYS_LOOKED_UP, admissions=here)
            gateway.database = database
            gateway.key = await gateway.tenant("acme")
            await gateway.adapter("acme", "pirate", DIGEST)
            served = Served(gateway, proxy, through, "")
            names = await served.everything()
            assert names == dict.fromkeys(names, 200)
            async with proxy.lost("refused"):
                tokenize: Any = {"model": "pirate", "messages": MESSAGES}
                assert (await gateway.post("/v1/tokenize", tokenize)).status_code == 200
                async with database.as_operator() as session:
                    tenant = await TenantRepository(session).get("acme")
                    if change == "suspend":
                        await suspend(session, "acme")
                    else:
                        await KeyRepository(session).revoke(tenant.id, gateway.key.split("_")[2])
                await elsewhere.publish(tenant.id)
                assert await served.everything() == dict.fromkeys(names, 503)
            await through.ping()
            ended = 403 if change == "suspend" else 401
            assert await served.everything() == dict.fromkeys(names, ended)
        await through.close()
