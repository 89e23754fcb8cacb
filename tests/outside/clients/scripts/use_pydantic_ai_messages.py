"""pydantic-ai with Messages: plain, streamed, tool loops of three turns, structured output by a tool and by JSON schema."""

import asyncio
import json
import os
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

City = Literal["Rome", "Oslo"]
QUESTION = "How is the weather in Rome?"


class Report(BaseModel):
    """What is known of a city."""

    city: City
    warm: bool


model = AnthropicModel(
    os.environ["CLIENT_MODEL"],
    provider=AnthropicProvider(
        base_url=os.environ["CLIENT_BASE_URL"].removesuffix("/v1"), api_key=os.environ["CLIENT_API_KEY"]
    ),
    # It knows of none for a model of another name.
    profile={"supports_json_schema_output": True},
)
SHORT = ModelSettings(max_tokens=8)
LONG = ModelSettings(max_tokens=64)


async def main() -> None:
    usages: list[Any] = []
    teller: Agent[None, str] = Agent(model, instructions="Answer briefly.", model_settings=SHORT)

    plain = await teller.run(QUESTION)
    usages.append(plain.usage)
    assert plain.output

    async with teller.run_stream(QUESTION, message_history=plain.all_messages()) as streamed:
        assert "".join([text async for text in streamed.stream_text(delta=True)])
        usages.append(streamed.usage)

    calls: list[str] = []

    def get_weather(city: City) -> str:
        """The weather of a city."""
        calls.append(city)
        return "21 °C"

    # The first two turns must call the tool, the third may not.
    def settings_of(context: Any) -> ModelSettings:
        choice: Any = "none" if context.messages[4:] else "required"
        limit = 64 if choice == "required" else 8
        return ModelSettings(max_tokens=limit, tool_choice=choice, parallel_tool_calls=False)

    asker: Agent[None, str] = Agent(model, tools=[get_weather], model_settings=settings_of)
    told = await asker.run(QUESTION)
    usages.append(told.usage)
    assert len(calls) == 2 and told.output
    async with asker.run_stream(QUESTION) as told_in_stream:
        assert await told_in_stream.get_output()
        usages.append(told_in_stream.usage)
    assert len(calls) == 4

    for output in (NativeOutput(Report), ToolOutput(Report)):
        writer: Agent[None, Any] = Agent(model, output_type=output, model_settings=LONG)
        structured = await writer.run(QUESTION)
        usages.append(structured.usage)
        assert isinstance(structured.output, Report)

    print(
        json.dumps(
            {
                "requests": sum(usage.requests for usage in usages),
                "prompt_tokens": sum(usage.input_tokens for usage in usages),
                "completion_tokens": sum(usage.output_tokens for usage in usages),
            }
        )
    )


asyncio.run(main())
