"""llama-index with its model for servers that speak OpenAI's API: plain, streamed, a tool loop, structured output."""

import json
import os
from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

City = Literal["Rome", "Oslo"]


class Report(BaseModel):
    """What is known of a city."""

    model_config = ConfigDict(extra="forbid")
    city: City
    warm: bool


def get_weather(city: City) -> str:
    """The weather of a city."""
    return "21 °C"


def model(max_tokens: int) -> Any:
    return OpenAILike(
        model=os.environ["CLIENT_MODEL"],
        api_base=os.environ["CLIENT_BASE_URL"],
        api_key=os.environ["CLIENT_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_tokens=max_tokens,
        temperature=0,
    )


usages: list[Any] = []
question = [ChatMessage(role="user", content="How is the weather in Rome?")]

plain = model(8).chat(question)
usages.append(plain.raw.usage)
assert plain.message.content

last: Any = None
for last in model(8).stream_chat(question, stream_options={"include_usage": True}):
    pass
usages.append(last.raw.usage)
assert last.message.content

tool = FunctionTool.from_defaults(get_weather)
asked = model(64).chat_with_tools([tool], chat_history=question, tool_choice="get_weather")
usages.append(asked.raw.usage)
(call,) = model(64).get_tool_calls_from_response(asked)
assert call.tool_kwargs["city"] in ("Rome", "Oslo")
result = ChatMessage(role="tool", content="21 °C", additional_kwargs={"tool_call_id": call.tool_id})
told = model(8).chat([*question, asked.message, result])
usages.append(told.raw.usage)
assert told.message.content

# A structured object hides its usage.
structured = model(64).as_structured_llm(Report).chat(question)
assert isinstance(structured.raw, Report)

print(
    json.dumps(
        {
            "requests": len(usages),
            "unseen": 1,
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
        }
    )
)
