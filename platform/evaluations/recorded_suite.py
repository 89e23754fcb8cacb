"""Makes a suite of recorded requests, in a worker process: it expects of each what was answered.

Invariant: what becomes a case would be accepted in an uploaded suite; what would not is left out.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from loraplex.platform.errors import InvalidParameter, WorkersUnavailable
from loraplex.platform.evaluations.answers import Answer
from loraplex.platform.evaluations.suite import MAX_ANSWER_TOKENS, MAX_SUITE_BYTES, SuiteInvalid, read_suite
from loraplex.platform.workers.messages import Done, Ended
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import MIB, Sandbox, TaskSpec

DEADLINE_S: Final = 120.0
SANDBOX: Final = Sandbox(data_bytes=2 << 30)
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
    stream: bool
    repeatable: bool
    answer: Answer


class RecordedSuite(msgspec.Struct, frozen=True):
    """A suite's file, and what a check of it would say."""

    content: bytes
    sha256: str
    cases: int


def recorded_suite_task(environment: Mapping[str, str]) -> TaskSpec[RecordedSuite]:
    """Return the task. Each suite has a process of its own, one at a time for a tenant."""
    return TaskSpec(
        name="recorded_suite",
        work="suites of recorded requests",
        unavailable="suites cannot be made now",
        function="loraplex.platform.evaluations.recorded_suite:suite_of",
        result=RecordedSuite,
        mode="spawn",
        sandbox=SANDBOX,
        environment=environment,
        deadline_s=DEADLINE_S,
        queue_timeout_s=2 * DEADLINE_S,
        queued_per_tenant=4,
        max_reply_bytes=MAX_SUITE_BYTES + MIB,
    )


class RecordedSuites:
    """Makes suites in the worker pool of a gateway."""

    def __init__(self, pool: WorkerPool, task: TaskSpec[RecordedSuite]) -> None:
        self._pool = pool
        self._task = task

    async def make(self, namespace: bytes, recordings: Sequence[bytes]) -> RecordedSuite:
        """Make a suite of a tenant's recordings, in their order. Raises `InvalidParameter`, `WorkersUnavailable`."""
        match await self._pool.run(self._task, (recordings,), namespace):
            case Done(result=made) if made.cases:
                return made
            case Done():
                count = len(recordings)
                raise InvalidParameter(f"None of {count} recorded requests becomes a case.", param="limit")
            case Ended():
                bounds = f"{DEADLINE_S:g} s and {SANDBOX.data_bytes} bytes of memory"
                raise InvalidParameter(
                    f"The suite cannot be made within {bounds}: name fewer requests.", param="limit"
                )
            case failed:
                raise WorkersUnavailable(f"{self._task.unavailable}: {failed.error}")


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
    return RecordedSuite(made, hashlib.sha256(made).hexdigest(), len(lines))


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
