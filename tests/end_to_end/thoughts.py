"""Answers with thought: requests of every form and budget, and what the text of their tokens says that each answer must be.

Invariant: the oracle splits the decoded tokens by string search and validates with `jsonschema`; it uses nothing of the server.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from openai import APIError, OpenAI, UnprocessableEntityError
from tests.end_to_end.generations import RequestCase, Result, options, verdict
from tests.end_to_end.schemas import FORMS, Form, obj, one_of

BUDGETS = (0, 1, 16, 64, None)
ANSWER_TOKENS = 96
FORMS_BESIDE_TOOLS = (
    *("person", "sentiment", "one enum", "mixed enum", "boolean", "tuple", "matrix", "nested objects"),
    *("union of objects", "tree", "date"),
)
MARKED = Form(
    "markers in strings", obj(s=one_of("</think>", "a<think>b</think>", "<tool_call>", "[/T]x", "\n</think>"))
)
THINKING_FORMS = (*(form for form in FORMS if form.tools or form.name in FORMS_BESIDE_TOOLS), MARKED)
MARKER_TOKENS = 8
"""No marker of these models is spelled in more."""
STRIDE = 11
"""No factor of the number of all cases, so that the first sixty have every form, budget and way."""


@dataclass(frozen=True)
class ThoughtCase:
    """`budget` None: half of them ask for thought without a bound, of which the grammar's forced close leaves room for the answer."""

    order: RequestCase
    budget: int | None
    effort: str | None

    @property
    def fields(self) -> dict[str, Any]:
        """The request but for model and stream."""
        fields = options(self.order)
        extra = {**fields.pop("extra_body", {}), "return_token_ids": True}
        if self.budget is not None:
            extra["thinking_token_budget"] = self.budget
        return {**fields, "extra_body": extra} | ({"reasoning_effort": self.effort} if self.effort else {})


@dataclass
class ThoughtAnswer(Result):
    """`thought`: as its deltas came, None without any. `counted`: `reasoning_tokens`, None where usage has none."""

    thought: str | None = None
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    counted: int | None = None

    @property
    def parts(self) -> tuple[object, ...]:
        return self.thought, self.content, self.calls, self.reason, self.token_ids, self.counted


