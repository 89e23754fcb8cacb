"""openai-agents with its default model, Responses: objects whole and streamed, tool loops of three turns."""

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

    def agent(choice: str | None = None, **arguments: Any) -> Agent[None]:
        # It takes an answer that is cut for a failure, so each is an object, which has an end.
        settings = ModelSettings(
            max_tokens=64,
            store=False,
            response_include=SEALED,
            tool_choice=choice,
            parallel_tool_calls=False if choice else None,
        )
        told = {"name": "teller", "instructions": "Answer briefly.", "output_type": Report}
        return Agent(model=model, model_settings=settings, **told, **arguments)

    usages: list[Any] = []
    plain = await Runner.run(agent(), QUESTION)
    usages.append(plain.context_wrapper.usage)
    assert isinstance(plain.final_output, Report)

    streamed = Runner.run_streamed(agent(), [*plain.to_input_list(), {"role": "user", "content": QUESTION}])
    assert [event async for event in streamed.stream_events()]
    usages.append(streamed.context_wrapper.usage)
    assert isinstance(streamed.final_output, Report)

    for streams in (False, True):
        calls.clear()
        asker = agent("required", tools=[get_weather], reset_tool_choice=False, hooks=ThreeTurns())
        if streams:
            told: Any = Runner.run_streamed(asker, QUESTION)
            assert [event async for event in told.stream_events()]
        else:
            told = await Runner.run(asker, QUESTION)
        usages.append(told.context_wrapper.usage)
        assert len(calls) == 2 and isinstance(told.final_output, Report)

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
