"""Profiles: closed names, the bounds of the request table, and no chat template."""

import pytest
from tests.platform.parameters.request_parts import USER

from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.errors import InvalidParameter, UnknownParameter
from loraplex.platform.parameters.adapter_profile import DEFAULTABLE, read_profile_change
from loraplex.platform.parameters.parameter_table import read_parameters
from loraplex.tenants.models import TOOL_STYLES


def test_absent_null_and_given() -> None:
    assert read_profile_change({}) == {}
    assert read_profile_change({"tool_style": None, "defaults": None}) == {"tool_style": None, "defaults": {}}
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


def test_the_styles_are_those_of_the_grammar() -> None:
    assert {style.value for style in ToolStyle} == set(TOOL_STYLES)
