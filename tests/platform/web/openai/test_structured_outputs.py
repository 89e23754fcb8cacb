"""Structured output: parsed by the official client, enforced as the header says, refused by keyword and place."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from loraplex.engine.fake_engine import FakeScript
from loraplex.grammar.spec import decode_spec

MODEL = "demo/base"
USER: Any = [{"role": "user", "content": "hello"}]
HEADER = "x-loraplex-schema-enforcement"
# No grammar here counts what it has seen: uniqueItems is for the validator.
UNIQUE = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "required": ["tags"],
    "additionalProperties": False,
}
# A reference leads where no keyword expects a schema, to a pattern that is no text.
UNCHECKED = {"type": "object", "allOf": [{"$ref": "#/x-own/y"}], "x-own": {"y": {"pattern": 5}}}
GOOD = ('{"tags": ', '["a", ', '"b"]}')
BAD = ('{"tags": ', '["a", ', '"a"]}')
TOOL: Any = {"type": "function", "function": {"name": "label", "parameters": UNIQUE}}
BAD_CALL = ('<tool_call>{"name": "label", ', '"arguments": ', "".join(BAD), "}</tool_call>")


class Person(BaseModel):
    name: str
    age: int
    role: Literal["cook", "guest"]


PERSON = ('{"name": "Ada', '", "age": 36', ', "role": "guest"}')


def json_schema(schema: object, strict: bool = False) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


def body(**parameters: object) -> dict[str, object]:
    return {"model": MODEL, "messages": USER, **parameters}


async def test_pydantic_models_are_parsed(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(PERSON,)))
    client = gateway.client()
    answer = await client.chat.completions.parse(model=MODEL, messages=USER, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36, role="guest")
    async with client.chat.completions.stream(model=MODEL, messages=USER, response_format=Person) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Ada", age=36, role="guest")
    assert all(decode_spec(request.grammar).source for request in gateway.engine.requests)
    echoed = [*USER, answer.choices[0].message, USER[0]]
    assert (await client.chat.completions.parse(model=MODEL, messages=echoed, response_format=Person)).choices


async def test_functions_of_pydantic_models_are_parsed(start_gateway: Any) -> None:
    written = ('<tool_call>{"name": "Person", "arguments": ', "".join(PERSON), "}</tool_call>")
    gateway = await start_gateway(FakeScript(answers=(written,)))
    tools = [openai.pydantic_function_tool(Person)]
    answer = await gateway.client().chat.completions.parse(model=MODEL, messages=USER, tools=tools)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Person(name="Ada", age=36, role="guest")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parameters", "enforcement"),
    [
        ({"response_format": json_schema(Person.model_json_schema(), strict=True)}, "full"),
        ({"response_format": json_schema(UNIQUE)}, "validated"),
        ({"structured_outputs": {"json": json.dumps(UNIQUE)}}, "validated"),
        (
            {"response_format": json_schema({**UNIQUE, "required": None, "nullable": True})},
            'validated; read="required"; annotation="nullable"',
        ),
        ({"response_format": {"type": "text"}}, None),
        ({}, None),
    ],
)
async def test_the_header_says_how_a_schema_is_enforced(
    start_gateway: Any, parameters: dict[str, Any], enforcement: str | None, stream: bool
) -> None:
    gateway = await start_gateway(FakeScript(answers=(GOOD,)))
    answer = await gateway.post("/v1/chat/completions", body(stream=stream, **parameters))
    assert answer.status_code == 200 and answer.headers.get(HEADER) == enforcement
    assert (gateway.engine.requests[0].grammar is None) == (enforcement is None)


@pytest.mark.parametrize(
    ("parameters", "script"),
    [
        ({"response_format": json_schema(UNIQUE)}, (BAD,)),
        ({"tools": [TOOL]}, (BAD_CALL,)),
        ({"response_format": json_schema(UNIQUE), "n": 2}, (GOOD, BAD)),
    ],
)
async def test_a_value_that_fails_validation_is_422_and_counted(
    start_gateway: Any, parameters: dict[str, Any], script: Any
) -> None:
    gateway = await start_gateway(FakeScript(answers=script))
    answer = await gateway.post("/v1/chat/completions", body(**parameters))
    assert answer.status_code == 422 and answer.json()["error"]["code"] == "schema_not_satisfied"
    streamed = await gateway.post("/v1/chat/completions", body(stream=True, **parameters))
    assert streamed.status_code == 200 and "[DONE]" not in streamed.text
    *_, error, end = streamed.text.split("\n\n")
    assert end == "" and error.startswith("event: error\ndata: ")
    assert json.loads(error.removeprefix("event: error\ndata: "))["error"]["code"] == "schema_not_satisfied"
    assert '"finish_reason":"tool_calls"' not in streamed.text
    assert [usage.unsatisfied for _, usage in gateway.admissions.settled] == [True, True]
    whole, _ = gateway.recorder.timings
    assert whole.completion_tokens == sum(map(len, script))
    assert [each.finish_reason for each in gateway.recorder.timings] == ["error", "error"]
    assert gateway.engine.running == 0


async def test_a_truncated_value_is_not_validated(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(BAD,)))
    answer = await gateway.post(
        "/v1/chat/completions", body(response_format=json_schema(UNIQUE), max_tokens=2)
    )
    assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("parameters", "code", "param", "words"),
    [
        (
            {"response_format": json_schema(UNIQUE, strict=True)},
            "unsupported_schema",
            "response_format.json_schema.schema",
            ["uniqueItems", "/properties/tags"],
        ),
        (
            {"tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}]},
            "unsupported_schema",
            "tools[0].function.parameters",
            ["uniqueItems", "/properties/tags"],
        ),
        (
            {"response_format": json_schema({"type": "objekt"})},
            "invalid_schema",
            "response_format.json_schema.schema",
            ["type must be one of", "declare $schema"],
        ),
        (
            {"response_format": json_schema(UNCHECKED)},
            "invalid_schema",
            "response_format.json_schema.schema",
            ["/x-own/y/pattern"],
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "label", "parameters": UNCHECKED}}]},
            "invalid_schema",
            "tools[0].function.parameters",
            ["tool 'label'", "/x-own/y/pattern"],
        ),
        (
            {"response_format": json_schema({**UNCHECKED, "description": "d" * 1_000})},
            "invalid_schema",
            "response_format.json_schema.schema",
            ["/x-own/y/pattern"],
        ),
        (
            {"response_format": json_schema({"enum": [str(i) for i in range(10_001)]})},
            "schema_too_large",
            "response_format.json_schema.schema",
            ["10000"],
        ),
    ],
)
async def test_a_refused_schema_names_field_keyword_and_place(
    start_gateway: Any, parameters: dict[str, Any], code: str, param: str, words: list[str]
) -> None:
    gateway = await start_gateway()
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.client().chat.completions.create(model=MODEL, messages=USER, extra_body=parameters)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert all(word in refused.value.message.replace(",", "") for word in words)
    assert gateway.engine.requests == [] and gateway.compile_checks.checked == []


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        ({"json": UNIQUE}, "".join(GOOD)),
        ({"regex": "[a-z]+"}, "abc"),
        ({"choice": ["yes", "no"]}, "yes"),
        ({"grammar": 'start: "a"+'}, "aa"),
        ({"grammar": 'root ::= "a"+'}, "aa"),
        (
            {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}},
            "a",
        ),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_structured_outputs_in_both_endpoints(
    start_gateway: Any, path: str, structure: dict[str, Any], text: str
) -> None:
    gateway = await start_gateway(FakeScript(answers=(tuple(text),)))
    asked = {"prompt": ["a", "b"]} if path == "completions" else {"messages": USER}
    fields = {"model": MODEL, "structured_outputs": {**structure, "close": True}, "max_tokens": 100, **asked}
    answer = await gateway.post(f"/v1/{path}", fields)
    choices = answer.json()["choices"]
    assert [choice.get("text") or choice["message"]["content"] for choice in choices] == [text] * len(choices)
    assert len(gateway.compile_checks.checked) == 1 and len({r.grammar for r in gateway.engine.requests}) == 1
    assert decode_spec(gateway.engine.requests[0].grammar).close
    streamed = await gateway.post(f"/v1/{path}", {**fields, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_completions_are_validated_at_their_end(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(BAD,)))
    fields = {"model": MODEL, "prompt": "a", "structured_outputs": {"json": UNIQUE}}
    assert (await gateway.post("/v1/completions", fields)).status_code == 422
    streamed = await gateway.post("/v1/completions", {**fields, "stream": True})
    assert streamed.headers[HEADER] == "validated"
    assert "schema_not_satisfied" in streamed.text and "[DONE]" not in streamed.text


async def test_a_call_or_a_conforming_response(start_gateway: Any) -> None:
    call = ('<tool_call>{"name": "label", "arguments": ', "".join(GOOD), "}</tool_call>")
    gateway = await start_gateway(FakeScript(answers=(call, PERSON)))
    format_ = json_schema(Person.model_json_schema(), strict=True)
    answer = await gateway.client().chat.completions.create(
        model=MODEL, messages=USER, tools=[TOOL], response_format=format_, n=2
    )
    called, answered = answer.choices
    assert called.finish_reason == "tool_calls" and called.message.content is None
    assert answered.finish_reason == "stop" and answered.message.tool_calls is None
    assert Person.model_validate_json(answered.message.content).name == "Ada"


async def test_a_large_schema_is_planned_off_the_event_loop(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("{}",),)))
    schema = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(2000)}}
    answer = await gateway.post("/v1/chat/completions", body(response_format=json_schema(schema)))
    assert answer.status_code == 200 and answer.headers[HEADER] in ("full", "validated")
