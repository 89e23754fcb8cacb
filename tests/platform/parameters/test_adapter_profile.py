"""Profiles: closed names, the bounds of the request table, and no chat template."""

import re

import jsonschema_rs
import pytest
from tests.platform.parameters.request_parts import USER, read_parameters

from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.errors import InvalidParameter, UnknownParameter
from loraplex.platform.parameters.adapter_profile import DEFAULTABLE, profile_schema, read_profile_change
from loraplex.tenants.models import REASONING_STYLES, TOOL_STYLES


def test_absent_null_and_given() -> None:
    assert read_profile_change({}) == {}
    assert read_profile_change({"tool_style": None, "defaults": None}) == {"tool_style": None, "defaults": {}}
    assert read_profile_change({"reasoning_style": None}) == {"reasoning_style": None}
    given = {"tool_style": "llama3", "defaults": {"top_k": 40, "temperature": 1, "min_p": None, "seed": None}}
    assert read_profile_change(given) == {
        "tool_style": "llama3",
        "defaults": {"top_k": 40, "temperature": 1.0},
    }


@pytest.mark.parametrize("name", DEFAULTABLE)
def test_defaults_have_the_bounds_of_requests(name: str) -> None:
    value: object
    for value in (-5, 2**40, "1", True, [], float("inf")):
        with pytest.raises(InvalidParameter) as request:
            read_parameters("chat", {"model": "m", "messages": [USER], name: value})
        with pytest.raises(InvalidParameter) as default:
            read_profile_change({"defaults": {name: value}})
        assert default.value.param == f"defaults.{name}"
        assert str(default.value) == str(request.value).replace(f"`{name}`", f"`defaults.{name}`")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"template": "{{ messages }}"}, "template"),
        ({"template": None}, "template"),
        ({"defaults": {"chat_template": "x"}}, "defaults.chat_template"),
        ({"defaults": {"seed": 1}}, "defaults.seed"),
        ({"defaults": {"stop": ["\n"]}}, "defaults.stop"),
    ],
)
def test_unknown_names(body: dict[str, object], param: str) -> None:
    with pytest.raises(UnknownParameter) as refused:
        read_profile_change(body)
    assert refused.value.param == param


@pytest.mark.parametrize("value", ["Hermes", "", 1, [], {"name": "hermes"}])
def test_a_style_is_one_of_four(value: object) -> None:
    with pytest.raises(InvalidParameter, match="tool_style"):
        read_profile_change({"tool_style": value})


@pytest.mark.parametrize("style", ["none", "think", {"start": "<plan>", "end": "</plan>"}])
def test_a_reasoning_style_is_a_name_or_a_pair_of_markers(style: object) -> None:
    assert read_profile_change({"reasoning_style": style}) == {"reasoning_style": style}


@pytest.mark.parametrize(
    ("style", "param", "message"),
    [
        ("base", "reasoning_style", '"none", "think" or {"start": …, "end": …}, two markers of 3..64'),
        (["<a>", "</a>"], "reasoning_style", "a list of 2"),
        ({"start": "<a>"}, "reasoning_style.end", "required"),
        ({"start": "<a>", "end": None}, "reasoning_style.end", "required"),
        ({"start": "<a>", "end": "</a>", "name": "a"}, "reasoning_style.name", "Unknown"),
        ({"start": "<", "end": "</a>"}, "reasoning_style.start", "3..64"),
        ({"start": "<a>", "end": "x" * 65}, "reasoning_style.end", "3..64"),
        ({"start": "<a>", "end": "<a>"}, "reasoning_style", "contains the other"),
        ({"start": "<<a>>", "end": "</a>"}, "reasoning_style", "occurs in it once"),
        ({"start": "‹a›", "end": "</a>"}, "reasoning_style", "printable ASCII"),
    ],
)
def test_markers_that_divide_no_text_are_refused(style: object, param: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)) as refused:
        read_profile_change({"reasoning_style": style})
    assert refused.value.param == param


def test_the_schema_takes_what_is_read() -> None:
    content = profile_schema()["requestBody"]["content"]["application/json"]
    for style in (None, *REASONING_STYLES, {"start": "<a>", "end": "</a>"}):
        jsonschema_rs.validate(content["schema"], {"reasoning_style": style})
    for style in ("base", {"start": "<a>"}, {"start": "<a>", "end": "</a>", "name": "a"}):
        assert not jsonschema_rs.is_valid(content["schema"], {"reasoning_style": style})


def test_the_styles_are_those_of_the_grammar() -> None:
    assert {style.value for style in ToolStyle} == set(TOOL_STYLES)
