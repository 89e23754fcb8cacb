"""Agent libraries against the live server: the `openai` client's helpers and a complete loop of pydantic-ai."""

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
from openai import OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, ModelSettings, RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider
from tests.end_to_end.live_server import LiveServer

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Plan a picnic with two friends in Berlin."}
]


class Mood(str, Enum):
    calm = "calm"
    wild = "wild"


class Guest(BaseModel):
    name: str = Field(max_length=12)
    vegetarian: bool


class Picnic(BaseModel):
    """Nested, with an enum, bounds, an optional field and a reference."""

    model_config = ConfigDict(extra="forbid")
    place: str = Field(max_length=16)
    mood: Mood
    guests: list[Guest] = Field(min_length=1, max_length=2)
    budget: float | None


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=16)
    days: int = Field(ge=1, le=7)


class SendInvitation(BaseModel):
    """Invite somebody."""

    to: str = Field(max_length=12)
    text: str = Field(max_length=24)


@pytest.fixture
def client(demo: LiveServer) -> OpenAI:
    return demo.client()


def test_parse_gives_an_object_of_the_model(demo: LiveServer, client: OpenAI) -> None:
    for seed in range(2):
        answer = client.chat.completions.parse(
            model=demo.access.model, messages=QUESTION, response_format=Picnic, seed=seed, max_tokens=160
        )
        message = answer.choices[0].message
        assert isinstance(message.parsed, Picnic), message
        assert json.loads(message.content or "") == message.parsed.model_dump(mode="json")
        assert answer.choices[0].finish_reason == "stop"


def test_parse_gives_the_arguments_of_strict_functions(demo: LiveServer, client: OpenAI) -> None:
    tools = [pydantic_function_tool(GetWeather), pydantic_function_tool(SendInvitation)]
    called = set()
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=demo.access.model,
            messages=QUESTION,
            tools=tools,
            tool_choice="required",
            seed=seed,
            max_tokens=160,
            parallel_tool_calls=False,
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        (call,) = list(choice.message.tool_calls or ())
        assert isinstance(call.function.parsed_arguments, GetWeather | SendInvitation)
        assert call.id and type(call.function.parsed_arguments).__name__ == call.function.name
        called.add(call.function.name)
    assert called <= {"GetWeather", "SendInvitation"}


def test_the_stream_helper_builds_the_calls(demo: LiveServer, client: OpenAI) -> None:
    """Deltas in their order: the name once, then parts of the arguments, which join to the final message's arguments."""
    pieces: dict[int, str] = {}
    with client.chat.completions.stream(
        model=demo.access.model,
        messages=QUESTION,
        tools=[pydantic_function_tool(GetWeather)],
        tool_choice="required",
        seed=3,
        max_tokens=160,
        parallel_tool_calls=False,
    ) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                pieces[event.index] = pieces.get(event.index, "") + event.arguments_delta
        final = stream.get_final_completion().choices[0]
    (call,) = list(final.message.tool_calls or ())
    assert final.finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert pieces == {0: call.function.arguments}


def test_the_stream_helper_parses_a_document(demo: LiveServer, client: OpenAI) -> None:
    texts = []
    with client.chat.completions.stream(
        model=demo.access.model, messages=QUESTION, response_format=Picnic, seed=1, max_tokens=160
    ) as stream:
        for event in stream:
            if event.type == "content.delta":
                texts.append(event.delta)
        message = stream.get_final_completion().choices[0].message
    assert isinstance(message.parsed, Picnic) and len(texts) > 1
    assert "".join(texts) == message.content


def test_a_streamed_answer_is_the_whole_one(demo: LiveServer, client: OpenAI) -> None:
    """Same seed, both ways: equal calls but for their ids."""
    options: Any = {
        "model": demo.access.model,
        "messages": QUESTION,
        "tools": [pydantic_function_tool(GetWeather), pydantic_function_tool(SendInvitation)],
        "tool_choice": "required",
        "seed": 11,
        "max_tokens": 160,
        "parallel_tool_calls": False,
    }
    whole = client.chat.completions.create(**options).choices[0]
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason
    calls = [
        [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        for choice in (whole, streamed)
    ]
    assert calls[0] == calls[1]


def test_results_of_calls_go_back_to_the_model(demo: LiveServer, client: OpenAI) -> None:
    """One turn without a library: call, result with the call's id, and a response to the result."""
    tools: Any = [pydantic_function_tool(GetWeather)]
    first = client.chat.completions.create(
        model=demo.access.model,
        messages=QUESTION,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        seed=5,
        max_tokens=120,
    )
    (call,) = list(first.choices[0].message.tool_calls or ())
    said = first.choices[0].message.model_dump(exclude_none=True)
    prompts = []
    for result in ("sunny", "sunny, and warm enough to swim in every lake of the city"):
        messages: Any = [*QUESTION, said, {"role": "tool", "tool_call_id": call.id, "content": result}]
        answer = client.chat.completions.create(
            model=demo.access.model, messages=messages, tools=tools, max_tokens=16
        )
        assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
        assert answer.usage is not None and first.usage is not None
        prompts.append(answer.usage.prompt_tokens)
    assert first.usage is not None and first.usage.prompt_tokens < prompts[0] < prompts[1]


@dataclass
class ToolThenResult(AbstractCapability[None]):
    """A model of this size does not choose well: the tool in the first step, the result in the second."""

    def get_model_settings(self) -> Any:
        def settings(context: RunContext[None]) -> ModelSettings:
            name = "get_weather" if context.run_step <= 1 else "final_result"
            return ModelSettings(tool_choice=[name])

        return settings


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_whole_agent_loop(demo: LiveServer, streamed: bool) -> None:
    """The agent offers a tool, the model calls it, gets its result and ends with an object of the output's type."""
    provider = OpenAICompatibleProvider(
        "loraplex", base_url=f"{demo.url}/v1", api_key=demo.access.tenants[0].api_key
    )
    model = OpenAIChatModel(demo.access.model, provider=provider)
    settings = ModelSettings(max_tokens=200, seed=2, temperature=1.0, parallel_tool_calls=False)
    agent = Agent(model, output_type=Picnic, model_settings=settings, capabilities=[ToolThenResult()])
    asked: list[tuple[str, int]] = []

    @agent.tool_plain
    def get_weather(city: str, days: int) -> str:
        """The weather of a city."""
        asked.append((city, days))
        return "sunny, 24 degrees"

    prompt = "Plan a picnic in Berlin; look at the weather first."
    if streamed:
        async with agent.run_stream(prompt) as stream:
            output = await stream.get_output()
            messages = stream.all_messages()
    else:
        result = await agent.run(prompt)
        output, messages = result.output, result.all_messages()
    assert isinstance(output, Picnic)
    assert len(asked) == 1 and isinstance(asked[0][1], int)
    kinds = [part.part_kind for message in messages for part in message.parts]
    assert kinds[:4] == ["user-prompt", "tool-call", "tool-return", "tool-call"], kinds
