"""The official clients, unmodified: whole, streamed, with the stream helper, and with the tool runner in loops of three turns."""

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool, beta_tool
from pydantic import BaseModel
from tests.platform.web.anthropic.wire import HELLO, MODEL, WEATHER

from loraplex.engine.fake_engine import FakeScript


def call(city: str) -> FakeScript:
    text = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}</tool_call>'
    return FakeScript(answers=(("I ask. ", text),))


SCRIPTS = (call("Rome"), call("Oslø"), FakeScript(answers=(("Warm, ", "then cold."),)))
END = "Warm, then cold."


@pytest.fixture
async def turns(start_gateway: Any) -> tuple[Any, Callable[[], None]]:
    """A gateway, and what lets its model answer as in the next turn."""
    gateway = await start_gateway(SCRIPTS[0])
    left = list(SCRIPTS[1:])

    def go_on() -> None:
        gateway.engine.script = left.pop(0)

    return gateway, go_on


def asked(gateway: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0)


def results(message: Any) -> dict[str, Any]:
    calls = [block for block in message.content if block.type == "tool_use"]
    found = [
        {"type": "tool_result", "tool_use_id": each.id, "content": f"It is warm in {each.input['city']}."}
        for each in calls
    ]
    return {"role": "user", "content": found}


@pytest.mark.parametrize("how", ["create", "events", "helper"])
async def test_a_tool_loop_of_three_turns(turns: Any, how: str) -> None:
    gateway, go_on = turns
    client = asked(gateway)
    messages: list[Any] = [*HELLO]
    given: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "tools": [WEATHER], "messages": messages}
    for turn in range(3):
        if how == "create":
            message: Any = await client.messages.create(**given)
            assert len(message._request_id) == 32
        elif how == "helper":
            async with client.messages.stream(**given) as stream:
                message = await stream.get_final_message()
        else:
            kinds = [event.type async for event in await client.messages.create(**given, stream=True)]
            assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
            message = await client.messages.create(**given)
        if turn < 2:
            assert message.stop_reason == "tool_use"
            messages += [{"role": "assistant", "content": message.content}, results(message)]
            go_on()
    assert message.stop_reason == "end_turn" and message.content[0].text == END


@pytest.mark.parametrize("stream", [True, False])
async def test_the_tool_runner(turns: Any, stream: bool) -> None:
    gateway, go_on = turns
    cities = []

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: its name
        """
        cities.append(city)
        go_on()
        return f"It is warm in {city}."

    runner = asked(gateway).beta.messages.tool_runner(
        model=MODEL, max_tokens=50, tools=[get_weather], messages=HELLO, stream=stream
    )
    final: Any = await runner.until_done()
    assert cities == ["Rome", "Oslø"] and final.content[0].text == END


async def test_the_synchronous_client(turns: Any) -> None:
    gateway, go_on = turns

    @beta_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        go_on()
        return f"It is warm in {city}."

    def run() -> Any:
        client = anthropic.Anthropic(
            base_url=gateway.url, auth_token=gateway.key, api_key=None, max_retries=0
        )
        with client.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:
            assert "".join(stream.text_stream).startswith("I ask.")
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=50, tools=[get_weather], messages=HELLO
        )
        return runner.until_done()

    assert (await asyncio.to_thread(run)).content[0].text == END


class City(BaseModel):
    """What an answer is parsed into."""

    name: str


async def test_parsed_answers_may_be_sent_back(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(('{"name": ', '"Rome"}'),)))
    client = asked(gateway)
    message = await client.messages.parse(model=MODEL, max_tokens=50, messages=HELLO, output_format=City)
    assert message.parsed_output == City(name="Rome")
    history: list[Any] = [*HELLO, {"role": "assistant", "content": message.content}, *HELLO]
    await client.messages.create(model=MODEL, max_tokens=50, messages=history)


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
    page = await client.models.list(before_id=names[3], limit=2)
    assert [model.id for model in page.data] == names[1:3] and page.has_more
    one = await client.models.retrieve("a1")
    assert (one.type, one.display_name, one.lifecycle, one.max_tokens) == ("model", "a1", "active", 4096)
    with pytest.raises(anthropic.BadRequestError, match="`limit` must be an integer in 1..1000"):
        await client.models.list(limit=1001)
    with pytest.raises(anthropic.BadRequestError, match="`after_id` is the `id` of no model"):
        await client.models.list(after_id="nothing")
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
