"""The official client, unmodified: what it counts, lists and raises. `use_anthropic` of the clients' scripts has its loops."""

from typing import Any

import anthropic
import pytest
from tests.platform.web.anthropic.wire import HELLO, MODEL, WEATHER


def asked(gateway: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0)


async def test_counting_and_listing(start_gateway: Any) -> None:
    gateway = await start_gateway()
    for number in range(3):
        await gateway.adapter("acme", f"a{number}", str(number) * 64)
    client = asked(gateway)
    counted = await client.messages.count_tokens(model=MODEL, messages=HELLO, tools=[WEATHER])
    beta = await client.beta.messages.count_tokens(model=MODEL, messages=HELLO, tools=[WEATHER])
    assert counted.input_tokens == beta.input_tokens > 100
    names = [model.id async for model in client.models.list(limit=2)]
    assert names[0] == MODEL and len(names) == len(set(names)) == 4
    page = await client.models.list()
    assert (page.first_id, page.last_id, page.has_more) == (names[0], names[3], False)
    one = await client.models.retrieve("a1")
    assert (one.type, one.display_name, one.lifecycle, one.max_tokens) == ("model", "a1", "active", 4096)
    with pytest.raises(anthropic.NotFoundError, match="nothing"):
        await client.models.retrieve("nothing")
    # Without the header it is OpenAI's list.
    assert [each.id async for each in await gateway.client().models.list()] == names


async def test_errors_are_those_of_the_client(start_gateway: Any) -> None:
    gateway = await start_gateway()
    client = asked(gateway)
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="nothing", max_tokens=5, messages=HELLO)
    assert missing.value.type == "not_found_error" and missing.value.request_id
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="lpx_wrong").messages.create(
            model=MODEL, max_tokens=5, messages=HELLO
        )
