"""One sampled token under a grammar: forced tokens, ends, and a document that is closed in time."""

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.errors import GrammarFailed, GrammarTooSlow
from loraplex.engine.messages import EngineRequest, FinishReason
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling import grammar_advance
from loraplex.engine.scheduling.grammar_advance import (
    MAX_SECONDS,
    MAX_SECONDS_CLOSING,
    ForcedClose,
    advance_grammar,
)

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask

    MaskType = type[ScriptedMask]

END = 1
ENDS = frozenset({END})
PROMPT = [2, 3]


def sequence(mask: Any, **sampling: Any) -> Sequence:
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    request = EngineRequest(request_id="r", namespace=b"", prompt_token_ids=PROMPT, sampling=params)
    return Sequence(request, 0, 0.0, 0, list(PROMPT), token_mask=mask)


def take(row: Sequence, *tokens: int, max_model_len: int = 1000) -> FinishReason | None:
    """Follow these tokens one by one; the last one's reason."""
    reason = None
    for token in tokens:
        assert reason is None and row.token_mask is not None
        reason = advance_grammar(row, row.token_mask, token, ENDS, max_model_len)
    return reason


def output(row: Sequence) -> list[int]:
    return row.token_ids[len(PROMPT) :]


def test_a_document_that_nothing_can_follow_ends_without_an_end_token(scripted_mask: "MaskType") -> None:
    row = sequence(scripted_mask([(5, 6)]), ignore_eos=True, min_tokens=50)
    assert take(row, 5, 6) == "stop" and output(row) == [5, 6]


def test_a_document_that_could_go_on_ends_by_the_end_token(scripted_mask: "MaskType") -> None:
    for ignore_eos in (False, True):
        row = sequence(scripted_mask([(5,), (5, 6)]), ignore_eos=ignore_eos)
        assert take(row, 5) is None
        assert take(row, END) == "stop" and output(row) == [5, END]


@pytest.mark.parametrize("token", [9, END])
def test_a_token_the_grammar_refuses_fails_the_request(scripted_mask: "MaskType", token: int) -> None:
    row = sequence(scripted_mask([(5, 6)]))
    with pytest.raises(GrammarFailed, match=f"token {token}"):
        take(row, 5, token)


@pytest.mark.parametrize("method", ["accept", "forced_tokens", "closing_tokens"])
def test_a_matcher_that_raises_fails_the_request(scripted_mask: "MaskType", method: str) -> None:
    row = sequence(scripted_mask([(5, 6)], broken=method, closes=True))
    with pytest.raises(GrammarFailed, match="RuntimeError"):
        take(row, 5)