def cases(count: int) -> list[ThoughtCase]:
    """Every form, also none, by every budget, streamed and whole; a third closed at the end."""
    forms = (*THINKING_FORMS, None)
    drawn = []
    for number in range(count):
        rest, is_whole = divmod(number * STRIDE % (len(forms) * len(BUDGETS) * 2), 2)
        form, budget = forms[rest // len(BUDGETS)], BUDGETS[rest % len(BUDGETS)]
        effort = "max" if budget is None and number % 2 else None
        order = RequestCase(
            number,
            form,
            streamed=not is_whole,
            close=number % 3 == 1 or effort is not None,
            max_tokens=ANSWER_TOKENS + (budget or 0),
        )
        drawn.append(ThoughtCase(order, budget, effort))
    return drawn


def ask(client: OpenAI, model: str, case: ThoughtCase, **more: Any) -> ThoughtAnswer:
    """`more`: further fields. Raises whatever the client raises, but for values that only the validator refuses."""
    try:
        fields = {**case.fields, **more}
        return _streamed(client, model, fields) if case.order.streamed else _whole(client, model, fields)
    except UnprocessableEntityError as error:
        assert error.code == "schema_not_satisfied", error
    except APIError as error:
        assert error.code == "schema_not_satisfied", error
    return ThoughtAnswer(unsatisfied=True)


def _whole(client: OpenAI, model: str, fields: dict[str, Any]) -> ThoughtAnswer:
    answer: Any = client.chat.completions.create(model=model, **fields)
    (choice,) = answer.choices
    message, result = choice.message, ThoughtAnswer(reason=choice.finish_reason)
    result.content = message.content or ""
    result.calls = {
        index: (call.function.name, call.function.arguments)
        for index, call in enumerate(message.tool_calls or ())
    }
    result.thought = _thought(message)
    result.prompt_ids, result.token_ids = answer.prompt_token_ids, choice.token_ids
    _count(result, answer.usage)
    return result


def _streamed(client: OpenAI, model: str, fields: dict[str, Any]) -> ThoughtAnswer:
    result = ThoughtAnswer()
    create: Any = client.chat.completions.create
    for chunk in create(model=model, stream=True, stream_options={"include_usage": True}, **fields):
        result.prompt_ids = getattr(chunk, "prompt_token_ids", None) or result.prompt_ids
        if chunk.usage:
            _count(result, chunk.usage)
        for choice in chunk.choices:
            assert result.reason is None, "nothing follows the reason"
            result.reason = choice.finish_reason
            result.token_ids += getattr(choice, "token_ids", None) or []
            thought = _thought(choice.delta)
            if thought is not None:
                assert not result.content and not result.calls, "thought comes first"
                result.thought = (result.thought or "") + thought
            result.content += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                name, arguments = result.calls.get(piece.index, ("", ""))
                added = piece.function.arguments or ""
                result.calls[piece.index] = name or piece.function.name or "", arguments + added
    return result


def _thought(message: Any) -> str | None:
    """Both names, which are equal."""
    thought: str | None = getattr(message, "reasoning", None)
    assert thought == getattr(message, "reasoning_content", None)
    assert thought != "", "no thought is no field"
    return thought


def _count(result: ThoughtAnswer, usage: Any) -> None:
    result.tokens, details = usage.completion_tokens, usage.completion_tokens_details
    result.counted = None if details is None else details.reasoning_tokens


@dataclass(frozen=True)
class Oracle:
    """`decode`: token ids -> text with the markers; `plain`: as it is shown where no thought may come. `ends`: what ends an answer."""

    decode: Callable[[list[int]], str]
    plain: Callable[[list[int]], str]
    ends: Collection[int]
    start: str = "<think>"
    end: str = "</think>"

    def verdict(self, case: ThoughtCase, answer: ThoughtAnswer) -> str:
        """Check an answer and return its kind. Raises `AssertionError` or the validator's error for a wrong one."""
        kind = verdict(case.order, answer)
        if kind == "unsatisfied":
            return kind
        assert len(answer.token_ids) == answer.tokens
        ids = [each for each in answer.token_ids if each not in self.ends]
        assert len(ids) >= answer.tokens - 1
        text, prompt = self.decode(ids), self.decode(answer.prompt_ids).rstrip()
        begun = prompt.endswith(self.start)
        if case.budget == 0:
            assert prompt.endswith(self.end) and answer.counted is None
        else:
            assert begun or (case.budget is None and case.effort is None)
            assert not prompt.endswith(self.end)
        if begun or (case.budget != 0 and text.startswith(self.start)):
            text = self._check_thought(case, answer, text, ids, begun)
        else:
            assert answer.thought is None and not answer.counted
            if case.budget == 0 and not (case.order.form and case.order.form.tools):
                text = self.plain(ids)
        self._check_answer(kind, case, answer, text)
        return kind

    def _check_thought(
        self, case: ThoughtCase, answer: ThoughtAnswer, text: str, ids: list[int], begun: bool
    ) -> str:
        """Check the thought; return the text behind it."""
        thought, marker, rest = text.removeprefix("" if begun else self.start).partition(self.end)
        assert (answer.thought or "").strip() == thought.strip()
        assert self.end not in (answer.thought or "")
        first = self._tokens_before_end(ids) if marker else len(ids)
        counted, written = answer.counted or 0, 0 if begun else self._tokens_of_start(ids)
        # A token may hold the last of the thought and the first of the marker.
        assert first - written - MARKER_TOKENS * (not marker) <= counted <= first - written + 1
        assert case.budget is None or counted <= case.budget
        if case.budget is not None and len(ids) > case.budget + MARKER_TOKENS:
            assert marker, "the end is forced at the budget"
        # Where nothing bounds thought or answer there is no mask: then the model may end inside its thought.
        is_free = case.budget is None and case.order.form is None
        assert marker or answer.reason == "length" or is_free, (
            "an answer ends inside its thought at the limit only"
        )
        return rest.lstrip("\n")

    def _tokens_before_end(self, ids: list[int]) -> int:
        shortest = next(n for n in range(len(ids) + 1) if self.end in self.decode(ids[:n]))
        return max(n for n in range(shortest) if self.end in self.decode(ids[n:shortest]))

    def _tokens_of_start(self, ids: list[int]) -> int:
        return next(n for n in range(len(ids) + 1) if self.start in self.decode(ids[:n]))

    def _check_answer(self, kind: str, case: ThoughtCase, answer: ThoughtAnswer, text: str) -> None:
        before, call, _ = text.partition("<tool_call>")
        if call and case.order.form and case.order.form.tools:
            assert answer.content.strip() == before.strip()
            assert all(arguments in text for _, arguments in answer.calls.values())
        elif kind == "truncated":
            # What may become a call is held back, and a cut answer ends without it.
            assert text.startswith(answer.content)
        else:
            assert answer.content == text and not answer.calls


def summary(kinds: Counter[str], answers: Collection[ThoughtAnswer], seconds: float) -> str:
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    thought, tokens = sum(each.counted or 0 for each in answers), sum(each.tokens for each in answers)
    with_thought = sum(each.thought is not None for each in answers)
    return (
        f"{len(answers)} answers: {counts}; {with_thought} with thought, {tokens} tokens, of which {thought} thought, "
        f"in {seconds:.0f} s"
    )
