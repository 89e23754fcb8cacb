"""A request that names no maximum gets the default, lowered to what fits; the same number is generated and reserved."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import select
from sqlalchemy import text as sql
from tests.platform.web.limited_gateway import CACHED, counting, limited

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.tenants.database import Database
from loraplex.tenants.default_limits import DefaultLimits
from loraplex.tenants.models import Adapter, ApiKey, Quota
from loraplex.tenants.registry.records import AdapterProfile

MODEL = "demo/base"
CONTEXT = 4096
CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
COMPLETION: Any = {"model": MODEL, "prompt": [[1, 2, 3, 4]]}
DEFAULTS = DefaultLimits(default_max_tokens=900, tier_default_max_tokens={"gold": 700})
CHANGE_TIER = "UPDATE tenants SET tier = 'gold'"


@pytest.fixture
async def with_defaults(database: Database) -> AsyncIterator[Database]:
    """The database as an installation with `DEFAULTS` opens it."""
    opened = Database(database.url, limits=DEFAULTS)
    yield opened
    await opened.close()


async def asked(gateway: Any, path: str, body: Any) -> list[int]:
    """Send a request; return the most tokens per choice that the engine may generate, by prompt. The same is reserved."""
    known = len(gateway.engine.requests)
    response = await gateway.post(path, body)
    assert response.status_code == 200, response.text
    assert not {"x-loraplex-limit", "x-should-retry", "retry-after"} & response.headers.keys()
    requests = gateway.engine.requests[known:]
    if (reserved := getattr(gateway.admissions, "asked", None)) is not None:
        assert reserved[-1].completion_tokens == sum(
            each.sampling.max_tokens * each.sampling.n for each in requests
        )
    return [each.sampling.max_tokens for each in requests]


async def test_chat_takes_the_installations_default_or_its_tiers(
    start_gateway: Any, with_defaults: Database
) -> None:
    serving = ServingConfig(max_completion_tokens=CONTEXT, key_cache_s=0.0)
    gateway = await start_gateway(limits=serving, other=with_defaults)
    gateway.key = await gateway.tenant("acme")
    assert await asked(gateway, "/v1/chat/completions", CHAT) == [900]
    assert await asked(gateway, "/v1/chat/completions", CHAT | {"max_completion_tokens": 1000}) == [1000]
    assert await asked(gateway, "/v1/chat/completions", CHAT | {"n": 5}) == [CONTEXT // 5]
    assert await asked(gateway, "/v1/chat/completions", CHAT | {"min_tokens": 950}) == [950]
    async with gateway.database.as_operator() as session:
        await session.execute(sql(CHANGE_TIER))
    assert await asked(gateway, "/v1/chat/completions", CHAT) == [700]


async def test_the_context_bounds_the_default(start_gateway: Any) -> None:
    gateway = await start_gateway()
    ((left,), prompt) = await asked(gateway, "/v1/chat/completions", CHAT), gateway.engine.requests[-1]
    assert left == CONTEXT - len(prompt.prompt_token_ids)
    prompts = COMPLETION | {"prompt": [[1] * 4000, [1] * 4090]}
    assert await asked(gateway, "/v1/completions", prompts) == [16, 6]


async def test_a_kv_cache_smaller_than_the_context_bounds_it(start_gateway: Any) -> None:
    info = replace(DEFAULT_INFO, num_blocks=100)
    gateway = await start_gateway(FakeScript(info=info))
    ((granted,), prompt) = await asked(gateway, "/v1/chat/completions", CHAT), gateway.engine.requests[-1]
    assert granted == 100 * info.block_size - len(prompt.prompt_token_ids)


async def test_completions_take_16_and_the_profile_goes_before(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=ServingConfig(max_completion_tokens=600))
    assert await asked(gateway, "/v1/completions", COMPLETION) == [16]
    assert await asked(gateway, "/v1/completions", COMPLETION | {"min_tokens": 20}) == [20]
    await gateway.adapter("acme", "pirate", "b" * 64, AdapterProfile(None, {"max_tokens": 500}))
    for path, body in (("chat/completions", CHAT), ("completions", COMPLETION)):
        assert await asked(gateway, f"/v1/{path}", body | {"model": "pirate"}) == [500]
    assert await asked(gateway, "/v1/chat/completions", CHAT | {"model": "pirate", "n": 2}) == [300]


async def test_log_probabilities_lower_the_default(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=ServingConfig(max_logprobs=1000))
    many = CHAT | {"logprobs": True, "top_logprobs": 4, "n": 2}
    assert await asked(gateway, "/v1/chat/completions", many) == [100]
    assert await asked(gateway, "/v1/chat/completions", CHAT | {"logprobs": True}) == [1000]


@pytest.mark.parametrize(
    ("level", "limit", "value"),
    [
        ("tenant", "budget_per_day", 2005),
        ("key", "tokens_per_minute", 1004),
        ("adapter", "tokens_per_day", 1004),
    ],
)
async def test_limits_of_every_level_lower_the_default(
    start_gateway: Any, database: Database, valkey_url: str, level: str, limit: str, value: int
) -> None:
    """The prompt has 4 tokens of 1 micro-unit, and an answer's cost 2: 1,000 fit. Each limit has its test below `tests/tenants`."""
    body = COMPLETION | {"n": 3, "model": "pirate"}
    profile = AdapterProfile(None, {"max_tokens": 5000})
    async with limited(start_gateway, database, valkey_url) as (gateway, _):
        await gateway.adapter("boss", "pirate", "b" * 64, profile)
        async with database.as_operator() as session:
            quota = (await session.scalars(select(Quota))).one()
            if level != "tenant":
                quota = Quota(tenant_id=quota.tenant_id)
                key = select(ApiKey.id).where(ApiKey.tenant_id == quota.tenant_id)
                quota.api_key_id = await session.scalar(key) if level == "key" else None
                quota.adapter_id = await session.scalar(select(Adapter.id)) if level == "adapter" else None
                session.add(quota)
            setattr(quota, limit, value)
        assert await asked(gateway, "/v1/completions", body) == [1000 // 3]


async def test_a_chat_of_a_tenant_with_few_tokens_per_minute_is_served(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    few: dict[str, int] = {"tokens_per_minute": 2000, "tokens_per_day": 2010}
    async with limited(start_gateway, database, valkey_url, CACHED, **few) as (gateway, _):
        (granted,) = await asked(gateway, "/v1/chat/completions", CHAT)
        prompt = len(gateway.engine.requests[-1].prompt_token_ids)
        assert granted == 2000 - prompt
        # A request that names one token more than could ever be admitted is refused, as before.
        response = await gateway.post("/v1/chat/completions", CHAT | {"max_tokens": granted + 1})
        assert response.status_code == 429 and response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(("limit", "value"), [("tokens_per_month", 1000), ("budget_per_day", 2000)])
async def test_what_is_left_of_a_period_is_given_to_its_last_request(
    start_gateway: Any, database: Database, valkey_url: str, limit: str, value: int
) -> None:
    """A prompt of 4 tokens costs 4 micro-units and a completion's token 2; the fake engine generates all it may."""
    async with limited(start_gateway, database, valkey_url, FakeScript(), **{limit: value}) as (gateway, _):
        await gateway.adapter("boss", "pirate", "b" * 64, AdapterProfile(None, {"max_tokens": 5000}))
        body = COMPLETION | {"model": "pirate"}
        used = (await gateway.post("/v1/completions", body | {"max_tokens": 100})).json()["usage"]
        assert used["completion_tokens"] == 100
        (granted,) = await asked(gateway, "/v1/completions", body)
        assert granted == (1000 - 104 - 4 if limit != "budget_per_day" else (2000 - 204 - 4) // 2)
        refused = await gateway.post("/v1/completions", body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert refused.headers["x-loraplex-limit"] == limit and refused.headers["x-should-retry"] == "false"


async def test_not_even_one_token_is_refused_by_the_limit(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, database, valkey_url, tokens_per_minute=3) as (gateway, _):
        response = await gateway.post("/v1/chat/completions", CHAT)
        assert response.status_code == 429 and response.headers["x-loraplex-limit"] == "tokens_per_minute"
        assert gateway.engine.requests == []


async def test_the_tenants_own_default_is_shown_and_in_force(
    start_gateway: Any, with_defaults: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, with_defaults, valkey_url) as (gateway, http):

        async def set_default(value: int | None) -> None:
            async with with_defaults.as_operator() as session:
                (await session.scalars(select(Quota))).one().default_max_tokens = value

        for own, shown in ((30, 30), (0, None), (None, 900)):
            await set_default(own)
            tenant = (await http.get("me")).json()["tenant"]
            assert tenant["default_max_tokens"] == shown
            (granted,) = await asked(gateway, "/v1/chat/completions", CHAT)
            assert granted == (shown or CONTEXT - len(gateway.engine.requests[-1].prompt_token_ids))


@pytest.mark.parametrize("by", ["this gateway", "another gateway"])
async def test_a_limit_that_is_lowered_meanwhile_lowers_the_default(
    start_gateway: Any, database: Database, valkey_url: str, by: str
) -> None:
    """The gateway's cached caller has the old policy, and with `another gateway` so have its cached limits."""
    serving = ServingConfig(key_cache_s=60.0)
    async with limited(start_gateway, database, valkey_url, FakeScript(), serving) as (gateway, _):
        await gateway.adapter("boss", "pirate", "b" * 64, AdapterProfile(None, {"max_tokens": 3000}))
        assert await asked(gateway, "/v1/completions", COMPLETION) == [16]
        async with database.as_operator() as session:
            adapter = (await session.scalars(select(Adapter))).one()
            session.add(Quota(tenant_id=adapter.tenant_id, adapter_id=adapter.id, tokens_per_minute=1000))
        async with counting(database, valkey_url) as other:
            await (gateway.admissions if by == "this gateway" else other).publish(adapter.tenant_id)
        assert await asked(gateway, "/v1/completions", COMPLETION | {"model": "pirate"}) == [996]
