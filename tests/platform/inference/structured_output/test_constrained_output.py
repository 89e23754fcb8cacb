"""Parsers collect values; a worker validates them before the `finish_reason` is returned."""

import asyncio
import time

import pytest

from loraplex.grammar.builder.output_plan import plan_output
from loraplex.grammar.constraints import JsonSchema, OutputConstraints, SchemaLimits, Tool
from loraplex.grammar.errors import SchemaNotSatisfied
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput

UNIQUE = {"type": "array", "uniqueItems": True}
ARGUMENTS = {"type": "object", "properties": {"tags": UNIQUE}}


class RecordingValidation:
    """Accepts what does not hold `bad`, and takes its time."""

    def __init__(self) -> None:
        self.values: list[str] = []

    async def __call__(self, schema: str, value: str) -> None:
        self.values.append(value)
        await asyncio.sleep(0)
        if "bad" in value:
            raise SchemaNotSatisfied("bad")


def output_of(form: OutputConstraints, validation: RecordingValidation) -> ConstrainedOutput:
    plan = plan_output(form, ToolStyle.GENERIC, limits=SchemaLimits())
    return ConstrainedOutput(plan, validation, "response_format")


async def test_every_call_is_validated_and_one_invalid_call_fails() -> None:
    validation = RecordingValidation()
    tool = Tool("f", "", ARGUMENTS, False, "tools[0].function.parameters")
    response = output_of(OutputConstraints(tools=(tool,), tool_choice="required"), validation)
    reader = response.parser()
    reader.feed(
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "f", "arguments": '
    )
    reader.feed('{"tags": ["bad"]}}</tool_call>')
    with pytest.raises(SchemaNotSatisfied):
        await response.finish(reader, "stop")
    assert validation.values == ["{}", '{"tags": ["bad"]}']


async def test_choices_that_end_together_are_validated_by_their_own_values() -> None:
    validation = RecordingValidation()
    response = output_of(OutputConstraints(format=JsonSchema(UNIQUE, False, "p")), validation)
    readers = [response.parser() for _ in range(20)]
    for index, reader in enumerate(readers):
        reader.feed(f'["{"bad" if index % 2 else "good"}"]')
    ended = await asyncio.gather(*(response.finish(each, "stop") for each in readers), return_exceptions=True)
    assert [isinstance(each, SchemaNotSatisfied) for each in ended] == [bool(i % 2) for i in range(20)]
    assert len(validation.values) == 20 and response.values == []


def test_a_schema_that_takes_minutes_to_validate_is_only_collected() -> None:
    names = [f"d{number}" for number in range(20)]
    everything = {"allOf": [{"$ref": f"#/$defs/{name}"} for name in names], "unevaluatedProperties": False}
    schema = {"$ref": "#/$defs/d0", "$defs": dict.fromkeys(names, everything)}
    started = time.process_time()
    response = output_of(OutputConstraints(format=JsonSchema(schema, False, "p")), RecordingValidation())
    assert response.plan.enforcement == "validated" and time.process_time() - started < 20
