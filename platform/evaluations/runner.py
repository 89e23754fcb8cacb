"""Runs a suite on one or two models, one request at a time.

Invariant: a request that another load keeps waiting is repeated; only what says something of the model becomes an answer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import httpx
import msgspec

from loraplex.platform.errors import GatewayError
from loraplex.platform.evaluations.answers import Answer, Reply, Validate, grade
from loraplex.platform.evaluations.report import EvaluatedModel, Report, make_report
from loraplex.platform.evaluations.suite import Suite

WAITED: Final = frozenset({429, 500, 502, 503, 504, 507})
"""Statuses of requests that are repeated, unless `x-should-retry` forbids it, or the code is one of `OF_THE_MODEL`."""
OF_THE_MODEL: Final = frozenset(
    {"adapter_quarantined", "adapter_error", "adapter_load_failed", "non_finite_logits", "timeout"}
)
LONGEST_OUTAGE_S: Final = 1800.0
"""For so long a request is repeated."""
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


Keep: TypeAlias = Callable[[int, CaseResult], Awaitable[None]]
"""(0 for the model or 1 for its baseline, result)."""


async def evaluate(
    suite: Suite,
    models: Sequence[str],
    seed: int,
    salt: str,
    ask: Ask,
    validate: Validate,
    sides: Sequence[list[CaseResult]],
    keep: Keep,
) -> Report:
    """Run a suite on a model, and on its baseline if `models` names one, behind the results that `sides` has already.

    A result is kept before the next case begins. Raises `EvaluationFailed`, and what `keep` raises.
    """
    for side, model in enumerate(models):
        results = sides[side]
        for index in range(len(results), len(suite.cases)):
            case = suite.cases[index]
            reply = await _reply(ask, case.body(model, seed, salt))
            served = EvaluatedModel(
                reply.headers.get("x-loraplex-adapter", model),
                reply.headers.get("x-loraplex-adapter-digest", ""),
                str(reply.document.get("system_fingerprint") or ""),
            )
            result = CaseResult(index, await grade(case, reply, validate), served, reply.seconds)
            if not result.answer.error and served_model(results, served) != served:
                raise EvaluationFailed(f"{model} changed while it was evaluated: evaluate it again.")
            await keep(side, result)
            results.append(result)
    named = [served_model(side, EvaluatedModel(model)) for side, model in zip(sides, models)]
    if len(named) == 2 and named[0] == named[1]:
        raise EvaluationFailed(f"{models[1]} is {models[0]} itself: there is nothing to compare")
    if len({each.system_fingerprint for each in named} - {""}) > 1:
        raise EvaluationFailed("the engine changed between the model and its baseline: evaluate again")
    found = [(model, [each.answer for each in side]) for model, side in zip(named, sides)]
    return await asyncio.to_thread(make_report, suite, seed, *found)


def served_model(results: Sequence[CaseResult], otherwise: EvaluatedModel) -> EvaluatedModel:
    """Return the model that answered first; `otherwise` where none has."""
    return next((each.served for each in results if not each.answer.error), otherwise)


async def _reply(ask: Ask, body: Mapping[str, Any]) -> Reply:
    """Return the reply of a request that was admitted, or whose refusal is the model's. Raises `EvaluationFailed`."""
    began, wait_s = time.monotonic(), 0.5
    while True:
        reply = await ask(body)
        code = (reply.document.get("error") or {}).get("code")
        if reply.status not in WAITED | {401, 403, 404} or code in OF_THE_MODEL:
            return reply
        is_final = reply.status not in WAITED or reply.headers.get("x-should-retry") == "false"
        if is_final or time.monotonic() - began > LONGEST_OUTAGE_S:
            raise EvaluationFailed(f"{body['model']}: {_message(reply)}")
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        await asyncio.sleep(min(max(wait_s, float(reply.headers.get("retry-after", 0))), LONGEST_WAIT_S))


def _message(reply: Reply) -> str:
    return str((reply.document.get("error") or {}).get("message") or f"HTTP {reply.status}")


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
