"""Runs a suite on one or two models, one request at a time.

Invariant: a request that another load keeps waiting is repeated; only what says something of the model becomes an answer.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from uuid import uuid4

import httpx
import msgspec

from loraplex.platform.errors import GatewayError
from loraplex.platform.evaluations.answers import Answer, Reply, Validate, judged, validate_here
from loraplex.platform.evaluations.report import EvaluatedModel, Report, make_report
from loraplex.platform.evaluations.suite import Suite

WAITED: Final = frozenset({429, 502, 503, 504})
"""Statuses of requests that are repeated, unless `x-should-retry` forbids it."""
MAX_WAITS: Final = 60
LONGEST_WAIT_S: Final = 30.0
Ask: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[Reply]]
"""Sends the body of a chat completion."""


class EvaluationFailed(GatewayError):
    """The suite cannot be run to its end: a limit that does not refill, a model that does not exist, another model midway."""


class CaseResult(msgspec.Struct, frozen=True):
    """`seconds`: from the request to the end of the answer."""

    index: int
    answer: Answer
    served: EvaluatedModel
    seconds: float


async def run_cases(
    suite: Suite, model: str, seed: int, salt: str, ask: Ask, validate: Validate, first: int = 0
) -> AsyncIterator[CaseResult]:
    """Yield the result of each case of a suite from the place `first` on, in order. Raises `EvaluationFailed`."""
    served: EvaluatedModel | None = None
    for index in range(first, len(suite.cases)):
        case = suite.cases[index]
        reply = await _reply(ask, case.body(model, seed, salt))
        found = EvaluatedModel(
            reply.headers.get("x-loraplex-adapter", model),
            reply.headers.get("x-loraplex-adapter-digest", ""),
            str(reply.document.get("system_fingerprint") or ""),
        )
        if reply.status == 200:
            if served not in (None, found):
                raise EvaluationFailed(f"{model} changed while it was evaluated: evaluate it again.")
            served = found
        yield CaseResult(index, await judged(case, reply, validate), found, reply.seconds)


async def _reply(ask: Ask, body: Mapping[str, Any]) -> Reply:
    """Return the reply of a request that was admitted, or whose refusal is the model's. Raises `EvaluationFailed`."""
    for _ in range(MAX_WAITS):
        reply = await ask(body)
        code = (reply.document.get("error") or {}).get("code")
        if reply.status in (401, 403, 404):
            raise EvaluationFailed(f"{body['model']}: {_message(reply)}")
        if reply.status not in WAITED or code in ("adapter_quarantined", "timeout"):
            return reply
        if reply.headers.get("x-should-retry") == "false":
            raise EvaluationFailed(f"{body['model']}: {_message(reply)}")
        await asyncio.sleep(min(float(reply.headers.get("retry-after", 1)), LONGEST_WAIT_S))
    raise EvaluationFailed(f"{body['model']}: {_message(reply)}, after {MAX_WAITS} attempts")


def _message(reply: Reply) -> str:
    return str((reply.document.get("error") or {}).get("message") or f"HTTP {reply.status}")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation. `seconds`: of each case, of the model; then of the baseline."""

    report: Report
    seconds: list[float]
    baseline_seconds: list[float]


async def evaluate(
    suite: Suite,
    model: str,
    baseline: str | None,
    seed: int,
    ask: Ask,
    on_case: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Run a suite of one's own on a model, then on its baseline. Raises `EvaluationFailed`."""
    salt = uuid4().hex
    sides: list[tuple[EvaluatedModel, list[Answer], list[float]]] = []
    for name in (model, baseline):
        answers: list[Answer] = []
        seconds: list[float] = []
        served = EvaluatedModel(name or "")
        if name is not None:
            async for result in run_cases(suite, name, seed, salt, ask, validate_here):
                answers.append(result.answer)
                seconds.append(result.seconds)
                served = served if result.answer.error else result.served
                on_case(sum(len(side[1]) for side in sides) + len(answers))
        sides.append((served, answers, seconds))
    (first, answers, seconds), (second, others, other_seconds) = sides
    if baseline is not None and first == second and first.system_fingerprint:
        raise EvaluationFailed(f"{baseline} is {model} itself: there is nothing to compare")
    compared = None if baseline is None else (second, others)
    return Evaluation(make_report(suite, seed, (first, answers), compared), seconds, other_seconds)


def asking(client: httpx.AsyncClient) -> Ask:
    """Return what sends chat completions with a client of `/v1`. Raises `EvaluationFailed` where the server cannot be reached."""

    async def ask(body: Mapping[str, Any]) -> Reply:
        began = time.perf_counter()
        try:
            response = await client.post("chat/completions", json=body)
            document = response.json() if response.content else {}
        except httpx.TransportError as error:
            raise EvaluationFailed(f"{client.base_url}: {error or type(error).__name__}") from error
        except ValueError:
            document = {}
        return Reply(response.status_code, document, response.headers, time.perf_counter() - began)

    return ask
