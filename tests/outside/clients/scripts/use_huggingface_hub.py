"""The `InferenceClient` of huggingface_hub: plain, streamed, a tool loop, structured output."""

import json
import os
from typing import Any

from huggingface_hub import InferenceClient

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOL: Any = {
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
QUESTION: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
client = InferenceClient(
    base_url=os.environ["CLIENT_BASE_URL"], api_key=os.environ["CLIENT_API_KEY"], timeout=120
)
usages: list[Any] = []


def complete(**arguments: Any) -> Any:
    """One call, whose usage counts unless it is a stream."""
    arguments = {"model": os.environ["CLIENT_MODEL"], "messages": QUESTION, **arguments}
    answer = client.chat.completions.create(**arguments)
    if not arguments.get("stream"):
        usages.append(answer.usage)
    return answer


plain = complete(max_tokens=8, seed=7)
assert plain.choices[0].message.content

text = ""
for chunk in complete(max_tokens=8, stream=True, stream_options={"include_usage": True}):
    text += "".join(choice.delta.content or "" for choice in chunk.choices)
    if chunk.usage:
        usages.append(chunk.usage)
assert text

asked = complete(
    tools=[TOOL], tool_choice={"type": "function", "function": {"name": "get_weather"}}, max_tokens=64
)
message = asked.choices[0].message
call = message.tool_calls[0]
assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
history = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "21 °C"}]
assert complete(messages=history, tools=[TOOL], tool_choice="none", max_tokens=8).choices[0].message.content

form = {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA, "strict": True}}
report = complete(response_format=form, max_tokens=64)
assert json.loads(report.choices[0].message.content)["city"] in ("Rome", "Oslo")

print(
    json.dumps(
        {
            "requests": len(usages),
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
        }
    )
)
