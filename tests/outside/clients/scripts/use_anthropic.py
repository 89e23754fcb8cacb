"""The `anthropic` package: models, plain, streamed, tool loops of three turns in four ways, structured output."""

import asyncio
import json
import os
from typing import Any, Literal

from anthropic import Anthropic, AsyncAnthropic, beta_tool
from pydantic import BaseModel, ConfigDict

City = Literal["Rome", "Oslo"]
MODEL = os.environ["CLIENT_MODEL"]
BASE_URL = os.environ["CLIENT_BASE_URL"].removesuffix("/v1")
QUESTION: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CACHED: Any = {"type": "ephemeral"}
TOOLS: Any = [
    {"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA},
    {"name": "note", "description": "Notes a city.", "input_schema": SCHEMA, "cache_control": CACHED},
]
SYSTEM: Any = [{"type": "text", "text": "Answer briefly.", "cache_control": CACHED}]
# The first turn names its tool, the second may not go without one, the third may not have one.
CHOICES: Any = [{"type": "tool", "name": "get_weather"}, {"type": "any"}, {"type": "none"}]


class Report(BaseModel):
    """What is known of a city."""

    model_config = ConfigDict(extra="forbid")
    city: City
    warm: bool


client = Anthropic(base_url=BASE_URL, api_key=os.environ["CLIENT_API_KEY"])
usages: list[Any] = []


def turn(history: list[Any], number: int) -> dict[str, Any]:
    """The arguments of one turn of a loop."""
    limit = 8 if number == 2 else 64
    asked = {"model": MODEL, "max_tokens": limit, "system": SYSTEM, "messages": history}
    return {**asked, "tools": TOOLS, "tool_choice": CHOICES[number]}


def take(message: Any, history: list[Any], number: int) -> None:
    """Check the turn's answer, and put it with the tools' results behind the history."""
    usages.append(message.usage)
    calls = [block for block in message.content if block.type == "tool_use"]
    assert bool(calls) == (number < 2), message.content
    assert message.stop_reason == "tool_use" if calls else message.stop_reason in ("end_turn", "max_tokens")
    assert all(call.input["city"] in ("Rome", "Oslo") for call in calls)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "21 °C"} for call in calls]
    history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


assert MODEL in {model.id for model in client.models.list()}
assert client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=TOOLS).input_tokens > 0

plain = client.messages.create(
    model=MODEL,
    max_tokens=8,
    messages=QUESTION,
    system="Answer briefly.",
    stop_sequences=["\n\n\n"],
    metadata={"user_id": "user-1"},
    service_tier="auto",
    # No longer among its parameters.
    extra_body={"temperature": 0.5, "top_k": 40, "top_p": 0.9},
)
usages.append(plain.usage)
assert plain.content[-1].type == "text" and plain.content[-1].text

for streams in (False, True):
    history = [*QUESTION]
    for number in range(3):
        if streams:
            with client.messages.stream(**turn(history, number)) as stream:
                kinds = {event.type for event in stream}
                answer: Any = stream.get_final_message()
            assert kinds >= {"message_start", "content_block_stop", "message_stop"}
        else:
            answer = client.messages.create(**turn(history, number))
        take(answer, history, number)


async def main() -> None:
    """The same loop, and a raw stream, with the client that does not block."""
    async with AsyncAnthropic(base_url=BASE_URL, api_key=os.environ["CLIENT_API_KEY"]) as other:
        history = [*QUESTION]
        for number in range(3):
            take(await other.messages.create(**turn(history, number)), history, number)
        written, tokens = "", {}
        async for event in await other.messages.create(
            model=MODEL, max_tokens=8, messages=QUESTION, stream=True
        ):
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                written += event.delta.text
            if event.type == "message_start":
                begun = event.message.usage
            if event.type == "message_delta":
                tokens = {"output_tokens": event.usage.output_tokens}
        usages.append(begun.model_copy(update=tokens))
        assert written


asyncio.run(main())

told: list[str] = []


@beta_tool
def get_weather(city: City) -> str:
    """The weather of a city."""
    told.append(city)
    return "21 °C"


runner = client.beta.messages.tool_runner(
    model=MODEL,
    max_tokens=64,
    messages=QUESTION,
    tools=[get_weather],
    tool_choice={"type": "tool", "name": "get_weather"},
)
for made in runner:
    usages.append(made.usage)
    runner.set_messages_params(
        lambda params: {**params, "tool_choice": CHOICES[1] if len(told) < 1 else CHOICES[2]}
    )
assert len(told) >= 2, told

parsed = client.messages.parse(model=MODEL, max_tokens=64, messages=QUESTION, output_format=Report)
usages.append(parsed.usage)
assert isinstance(parsed.parsed_output, Report)

print(
    json.dumps(
        {
            "requests": len(usages),
            "prompt_tokens": sum(
                usage.input_tokens
                + (usage.cache_read_input_tokens or 0)
                + (usage.cache_creation_input_tokens or 0)
                for usage in usages
            ),
            "completion_tokens": sum(usage.output_tokens for usage in usages),
        }
    )
)