def test_a_grammar_whose_work_is_spent_is_too_slow(scripted_mask: "MaskType") -> None:
    row = sequence(scripted_mask([(5, 6)], spent="accept"))
    with pytest.raises(GrammarTooSlow):
        take(row, 5)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of processor time, which only masks spend, under the bounds of the product."""
    spent = [0.0]
    monkeypatch.setattr(grammar_advance, "time", SimpleNamespace(thread_time=lambda: spent[0]))
    monkeypatch.setattr(grammar_advance, "MAX_SECONDS", MAX_SECONDS)
    monkeypatch.setattr(grammar_advance, "MAX_SECONDS_CLOSING", MAX_SECONDS_CLOSING)
    return spent


@pytest.mark.parametrize(("milliseconds", "fails"), [(0.0, False), (0.5, False), (10.0, True)])
def test_a_matcher_takes_little_of_the_step_thread_or_fails(
    scripted_mask: "MaskType", work: list[float], milliseconds: float, fails: bool
) -> None:
    class Slow(scripted_mask):  # type: ignore[misc, valid-type]
        def accept(self, token_id: int) -> bool:
            work[0] += milliseconds / 1000
            return super().accept(token_id)  # type: ignore[no-any-return]

    row = sequence(Slow([(5,) * 60]))
    if fails:
        with pytest.raises(GrammarTooSlow):
            take(row, *[5] * 60)
        assert len(output(row)) < 10
    else:
        assert take(row, *[5] * 60) == "stop"


def test_forced_tokens_follow_in_the_same_step(scripted_mask: "MaskType") -> None:
    documents = [(5, 6, 7, 8), (5, 6, 7, 9)]
    row = sequence(scripted_mask(documents, fast_forward=True))
    assert take(row, 5) is None and output(row) == [5, 6, 7]
    assert take(row, 9) == "stop" and output(row) == [5, 6, 7, 9]
    asks = sequence(scripted_mask(documents, fast_forward=True), logprobs=0)
    assert take(asks, 5) is None and output(asks) == [5]


@pytest.mark.parametrize(
    ("sampling", "max_model_len", "expected", "reason", "stopped_by"),
    [
        ({"max_tokens": 3}, 1000, [5, 6, 7], "length", None),
        ({}, 4, [5, 6], "length", None),
        ({"stop_token_ids": (7,)}, 1000, [5, 6, 7], "stop", 7),
        ({"stop_token_ids": (7,), "min_tokens": 4}, 1000, [5, 6, 7, 8, 9], "stop", None),
        ({"max_tokens": 5}, 1000, [5, 6, 7, 8, 9], "stop", None),
    ],
)
def test_forced_tokens_stop_where_sampled_ones_would(
    scripted_mask: "MaskType",
    sampling: dict[str, Any],
    max_model_len: int,
    expected: list[int],
    reason: str,
    stopped_by: int | None,
) -> None:
    row = sequence(scripted_mask([(5, 6, 7, 8, 9)], fast_forward=True), **sampling)
    assert take(row, 5, max_model_len=max_model_len) == reason
    assert output(row) == expected and row.stopped_by == stopped_by


LONG = (5, *[6] * 20, 7)
SHORT = (5, 8, 9)


def test_the_document_is_closed_when_the_sampled_token_left_no_room_for_it(scripted_mask: "MaskType") -> None:
    mask = scripted_mask([LONG, SHORT], closes=True)
    row = sequence(mask, max_tokens=10)
    assert take(row, 5) is None
    assert take(row, 6) == "stop", "with 6 the rest would take 20 more"
    assert output(row) == [5, 8, 9] and mask.taken == [5, 8, 9]


def test_without_the_option_the_answer_is_cut(scripted_mask: "MaskType") -> None:
    row = sequence(scripted_mask([LONG, SHORT]), max_tokens=3)
    assert take(row, 5, 6, 6) == "length" and output(row) == [5, 6, 6]


def test_a_document_too_long_from_the_start_is_cut(scripted_mask: "MaskType") -> None:
    row = sequence(scripted_mask([LONG], closes=True), max_tokens=8)
    assert take(row, *LONG[:8]) == "length" and output(row) == list(LONG[:8])


def test_a_whole_document_is_no_cut_one_at_the_last_token(scripted_mask: "MaskType") -> None:
    closed = sequence(scripted_mask([(5, 6), (5, 6, 7)], closes=True), max_tokens=2)
    assert take(closed, 5, 6) == "stop" and output(closed) == [5, 6]
    cut = sequence(scripted_mask([(5, 6), (5, 6, 7)]), max_tokens=2)
    assert take(cut, 5, 6) == "length"


def test_a_whole_document_that_went_too_far_is_closed_by_an_end_token(scripted_mask: "MaskType") -> None:
    row = sequence(scripted_mask([(5,), LONG], closes=True), max_tokens=4)
    assert take(row, 5, 6) == "stop" and output(row) == [5, END]


def test_forced_tokens_are_taken_back_together(scripted_mask: "MaskType") -> None:
    mask = scripted_mask([LONG, SHORT], closes=True, fast_forward=True)
    row = sequence(mask, max_tokens=10)
    assert take(row, 5, 6) == "stop" and output(row) == list(SHORT)


def test_with_logprobs_the_way_to_the_end_is_sampled_token_by_token(scripted_mask: "MaskType") -> None:
    row = sequence(scripted_mask([LONG, SHORT], closes=True), max_tokens=10, logprobs=0)
    assert take(row, 5, 6) is None and output(row) == [5], "to be sampled again under another mask"
    assert isinstance(row.token_mask, ForcedClose)
    assert take(row, 8, 9) == "stop" and output(row) == [5, 8, 9]


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    max_tokens=st.integers(1, 14),
    fast_forward=st.booleans(),
    logprobs=st.sampled_from([None, 0]),
    documents=st.lists(
        st.lists(st.integers(5, 7), min_size=1, max_size=16).map(tuple), min_size=1, max_size=6, unique=True
    ),
)
def test_a_document_that_can_be_closed_at_the_start_always_is(
    scripted_mask: "MaskType",
    data: st.DataObject,
    max_tokens: int,
    fast_forward: bool,
    logprobs: int | None,
    documents: list[tuple[int, ...]],
) -> None:
    mask: Any = scripted_mask(documents, closes=True, fast_forward=fast_forward)
    row = sequence(mask, max_tokens=max_tokens, logprobs=logprobs)
    reason = None
    for _ in range(2 * max_tokens):
        if reason is not None:
            break
        mask = row.token_mask
        allowed = [mask._next()] if isinstance(mask, ForcedClose) else mask.allowed()
        reason = take(row, data.draw(st.sampled_from(allowed)))
    answer = tuple(token for token in output(row) if token != END)
    assert reason is not None and len(output(row)) <= max_tokens
    assert any(document[: len(answer)] == answer for document in documents)
    if min(map(len, documents)) <= max_tokens:
        assert reason == "stop" and answer in documents


def test_the_way_to_the_end_is_looked_for_seldom_while_there_is_room(scripted_mask: "MaskType") -> None:
    looks = []

    class Counting(scripted_mask):  # type: ignore[misc, valid-type]
        def closing_tokens(self, most: int) -> list[int] | None:
            looks.append(most)
            return super().closing_tokens(most)  # type: ignore[no-any-return]

    row = sequence(Counting([(5,) * 999, (5,) * 500], closes=True), max_tokens=1000)
    assert row.closing_due == sys.maxsize
    take(row, *[5] * 499)
    assert len(looks) < 70, "of 499 tokens"


def test_slow_searches_for_an_end_are_stopped(scripted_mask: "MaskType", work: list[float]) -> None:
    looks = []

    class Slow(scripted_mask):  # type: ignore[misc, valid-type]
        def closing_tokens(self, most: int) -> list[int] | None:
            looks.append(most)
            work[0] += 0.05
            return super().closing_tokens(most)  # type: ignore[no-any-return]

    row = sequence(Slow([(5,) * 60, (5,) * 50], closes=True), max_tokens=60)
    take(row, *[5] * 49)
    assert len(looks) <= 21 and row.closing_due == -1


def test_a_closing_path_allows_one_token_after_another() -> None:
    import torch

    path = ForcedClose((3, 31, 64), END)
    seen = []
    while not path.is_final():
        bitmask = torch.full((2, 3), -1, dtype=torch.int32)
        path.fill(bitmask, 1)
        words = [word % (1 << 32) for word in bitmask[1].tolist()]
        (token,) = [32 * i + b for i, word in enumerate(words) for b in range(32) if word >> b & 1]
        seen.append(token)
        assert not path.accept(token + 1) and path.accept(token)
    assert seen == [3, 31, 64] and path.is_complete()
    path.rollback(2)
    assert path.fork().accept(31)
    empty = ForcedClose((), END)
    assert empty.is_complete() and not empty.is_final()
