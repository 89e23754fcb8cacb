"""Every field that `openai` and Open Responses can send to `/v1/responses` has a decision, so that a new field is one.

The types of both packages are the oracle.
"""

import inspect
from typing import Any, Final, get_args, get_origin, get_type_hints

import openresponses_types as spec
import pytest
from openai.types import responses
from openai.types.responses import input_token_count_params, response_create_params
from openai.types.shared_params.reasoning import Reasoning
from tests.platform.parameters.nested_bounds import ITEMS
from tests.platform.parameters.request_parts import read_parameters

from loraplex.platform.errors import InvalidParameter, UnsupportedParameter
from loraplex.platform.parameters.parameter_table import MODELS
from loraplex.platform.parameters.request_models import PromptCacheOptions
from loraplex.platform.parameters.responses_request import ReasoningOptions
from loraplex.platform.parameters.unsupported_tools import HostTool
from loraplex.platform.parameters.value_types import Refused

BODY: Final[dict[str, Any]] = {"model": "m", "input": "hello"}
UNKNOWN: Final[dict[str, Any]] = {
    "access_programs": {"cyber": "standard"},
    "background_options": {"completion_window": "2h"},
    "image": {"context_compression": "auto"},
}
"""Fields of hosts, which are not in the table."""
OWN: Final = {"seed", "client_metadata", "presence_penalty", "frequency_penalty", "personality"}
"""Fields that `openai` does not have: `seed` is our own, codex sends the second, Open Responses has the penalties, counting the last."""
VALUES: Final[dict[str, Any]] = {
    "async": True,
    "caller": {"type": "direct"},
    "content": [],
    "encrypted_content": "a",
    "id": "x",
    "name": "f",
    "namespace": "n",
    "phase": "commentary",
    "status": "completed",
    "summary": [],
}
"""A value for each field of an item that may be absent."""
ITEM_TYPES: Final = {each["type"] for each in ITEMS if "type" in each}


def test_every_parameter_has_a_decision() -> None:
    sent = get_type_hints(response_create_params.ResponseCreateParamsStreaming).keys()
    table = MODELS["responses"].model_fields.keys()
    assert sent - UNKNOWN.keys() == table - OWN
    assert spec.CreateResponseBody.model_fields.keys() <= table
    counted = get_type_hints(input_token_count_params.InputTokenCountParams).keys()
    assert counted == MODELS["input_tokens"].model_fields.keys()
    for name, value in UNKNOWN.items():
        with pytest.raises(InvalidParameter, match=name):
            read_parameters("responses", {**BODY, name: value})


def test_what_needs_stored_responses_is_refused_with_a_reason() -> None:
    fields = MODELS["responses"].model_fields
    refused = {
        name for name, field in fields.items() if any(isinstance(each, Refused) for each in field.metadata)
    }
    assert refused == {
        *("store", "background", "previous_response_id", "conversation", "prompt"),
        *("context_management", "moderation", "personality"),
    }
    for name in refused:
        with pytest.raises(InvalidParameter, match=f"`{name}` is not supported: .{{15}}"):
            read_parameters("responses", {**BODY, name: True})


def test_every_field_inside_options_has_a_decision() -> None:
    """A value that asks for nothing is accepted, another is refused as one that is not offered."""
    for model, hint in (
        (ReasoningOptions, Reasoning),
        (PromptCacheOptions, response_create_params.PromptCacheOptions),
    ):
        assert model.model_fields.keys() == get_type_hints(hint).keys()
    for name, field, harmless, refused in (
        ("reasoning", "mode", "standard", "pro"),
        ("prompt_cache_options", "prewarm", False, True),
    ):
        assert read_parameters("responses", {**BODY, name: {field: harmless}})
        with pytest.raises(UnsupportedParameter, match=f"`{name}.{field}` is not supported"):
            read_parameters("responses", {**BODY, name: {field: refused}})


def test_every_type_of_item_has_a_decision() -> None:
    """Those that the table knows are read; all others are refused by their place and type."""
    known = {kind for each in typed_dicts(responses.ResponseInputItemParam) for kind in kinds_of(each)}
    assert ITEM_TYPES < known
    for kind in known - ITEM_TYPES:
        with pytest.raises(InvalidParameter) as refused:
            read_parameters("responses", {**BODY, "input": [{"type": kind, "id": "x"}]})
        assert refused.value.param == "input[0]"
        assert kind == "item_reference" or repr(kind) in str(refused.value)


def test_every_field_of_an_item_has_a_decision() -> None:
    """All are read, or accepted with any value: clients send back what they got."""
    for each in typed_dicts(responses.ResponseInputItemParam):
        for kind in kinds_of(each) & ITEM_TYPES:
            whole = next(item for item in ITEMS if item.get("type") == kind)
            fields = {name.rstrip("_") for name in get_type_hints(each)}
            item = whole | {name: VALUES[name] for name in fields - whole.keys()}
            calls = ITEMS[4:6] if kind.endswith("output") else []
            assert (
                len(read_parameters("responses", {**BODY, "input": [*calls, item]}).input) == len(calls) + 1
            )


def test_every_type_of_tool_has_a_decision() -> None:
    tools = {kind: each for each in typed_dicts(responses.ToolParam) for kind in kinds_of(each)}
    for kind in tools.keys() - {"function", "custom", "namespace"}:
        read = read_parameters("responses", {**BODY, "tools": [{"type": kind}]})
        assert read.tools.hosted == (("tools[0]", HostTool(kind)),)
    values: dict[str, Any] = {
        "description": "d",
        "parameters": {},
        "strict": True,
        "format": {"type": "text"},
    }
    for kind in ("function", "custom"):
        fields = {
            name: values.get(name, True)
            for name in get_type_hints(tools[kind])
            if name not in ("name", "type")
        }
        fields = {name.rstrip("_"): value for name, value in fields.items()}
        read = read_parameters("responses", {**BODY, "tools": [{"type": kind, "name": "f", **fields}]})
        assert [tool.name for tool in read.tools.tools] == ["f"]


def kinds_of(hint: Any) -> set[str]:
    """The values of `type` of one typed dictionary."""
    return {each for each in literals(get_type_hints(hint).get("type")) if each is not None}


def literals(hint: Any) -> list[Any]:
    if isinstance(hint, str) or hint is None:
        return [hint]
    return [each for inner in get_args(hint) for each in literals(inner)]


def typed_dicts(hint: Any) -> list[Any]:
    """The types of objects that a hint names."""
    if get_origin(hint) is None:
        return [hint] if inspect.isclass(hint) and hasattr(hint, "__total__") else []
    return [each for inner in get_args(hint) for each in typed_dicts(inner)]
