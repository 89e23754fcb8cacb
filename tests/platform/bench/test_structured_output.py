"""The schemas and tools that the structured-output benchmark requests are valid."""

import jsonschema

from loraplex.platform.bench.structured_output import THREE_FIELDS, TOOLS, TWELVE_FIELDS, request_tools


def test_every_schema_is_valid_and_every_tool_is_requested() -> None:
    for schema in (THREE_FIELDS, TWELVE_FIELDS, *TOOLS.values()):
        jsonschema.Draft202012Validator.check_schema(schema)
    tools = request_tools()
    assert {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools} == TOOLS
