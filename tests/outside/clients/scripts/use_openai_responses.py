"""The `openai` package with Responses: plain, streamed, a tool loop of three turns, structured output; nothing is stored."""

import json
import os
from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel, ConfigDict

City = Literal["Rome", "Oslo"]
MODEL = os.environ["CLIENT_MODEL"]
INCLUDE: Any = ["reasoning.encrypted_content"]
QUESTION: Any = [{"role": "user", "content": [{"type": "input_text", "text": "How is the weather in Rome?"}]}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
NOTE: Any = {
    "type": "custom",
    "name": "note",
    "description": "Notes a city.",
    "format": {"type": "grammar", "syntax": "regex", "definition": "Rome|Oslo"},
}
TOOLS: Any = [WEATHER, {"type": "namespace", "name": "notes", "description": "Keeps notes.", "tools": [NOTE]}]


class Report(BaseModel):
    """What is known of a city."""

    model_config = ConfigDict(extra="forbid")
    city: City
    warm: bool


client = OpenAI(base_url=os.environ["CLIENT_BASE_URL"], api_key=os.environ["CLIENT_API_KEY"])
usages: list[Any] = []


def ask(streams: bool, **arguments: Any) -> Any:
    """The response, whole or put together by the client from its stream."""
    body = {"model": MODEL, "store": False, "include": INCLUDE, **arguments}
    if not streams:
        response = client.responses.create(**body)
    else:
        written, response = "", None
        for event in client.responses.create(stream=True, **body):
            if event.type.endswith(("output_text.delta", "arguments.delta", "tool_call_input.delta")):
                written += event.delta
            if event.type in ("response.completed", "response.incomplete"):
                response = event.response
        assert response, "no last event"
        assert written == "".join(said_in(item) for item in response.output), (written, response.output)
    usages.append(response.usage)
    return response


def said_in(item: Any) -> str:
    """A message's text, or what a tool is called with; nothing of a thought."""
    if item.type == "message":
        return "".join(part.text for part in item.content)
    return str(getattr(item, "arguments", None) or getattr(item, "input", None) or "")


plain = ask(
    False,
    input="How is the weather in Rome?",
    instructions="Answer briefly.",
    max_output_tokens=8,
    temperature=0.5,
    top_p=0.9,
    top_logprobs=2,
    user="user-1",
    metadata={"purpose": "test"},
    prompt_cache_key="session-1",
    include=[*INCLUDE, "message.output_text.logprobs"],
)
assert plain.output_text
assert client.responses.input_tokens.count(model=MODEL, input=QUESTION, tools=TOOLS).input_tokens > 0

# Items go back as the client's objects, and as `model_dump()` writes them: with a null for each field that is absent.
for streamed, dumped in ((False, False), (True, True)):
    history: list[Any] = [*QUESTION]
    choices: list[Any] = [{"type": "function", "name": "get_weather"}, "required", "none"]
    for turn, choice in enumerate(choices):
        # A choice among several tools leaves the model free; only the one that is named last remains.
        tools = TOOLS[1:] if choice == "required" else TOOLS
        limit = 8 if choice == "none" else 64
        body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        response = ask(streamed, input=history, max_output_tokens=limit, **body)
        history += [item.model_dump() if dumped else item for item in response.output]
        calls = [item for item in response.output if item.type.endswith("_call")]
        assert len(calls) == (1 if turn < 2 else 0), response.output
        if turn == 0:
            assert json.loads(calls[0].arguments)["city"] in ("Rome", "Oslo")
            history.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": "21 °C"})
        elif turn == 1:
            assert (calls[0].namespace, calls[0].name) == ("notes", "note")
            assert calls[0].input in ("Rome", "Oslo")
            result = {"type": "custom_tool_call_output", "call_id": calls[0].call_id, "output": "noted"}
            history.append(result)
        else:
            assert response.output_text

parsed = client.responses.parse(
    model=MODEL, input=QUESTION, text_format=Report, max_output_tokens=64, store=False
)
usages.append(parsed.usage)
assert isinstance(parsed.output_parsed, Report)

with client.responses.stream(
    model=MODEL, input=QUESTION, text_format=Report, max_output_tokens=64, store=False
) as events:
    for _ in events:
        pass
    final = events.get_final_response()
usages.append(final.usage)
assert isinstance(final.output_parsed, Report)

print(
    json.dumps(
        {
            "requests": len(usages),
            "prompt_tokens": sum(usage.input_tokens for usage in usages),
            "completion_tokens": sum(usage.output_tokens for usage in usages),
        }
    )
)
