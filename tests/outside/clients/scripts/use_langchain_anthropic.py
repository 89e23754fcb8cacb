"""langchain-anthropic: plain, streamed, tool loops of three turns, structured output by each of its methods."""

import json
import os
from typing import Any, Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

City = Literal["Rome", "Oslo"]


@tool  # type: ignore[untyped-decorator]
def get_weather(city: City) -> str:
    """The weather of a city."""
    return "21 °C"


class Report(BaseModel):
    """What is known of a city."""

    city: City = Field(description="one of two cities")
    warm: bool


def chat(max_tokens: int) -> Any:
    return ChatAnthropic(
        model=os.environ["CLIENT_MODEL"],
        base_url=os.environ["CLIENT_BASE_URL"].removesuffix("/v1"),
        api_key=os.environ["CLIENT_API_KEY"],
        max_tokens=max_tokens,
    )


def joined(chunks: Any) -> AIMessageChunk:
    whole: AIMessageChunk | None = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


usages: list[Any] = []
question = [SystemMessage("Answer briefly."), HumanMessage("How is the weather in Rome?")]

plain = chat(8).invoke(question)
usages.append(plain.usage_metadata)
assert plain.text

streamed = joined(chat(8).stream(question))
usages.append(streamed.usage_metadata)
assert streamed.text

for streams in (False, True):
    history: list[Any] = [*question]
    for choice in ("get_weather", "any", {"type": "none"}):
        last = isinstance(choice, dict)
        tools = {"tool_choice": choice} if last else {"tool_choice": choice, "parallel_tool_calls": False}
        model = chat(8 if last else 64).bind_tools([get_weather], **tools)
        asked = joined(model.stream(history)) if streams else model.invoke(history)
        usages.append(asked.usage_metadata)
        assert isinstance(asked, AIMessage) and len(asked.tool_calls) == (0 if last else 1)
        results = [get_weather.invoke(call) for call in asked.tool_calls]
        assert all(isinstance(result, ToolMessage) for result in results)
        history += [asked, *results]
    assert asked.text

for method in ("json_schema", "function_calling"):
    answer = chat(64).with_structured_output(Report, method=method, include_raw=True).invoke(question)
    usages.append(answer["raw"].usage_metadata)
    assert isinstance(answer["parsed"], Report), answer

print(
    json.dumps(
        {
            "requests": len(usages),
            "prompt_tokens": sum(usage["input_tokens"] for usage in usages),
            "completion_tokens": sum(usage["output_tokens"] for usage in usages),
        }
    )
)
