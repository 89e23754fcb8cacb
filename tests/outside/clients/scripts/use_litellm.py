"""LiteLLM with its provider for servers that speak OpenAI's API: plain, streamed, a tool loop, structured output."""

import json
import os
from typing import Any, Literal

import litellm
from pydantic import BaseModel

City = Literal["Rome", "Oslo"]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
QUESTION = [{"role": "user", "content": "How is the weather in Rome?"}]


class Report(BaseModel):
    """What is known of a city."""

    city: City
    warm: bool


usages: list[Any] = []


def complete(provider: str, **arguments: Any) -> Any:
    """One call, whose usage counts unless it is a stream."""
    answer = litellm.completion(
        model=f"{provider}/{os.environ['CLIENT_MODEL']}",
        api_base=os.environ["CLIENT_BASE_URL"],
        api_key=os.environ["CLIENT_API_KEY"],
        **arguments,
    )
    if not arguments.get("stream"):
        usages.append(answer.usage)
    return answer


# The two names under which its users reach such a server.
for provider in ("openai", "hosted_vllm"):
    plain = complete(provider, messages=QUESTION, max_tokens=8, temperature=0.2)
    assert plain.choices[0].message.content

    chunks = list(
        complete(
            provider, messages=QUESTION, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    whole = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert whole is not None
    usages.append(whole.usage)
    assert whole.choices[0].message.content

    forced = {"type": "function", "function": {"name": "get_weather"}}
    asked = complete(provider, messages=QUESTION, tools=[TOOL], tool_choice=forced, max_tokens=64)
    message = asked.choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "21 °C"}
    for sent in (message, message.model_dump()):
        told = complete(
            provider, messages=[*QUESTION, sent, result], tools=[TOOL], tool_choice="none", max_tokens=8
        )
        assert told.choices[0].message.content

    structured = complete(provider, messages=QUESTION, response_format=Report, max_tokens=64)
    Report.model_validate_json(structured.choices[0].message.content)

print(
    json.dumps(
        {
            "requests": len(usages),
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
        }
    )
)
