"""openai-agents with its chat model: plain, streamed, a tool loop, structured output."""

import asyncio
import json
import os
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

City = Literal["Rome", "Oslo"]
QUESTION = "How is the weather in Rome?"


class Report(BaseModel):
    """What is known of a city."""

    city: City
    warm: bool


calls: list[str] = []


@function_tool  # type: ignore[untyped-decorator]
def get_weather(city: City) -> str:
    """The weather of a city."""
    calls.append(city)
    return "21 °C"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["CLIENT_BASE_URL"], api_key=os.environ["CLIENT_API_KEY"])
    model = OpenAIChatCompletionsModel(os.environ["CLIENT_MODEL"], openai_client=client)

    def agent(max_tokens: int, **arguments: Any) -> Agent[None]:
        choice = arguments.pop("tool_choice", None)
        settings = ModelSettings(max_tokens=max_tokens, include_usage=True, tool_choice=choice)
        return Agent(
            name="teller", instructions="Answer briefly.", model=model, model_settings=settings, **arguments
        )

    usages: list[Any] = []
    plain = await Runner.run(agent(8), QUESTION)
    usages.append(plain.context_wrapper.usage)
    assert plain.final_output

    streamed = Runner.run_streamed(agent(8), [*plain.to_input_list(), {"role": "user", "content": QUESTION}])
    assert [event async for event in streamed.stream_events()]
    usages.append(streamed.context_wrapper.usage)
    assert streamed.final_output

    # After the first turn it sets the choice back to auto.
    told = await Runner.run(agent(48, tools=[get_weather], tool_choice="get_weather"), QUESTION, max_turns=6)
    usages.append(told.context_wrapper.usage)
    assert calls and told.final_output

    structured = await Runner.run(agent(64, output_type=Report), QUESTION)
    usages.append(structured.context_wrapper.usage)
    assert isinstance(structured.final_output, Report)

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
