"""Suites as users write them: what is read, what is refused with its line, and what can never hold."""

import json
from typing import Any

import pytest

from loraplex.platform.evaluations import suite as suites
from loraplex.platform.evaluations.conformance import conformance_suite
from loraplex.platform.evaluations.suite import SuiteInvalid, parse_suite, read_suite

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
INTEGER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


def line(expect: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields, "expect": expect}).encode()


@pytest.mark.parametrize(
    ("case", "param"),
    [
        (line({}), "expect"),
        (line({"exakt": "a"}), "expect.exakt"),
        (line({"regex": "("}), "expect.regex"),
        (line({"schema": False}), "expect.schema"),
        (
            line({"schema": {"type": "object", "required": ["a"], "properties": {"a": False}}}),
            "expect.schema",
        ),
        (line({"choice": {"of": ["a"], "answer": "b"}}), "expect.choice"),
        (line({"tool_calls": [{"name": "f"}]}), "expect.tool_calls"),
        (line({"tool_calls": [{"name": "g"}]}, tools=[TOOL]), "expect.tool_calls"),
        (line({"finish_reason": "tool_calls"}), "expect.tool_calls"),
        (line({"exact": "a"}, tools=[TOOL], tool_choice="required"), "expect.exact"),
        (line({"exact": "a", "tool_calls": [{"name": "f"}]}, tools=[TOOL]), "expect.exact"),
        (line({"exact": '"a"'}, response_format=INTEGER), "expect.exact"),
        (line({"logprob_at_least": {"text": "a", "value": 0.5}}), "expect.logprob_at_least.value"),
        (line({"logprob_at_least": {"text": "a", "value": -1}, "exact": "a"}), "expect.logprob_at_least"),
        (line({"exact": "a", "regex": "^b"}), "expect.exact"),
        (line({"exact": "a", "choice": {"of": ["a", "b"], "answer": "b"}}), "expect.exact"),
        (line({"regex": None}), "expect"),
        (line({"exact": "a"}, temperature=3), "temperature"),
        (line({"exact": "a"}, model="m"), "model"),
        (line({"exact": "a"}, messages=[{"role": "usr", "content": "a"}]), "messages[0].role"),
        (b"{", None),
        (b"[1]", None),
        (b"\xff", None),
    ],
)
def test_a_case_is_refused_with_its_line_and_field(case: bytes, param: str | None) -> None:
    with pytest.raises(SuiteInvalid, match="Line 3") as refused:
        read_suite(line({"exact": "a"}) + b"\n\n" + case)
    assert refused.value.param is not None
    assert refused.value.param.startswith("3")
    if param is not None:
        assert refused.value.param == f"3.{param}"


def test_a_suite_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    one = line({"exact": "a"})
    monkeypatch.setattr(suites, "MAX_CASES", 2)
    assert len(read_suite(one + b"\r\n" + one).cases) == 2
    for content in (b"", b"\n\n", b"\n".join([one] * 3)):
        with pytest.raises(SuiteInvalid, match="1 to 2 cases"):
            read_suite(content)
    monkeypatch.setattr(suites, "MAX_SUITE_BYTES", len(one) - 1)
    with pytest.raises(SuiteInvalid, match="bytes"):
        read_suite(one)


def test_ids_name_one_case_each() -> None:
    case = line({"exact": "a"}, id="greeting")
    with pytest.raises(SuiteInvalid, match="earlier case"):
        read_suite(case + b"\n" + case)


def test_a_checked_suite_is_parsed_to_the_same_cases() -> None:
    content = conformance_suite()
    parsed, read = parse_suite(content), read_suite(content)
    assert (parsed.sha256, [*parsed.cases]) == (read.sha256, [*read.cases])
    assert len({case.id for case in parsed.cases}) == 30
