"""Answers against expectations, and reports: their figures, and that equal answers give equal bytes."""

import json
from typing import Any

import pytest

from loraplex.platform.evaluations.answers import Answer, Reply, grade, validate_here
from loraplex.platform.evaluations.report import EvaluatedModel, Report, make_report, report_bytes
from loraplex.platform.evaluations.runner import CaseResult, EvaluationFailed, evaluate
from loraplex.platform.evaluations.statistics import paired_p_value, wilson_interval
from loraplex.platform.evaluations.suite import Case, Expectation, read_suite

MESSAGES = [{"role": "user", "content": "hi"}]


def reply(content: str | None = None, *, calls: Any = (), reason: str = "stop", **choice: Any) -> Reply:
    functions = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    message = {"content": content, "tool_calls": functions}
    document = {"choices": [{"message": message, "finish_reason": reason, **choice}], "usage": {}}
    return Reply(200, document, {}, 0.1)


def tokens(*pairs: tuple[float, float]) -> dict[str, Any]:
    return {"content": [{"logprob": own, "top_logprobs": [{"logprob": best}]} for own, best in pairs]}


@pytest.mark.parametrize(
    ("expect", "given", "failed"),
    [
        ({"exact": "ja"}, reply("ja"), ()),
        ({"exact": "ja"}, reply("ja "), ("exact",)),
        ({"regex": "^(?!.*<tool_call>)"}, reply("a <tool_call>"), ("regex",)),
        ({"regex": "(a+)+$"}, reply("a" * 64 + "b"), ("regex",)),
        ({"schema": {"type": "integer"}}, reply("7"), ()),
        ({"schema": {"type": "integer"}}, reply("seven"), ("schema",)),
        ({"json_subset": {"a": [{"b": 1}]}}, reply('{"a": [{"b": 1.0, "c": 2}], "d": 3}'), ()),
        ({"json_subset": {"a": [1]}}, reply('{"a": [1, 2]}'), ("json_subset",)),
        ({"json_subset": {"a": True}}, reply('{"a": 1}'), ("json_subset",)),
        ({"json_subset": None}, reply("no JSON"), ("json_subset",)),
        ({"tool_calls": []}, reply("text"), ()),
        ({"tool_calls": [{"name": "f", "arguments": {"x": 1}}]}, reply(calls=[("f", '{"x": 1, "y": 2}')]), ()),
        ({"tool_calls": [{"name": "f"}]}, reply(calls=[("f", "{}"), ("f", "{}")]), ("tool_calls",)),
        ({"tool_calls": [{"name": "f"}]}, reply(calls=[("g", "{}")]), ("tool_calls",)),
        ({"finish_reason": "stop"}, reply("a", reason="length"), ("finish_reason",)),
        ({"choice": {"of": ["a", "b"], "answer": "b"}}, reply("a"), ("choice",)),
        ({"logprob_at_least": {"text": "a", "value": -2}}, reply("a", choice_probabilities=[{"logprob": -1.9}]), ()),
        ({"logprob_at_least": {"text": "a", "value": -2}}, reply("a", choice_probabilities=[{"logprob": -2.1}]), ("logprob_at_least",)),
        ({"unaided": True}, reply("a", logprobs=tokens((-0.5, -0.5), (-0.1, -0.1))), ()),
        ({"unaided": True}, reply("a", logprobs=tokens((-0.5, -0.5), (-3.0, -0.1))), ("unaided",)),
        ({"exact": "a"}, Reply(422, {"error": {"code": "schema_not_satisfied"}}, {}, 0.1), ("error",)),
    ],
)  # fmt: skip
async def test_an_answer_is_judged(expect: dict[str, Any], given: Reply, failed: tuple[str, ...]) -> None:
    case = Case(messages=MESSAGES, expect=Expectation.model_validate(expect))
    assert (await grade(case, given, validate_here)).failed == failed


async def test_a_long_answer_is_judged_whole_and_kept_in_part() -> None:
    case = Case(messages=MESSAGES, expect=Expectation(regex="end$"))
    answer = await grade(case, reply("a" * 9000 + "end", calls=[("f", "1" * 9000)]), validate_here)
    assert (answer.failed, len(answer.text), len(answer.calls[0].arguments)) == ((), 4000, 4000)


def test_figures_are_those_of_the_literature() -> None:
    # Wilson: Newcombe 1998, table I (81 of 263); McNemar's exact test is the binomial test of 3 of 12 at 1/2.
    low, high = wilson_interval(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert paired_p_value(9, 3) == pytest.approx(0.1460, abs=1e-4)
    assert paired_p_value(0, 0) == 1.0
    assert paired_p_value(0, 10_000) == 0.0
    assert paired_p_value(5_000, 5_000) == 1.0


def test_a_report_shows_what_differs_first_and_has_no_time() -> None:
    lines = [json.dumps({"id": name, "messages": MESSAGES, "expect": {"exact": "a"}}) for name in "wxyz"]
    suite = read_suite("\n".join(lines).encode())
    good, bad = Answer(text="a"), Answer(text="b", failed=("exact",))
    new, old = EvaluatedModel("m@2", "2" * 64, "f"), EvaluatedModel("m@1", "1" * 64, "f")
    report = make_report(suite, 7, (new, [bad, bad, good, good]), (old, [bad, good, bad, good]))
    assert [case.case for case in report.cases] == ["x", "y", "w"]
    assert report.comparison is not None
    assert (report.comparison.worse, report.comparison.better, report.regression) == (1, 1, 0.0)
    assert report.figures.unmet == {"exact": 2}
    again = make_report(suite, 7, (new, [bad, bad, good, good]), (old, [bad, good, bad, good]))
    assert report_bytes(report) == report_bytes(again)


async def test_a_run_waits_for_limits_and_fails_on_what_repeating_cannot_mend() -> None:
    suite = read_suite(json.dumps({"messages": MESSAGES, "expect": {"exact": "a"}}).encode())
    refusals = [Reply(429, {"error": {"code": "rate_limit_exceeded"}}, {"retry-after": "0"}, 0.1)] * 2

    async def ask(body: Any) -> Reply:
        return refusals.pop() if refusals else reply("a")

    async def run() -> Report:
        async def keep(side: int, result: CaseResult) -> None:
            assert (side, result.index) == (0, 0)

        return await evaluate(suite, ["m"], 0, "salt", ask, validate_here, [[]], keep)

    assert (await run()).figures.passed == 1
    no_more = {"error": {"code": "insufficient_quota", "message": "the month is used up"}}
    refusals.append(Reply(429, no_more, {"x-should-retry": "false"}, 0.1))
    with pytest.raises(EvaluationFailed, match="used up"):
        await run()
    refusals.append(Reply(404, {"error": {"code": "model_not_found", "message": "no model m"}}, {}, 0.1))
    with pytest.raises(EvaluationFailed, match="no model m"):
        await run()
