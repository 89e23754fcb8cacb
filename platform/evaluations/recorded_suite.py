"""Makes a suite of recorded requests, in a worker process: it expects of each what was answered.

Invariant: what becomes a case would be accepted in an uploaded suite; what would not is left out.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from loraplex.platform.evaluations.answers import Answer
from loraplex.platform.evaluations.suite import (
    MAX_ANSWER_TOKENS,
    MAX_SUITE_BYTES,
    SuiteInvalid,
    SuiteSummary,
    read_suite,
)

JSON_FORMATS: Final = ("json_object", "json_schema")
CANCELLED: Final = "cancelled"
"""Stands for the error of a request whose client left."""
ANY_ANSWER: Final = {"regex": ""}
"""What is expected of a request that was cancelled or has failed: an answer instead of an error."""


class Recording(msgspec.Struct, frozen=True):
    """The content of a recorded request. `request`: the JSON object of its fields that a case knows.

    `repeatable`: it was greedy, and a case has all that its answer follows from. `answer.error` has `CANCELLED`, too.
    """

    request: msgspec.Raw
    repeatable: bool
    answer: Answer


class RecordedSuite(msgspec.Struct, frozen=True):
    """A suite's file, and what a check of it would say."""

    content: bytes
    summary: SuiteSummary


def suite_of(recordings: list[bytes]) -> RecordedSuite:
    """Make a suite, in a worker process."""
    lines: list[bytes] = []
    size = 0
    for content in recordings:
        line = _line(msgspec.json.decode(content, type=Recording))
        if line is not None and size + len(line) <= MAX_SUITE_BYTES:
            lines.append(line)
            size += len(line)
    made = b"".join(lines)
    return RecordedSuite(made, SuiteSummary(hashlib.sha256(made).hexdigest(), len(lines)))


def _line(recording: Recording) -> bytes | None:
    """Return the case of a recording; None if it would be refused, or its answer is longer than that of any case."""
    request, tokens = json.loads(bytes(recording.request)), recording.answer.completion_tokens
    if tokens > MAX_ANSWER_TOKENS:
        return None
    request["max_tokens"] = min(request["max_tokens"], MAX_ANSWER_TOKENS)
    try:
        line = json.dumps(request | {"expect": _expectation(recording, request)}).encode() + b"\n"
        read_suite(line)
    except (SuiteInvalid, ValueError):
        return None
    return line


def _expectation(recording: Recording, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to expect. Raises `ValueError` where the answer's JSON is none.

    Of an answer that was sampled, only how it ended and which tools it called.
    """
    answer = recording.answer
    if answer.error:
        return ANY_ANSWER
    expected: dict[str, Any] = {"finish_reason": answer.finish_reason}
    if answer.finish_reason == "tool_calls":
        arguments = [{"arguments": json.loads(each.arguments)} for each in answer.calls]
        calls = zip(answer.calls, arguments, strict=True)
        expected["tool_calls"] = [
            {"name": call.name} | (given if recording.repeatable else {}) for call, given in calls
        ]
    elif recording.repeatable and not answer.calls:
        is_json = (request.get("response_format") or {}).get("type") in JSON_FORMATS
        if is_json and answer.finish_reason == "stop":
            expected["json_subset"] = json.loads(answer.text)
        else:
            expected["exact"] = answer.text
    return expected
