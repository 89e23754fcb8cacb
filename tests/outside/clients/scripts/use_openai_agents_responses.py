"""openai-agents with its default model, Responses: plain, streamed, tool loops of three turns, structured output."""

import asyncio
import json
import os
from typing import Any, Literal

from agents import (
    Agent,
    AgentHooks,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

City = Literal["Rome", "Oslo"]
QUESTION = "How is the weather in Rome?"
SEALED: Any = ["reasoning.encrypted_content"]


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


class ThreeTurns(AgentHooks[None]):  # type: ignore[misc]
    """The first two turns must call the tool, the third may not."""

    async def on_tool_end(self, context: Any, agent: Agent[None], tool: Any, result: Any) -> None:
        agent.model_settings.tool_choice = "required" if len(calls) < 2 else "none"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["CLIENT_BASE_URL"], api_key=os.environ["CLIENT_API_KEY"])
    model = OpenAIResponsesModel(os.environ["CLIENT_MODEL"], openai_client=client)

    def agent(max_tokens: int, choice: str | None = None, **arguments: Any) -> Agent[None]:
        settings = ModelSettings(
            max_tokens=max_tokens, store=False, response_include=SEALED, tool_choice=choice
        )
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

    for streams in (False, True):
        calls.clear()
        asker = agent(64, "required", tools=[get_weather], reset_tool_choice=False, hooks=ThreeTurns())
        if streams:
            told: Any = Runner.run_streamed(asker, QUESTION)
            assert [event async for event in told.stream_events()]
        else:
            told = await Runner.run(asker, QUESTION)
        usages.append(told.context_wrapper.usage)
        assert len(calls) == 2 and told.final_output

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
