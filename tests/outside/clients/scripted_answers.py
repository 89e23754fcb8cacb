"""The answers of a server that thinks of nothing: the tool that may be called, a document of the demanded schema, or a sentence.

`AGENT_ANSWERS` has those of whole programs, one for each of their requests.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

SENTENCE = "It is sunny in Rome."
# What the scripted server thinks before each answer, and the seal of it. No other server takes that seal.
THOUGHT = "A question about the weather."
SEAL = "c2VhbGVkIHRob3VnaHQ="
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATCH = "*** Begin Patch\n*** Update File: hello.txt\n@@\n-hello\n+hello, world\n*** End Patch\n"


@dataclass(frozen=True)
class Answer:
    """A text, or one call of the tool `name` with `text` as its arguments, or as its input where it is `custom`.

    `begun`: the prompt ends inside the thought.
    """

    text: str
    name: str | None = None
    namespace: str | None = None
    custom: bool = False
    thought: str | None = None
    begun: bool = False


@dataclass(frozen=True)
class _Question:
    """What decides an answer. `choice` is a mode, or names the tool; `told`: the results of calls came last."""

    tools: Mapping[str, Answer]
    choice: str
    told: bool
    schema: Mapping[str, Any] | None


AGENT_ANSWERS = {
    "codex": (
        Answer('{"cmd": "ls"}', "exec_command"),
        Answer('{"cmd": "cat hello.txt"}', "exec_command"),
        Answer(PATCH, "apply_patch", custom=True),
        Answer("I greeted the world."),
    ),
    "claude_code": (
        Answer('{"file_path": "hello.txt"}', "Read"),
        Answer("It says hello."),
    ),
}


def answer_to(path: str, body: Mapping[str, Any]) -> Answer:
    """The answer to a request in the dialect of its path.

    A tool is called where one may be and the last message is not already its result.
    """
    asked = _READERS.get(path.partition("?")[0].rstrip("/"), _chat)(body)
    if asked.choice in asked.tools:
        return thoughtful(asked.tools[asked.choice], body)
    if asked.tools and asked.choice != "none" and (not asked.told or asked.choice == "required"):
        return thoughtful(list(asked.tools.values())[-1 if asked.told else 0], body)
    text = SENTENCE if asked.schema is None else json.dumps(instance_of(asked.schema, asked.schema))
    return thoughtful(Answer(text), body)


def thoughtful(answer: Answer, body: Mapping[str, Any]) -> Answer:
    """The answer with a thought before it, where the request asks for one."""
    effort = (body.get("reasoning") or {}).get("effort") or "none"
    thinking = body.get("thinking") or {"type": "disabled"}
    if effort == "none" and thinking["type"] == "disabled":
        return answer
    named = (body.get("output_config") or {}).get("effort", thinking.get("budget_tokens"))
    return replace(answer, thought=answer.thought or THOUGHT, begun=effort != "none" or named is not None)


def text_of(answer: Answer) -> tuple[str, ...]:
    """The model's tokens, fewer than any limit in a request; a call is written in the template's style."""
    thought: tuple[str, ...] = () if answer.thought is None else (f"\n{answer.thought}\n", "</think>", "\n\n")
    if thought and not answer.begun:
        thought = "<think>", *thought
    if answer.name is None:
        half = len(answer.text) // 2
        return *thought, answer.text[:half], answer.text[half:]
    name = answer.name if answer.namespace is None else f"{answer.namespace}__{answer.name}"
    arguments = json.dumps({"input": answer.text}) if answer.custom else answer.text
    return *thought, "<tool_call>", f'{{"name": "{name}", "arguments": {arguments}}}', "</tool_call>"


def _chat(body: Mapping[str, Any]) -> _Question:
    choice = body.get("tool_choice", "auto")
    tools = [tool["function"] for tool in body.get("tools") or ()]
    return _Question(
        {tool["name"]: _call(tool["name"], tool.get("parameters")) for tool in tools},
        choice["function"]["name"] if isinstance(choice, dict) and "function" in choice else str(choice),
        body["messages"][-1]["role"] == "tool",
        _schema_of(body.get("response_format") or {}),
    )


def _responses(body: Mapping[str, Any]) -> _Question:
    choice = body.get("tool_choice") or "auto"
    last = body["input"][-1] if isinstance(body["input"], list) else {}
    return _Question(
        {answer.name or "": answer for answer in _response_tools(body.get("tools") or (), None)},
        str(choice.get("name", choice.get("mode")) if isinstance(choice, dict) else choice),
        str(last.get("type")).endswith("_call_output"),
        ((body.get("text") or {}).get("format") or {}).get("schema"),
    )


def _response_tools(tools: Any, namespace: str | None) -> Iterator[Answer]:
    for tool in tools:
        if tool["type"] == "namespace":
            yield from _response_tools(tool["tools"], tool["name"])
        elif tool["type"] == "custom":
            yield Answer("Rome", tool["name"], namespace, custom=True)
        elif tool["type"] == "function":
            yield _call(tool["name"], tool.get("parameters"), namespace)


def _messages(body: Mapping[str, Any]) -> _Question:
    choice = body.get("tool_choice") or {"type": "auto"}
    content = body["messages"][-1]["content"]
    return _Question(
        {tool["name"]: _call(tool["name"], tool["input_schema"]) for tool in body.get("tools") or ()},
        str(choice.get("name", {"any": "required"}.get(choice["type"], choice["type"]))),
        isinstance(content, list) and any(block["type"] == "tool_result" for block in content),
        ((body.get("output_config") or {}).get("format") or {}).get("schema"),
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any]], _Question]] = {
    RESPONSES: _responses,
    MESSAGES: _messages,
}


def _schema_of(form: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of a response format, in each place where clients put it; none for a text."""
    if form.get("type") == "json_schema":
        schema: Mapping[str, Any] = form["json_schema"]["schema"]
        return schema
    return form.get("schema", form.get("value", {})) if form.get("type") == "json_object" else None


def _call(name: str, parameters: Mapping[str, Any] | None, namespace: str | None = None) -> Answer:
    schema = parameters or {}
    return Answer(json.dumps(instance_of(schema, schema)), name, namespace)


def instance_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """A smallest instance of a plain schema: every property that it names, one item in each array."""
    if "$ref" in schema:
        target: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        return instance_of(target, root)
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return instance_of(schema[union][0], root)
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    match schema.get("type", "object" if "properties" in schema else "null"):
        case "object":
            return {name: instance_of(each, root) for name, each in schema.get("properties", {}).items()}
        case "array":
            return [instance_of(schema.get("items", {}), root)]
        case "string":
            return "Rome"
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
    return None
