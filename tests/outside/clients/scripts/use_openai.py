"""The `openai` package: models, plain, streamed, a tool loop, structured output and text completions."""

import json
import os
from typing import Any, Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict

City = Literal["Rome", "Oslo"]
MODEL = os.environ["CLIENT_MODEL"]
QUESTION: Any = [
    {"role": "developer", "content": "Answer briefly."},
    {"role": "user", "content": [{"type": "text", "text": "How is the weather in Rome?"}]},
]


class GetWeather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: City


class Report(BaseModel):
    """What is known of a city."""

    model_config = ConfigDict(extra="forbid")
    city: City
    warm: bool


client = OpenAI(base_url=os.environ["CLIENT_BASE_URL"], api_key=os.environ["CLIENT_API_KEY"])
usages: list[Any] = []

assert MODEL in {model.id for model in client.models.list()}
assert client.models.retrieve(MODEL).id == MODEL

plain = client.chat.completions.create(
    model=MODEL,
    messages=QUESTION,
    max_completion_tokens=8,
    temperature=0.5,
    top_p=0.9,
    seed=7,
    stop=["\n\n\n"],
    logprobs=True,
    top_logprobs=2,
    user="user-1",
    metadata={"purpose": "test"},
)
usages.append(plain.usage)
assert plain.choices[0].message.content
assert plain.choices[0].logprobs and plain.choices[0].logprobs.content

stream = client.chat.completions.create(
    model=MODEL, messages=QUESTION, max_tokens=8, stream=True, stream_options={"include_usage": True}
)
text = ""
for chunk in stream:
    text += "".join(choice.delta.content or "" for choice in chunk.choices)
    if chunk.usage:
        usages.append(chunk.usage)
assert text

# Messages go back as the client's objects, and as `model_dump()` writes them: with a null for each field that is absent.
for dumped in (False, True):
    tools = [pydantic_function_tool(GetWeather)]
    asked = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "GetWeather"}},
        parallel_tool_calls=False,
        max_tokens=64,
    )
    usages.append(asked.usage)
    message = asked.choices[0].message
    call: Any = (message.tool_calls or [])[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 °C"}
    history: Any = [*QUESTION, message.model_dump() if dumped else message, result]
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    told = client.chat.completions.create(
        model=MODEL,
        messages=history,
        tools=tools,
        tool_choice="none",
        max_tokens=8,
    )
    usages.append(told.usage)
    assert told.choices[0].message.content

parsed = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Report, max_tokens=64)
usages.append(parsed.usage)
assert isinstance(parsed.choices[0].message.parsed, Report)

with client.chat.completions.stream(
    model=MODEL,
    messages=QUESTION,
    response_format=Report,
    max_tokens=64,
    stream_options={"include_usage": True},
) as events:
    for _ in events:
        pass
    final = events.get_final_completion()
usages.append(final.usage)
assert isinstance(final.choices[0].message.parsed, Report)

completion = client.completions.create(model=MODEL, prompt="The weather in Rome", max_tokens=4)
usages.append(completion.usage)
assert completion.choices[0].text

print(
    json.dumps(
        {
            "requests": len(usages),
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
        }
    )
)
