"""langchain-openai: plain, streamed, a tool loop, structured output by each of its methods."""

import json
import os
from typing import Any, Literal

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
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
    return ChatOpenAI(
        model=os.environ["CLIENT_MODEL"],
        base_url=os.environ["CLIENT_BASE_URL"],
        api_key=os.environ["CLIENT_API_KEY"],
        max_tokens=max_tokens,
        temperature=0,
        stream_usage=True,
    )


usages: list[Any] = []
question = [SystemMessage("Answer briefly."), HumanMessage("How is the weather in Rome?")]

plain = chat(8).invoke(question)
usages.append(plain.usage_metadata)
assert plain.content

streamed = AIMessageChunk("")
for chunk in chat(8).stream(question):
    streamed += chunk
usages.append(streamed.usage_metadata)
assert streamed.content

asked = chat(64).bind_tools([get_weather], tool_choice="get_weather").invoke(question)
usages.append(asked.usage_metadata)
assert isinstance(asked, AIMessage) and asked.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
result = get_weather.invoke(asked.tool_calls[0])
assert isinstance(result, ToolMessage)
told = chat(8).bind_tools([get_weather], tool_choice="none").invoke([*question, asked, result])
usages.append(told.usage_metadata)
assert told.content

for method in ("json_schema", "function_calling"):
    model = chat(64).with_structured_output(Report, method=method, include_raw=True)
    answer = model.invoke(question)
    usages.append(answer["raw"].usage_metadata)
    assert isinstance(answer["parsed"], Report), answer
    if method == "json_schema":
        final: Any = None
        raw = AIMessageChunk("")
        for part in model.stream(question):
            raw += part.get("raw", AIMessageChunk(""))
            final = part.get("parsed") or final
        usages.append(raw.usage_metadata)
        assert isinstance(final, Report)

print(
    json.dumps(
        {
            "requests": len(usages),
            "prompt_tokens": sum(usage["input_tokens"] for usage in usages),
            "completion_tokens": sum(usage["output_tokens"] for usage in usages),
        }
    )
)
