"""Runs the evaluations that tenants have queued, in this gateway: one case at a time, behind the tenant's own traffic.

Invariant: an answer is kept before the next case begins, so that another gateway goes on where this one ended.
"""

import asyncio
import hashlib
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import structlog

from loraplex.platform.errors import GatewayError, Overloaded
from loraplex.platform.evaluations.answers import Reply
from loraplex.platform.evaluations.conformance import NAME, conformance_suite
from loraplex.platform.evaluations.report import Report, report_bytes
from loraplex.platform.evaluations.runner import CaseResult, EvaluationFailed, evaluate
from loraplex.platform.evaluations.suite import Suite, parse_suite
from loraplex.platform.web.evaluations.own_requests import OwnRequests
from loraplex.platform.web.evaluations.suites import contents_of
from loraplex.platform.web.planes import Planes
from loraplex.tenants.errors import StoreUnavailable, TenantsError
from loraplex.tenants.evaluations import runs
from loraplex.tenants.evaluations.encrypted_contents import EncryptedContents
from loraplex.tenants.evaluations.runs import EvaluationRun
from loraplex.tenants.repetition import attempt
from loraplex.tenants.scopes import INFERENCE

POLL_S: Final = 2.0
RENEW_S: Final = 15.0
AT_ONCE: Final = 2
"""Evaluations that one gateway runs, of as many tenants."""
TURN_S: Final = 600.0
"""After so long an evaluation lets others of the installation go first."""
SHARE: Final = 2
"""An evaluation waits while less than one part in so many of a rate is left to the tenant's other requests."""
LONGEST_PAUSE_S: Final = 30.0
LOG: Final = structlog.get_logger("loraplex.evaluations")


class EvaluationLost(Exception):
    """It was cancelled or deleted, or another gateway runs it."""


@dataclass(slots=True)
class EvaluationExecution:
    """The evaluations that one gateway runs; `run` runs until it is cancelled."""

    planes: Planes
    requests: OwnRequests
    _running: set["asyncio.Task[None]"] = field(default_factory=set)

    async def run(self) -> None:
        """Look for work every `POLL_S` seconds."""
        try:
            while True:
                await attempt(LOG, self._begin_next(), "evaluation not begun", (TenantsError, OSError))
                await asyncio.sleep(POLL_S)
        finally:
            for task in self._running:
                task.cancel()

    async def _begin_next(self) -> None:
        if len(self._running) >= AT_ONCE:
            return
        async with self.planes.dependencies.database.as_operator() as session:
            found = await runs.claim_next(session)
        if found is not None:
            task = asyncio.create_task(self._execute(found))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _execute(self, run: EvaluationRun) -> None:
        """Run an evaluation to its end. One that this gateway has to leave is claimed again when its lease has ended."""
        renewing = asyncio.create_task(self._renew(run))
        work = asyncio.create_task(self._answer_all(run))
        renewing.add_done_callback(lambda _: work.cancel())
        try:
            with suppress(EvaluationLost, asyncio.CancelledError):
                await work
        except (StoreUnavailable, Overloaded) as error:
            LOG.warning("evaluation interrupted", evaluation=str(run.id), reason=str(error))
        except (GatewayError, TenantsError) as error:
            await self._fail(run, str(error))
        except Exception:
            LOG.exception("evaluation failed", evaluation=str(run.id))
            await self._fail(run, "an internal error")
        finally:
            work.cancel()
            renewing.cancel()

    async def _renew(self, run: EvaluationRun) -> None:
        """Keep the lease; return when it is lost."""
        while True:
            await asyncio.sleep(RENEW_S)
            with suppress(TenantsError):
                async with self.planes.dependencies.database.as_operator() as session:
                    if not await runs.renew(session, run):
                        return

    async def _answer_all(self, run: EvaluationRun) -> None:
        suite, contents, dependencies = await self._suite(run), self._contents, self.planes.dependencies
        async with dependencies.database.as_operator() as session:
            kept = await runs.kept_answers(session, run)
        sides = await asyncio.to_thread(
            lambda: [
                [_result(contents.decrypt(run.tenant_id, run.id, each)) for each in side] for side in kept
            ]
        )
        began, pause = time.monotonic(), 0.0

        async def ask(body: Mapping[str, Any]) -> Reply:
            # Before a case, and not behind one: its answer is kept at once.
            nonlocal pause
            await asyncio.sleep(pause)
            reply = await self._ask(run, body)
            pause = pause_s(reply.headers)
            return reply

        async def keep(side: int, result: CaseResult) -> None:
            await self._keep(run, side, result, sum(map(len, sides)) + 1)
            if time.monotonic() - began > TURN_S:
                await self._release(run)

        report = await evaluate(
            suite,
            [run.model] if run.baseline is None else [run.model, run.baseline],
            run.seed,
            str(run.id),
            ask,
            partial(dependencies.value_validation.validate, dependencies.namespace_of(run.tenant_id)),
            sides,
            keep,
        )
        await self._complete(run, report, sides)

    async def _ask(self, run: EvaluationRun, body: Mapping[str, Any]) -> Reply:
        """Send a request as the key that began the evaluation. Raises `EvaluationFailed` for a key that may not any more."""
        try:
            caller = await self.planes.authenticator.caller_of(run.key_id, run.address, INFERENCE)
        except (StoreUnavailable, Overloaded):
            raise
        except (GatewayError, TenantsError) as error:
            raise EvaluationFailed(f"its key {run.key_id} cannot go on: {error}") from error
        return await self.requests.ask(caller, body)

    async def _release(self, run: EvaluationRun) -> None:
        """Let evaluations that wait longer go first; this one goes on in its turn."""
        async with self.planes.dependencies.database.as_operator() as session:
            await runs.release(session, run)
        raise EvaluationLost

    async def _keep(self, run: EvaluationRun, side: int, result: CaseResult, done: int) -> None:
        content = self._contents.encrypt(run.tenant_id, run.id, msgspec.json.encode(result))
        async with self.planes.dependencies.database.as_operator() as session:
            if not await runs.renew(session, run, done):
                raise EvaluationLost
            await runs.keep_answer(session, run, side, result.index, content)

    async def _complete(self, run: EvaluationRun, report: Report, sides: list[list[CaseResult]]) -> None:
        content = report_bytes(report)
        encrypted = await asyncio.to_thread(self._contents.encrypt, run.tenant_id, run.id, content)
        figures = report.baseline_figures
        values = {
            "state": "completed",
            "pass_rate": report.figures.pass_rate,
            "baseline_pass_rate": None if figures is None else figures.pass_rate,
            "system_fingerprint": report.model.system_fingerprint,
            "latency": {"seconds": _latency(sides[0]), "baseline_seconds": _latency(sides[1])},
            "report": encrypted,
            "report_sha256": hashlib.sha256(content).hexdigest(),
        }
        await self._end(run, values)

    async def _fail(self, run: EvaluationRun, reason: str) -> None:
        await attempt(
            LOG, self._end(run, {"state": "failed", "reason": reason[:1000]}), "evaluation not ended"
        )

    async def _end(self, run: EvaluationRun, values: Mapping[str, Any]) -> None:
        async with self.planes.dependencies.database.as_operator() as session:
            await runs.end(session, run, values)

    async def _suite(self, run: EvaluationRun) -> Suite:
        if run.suite == NAME and run.suite_id is None:
            content = conformance_suite()
        elif run.content is None or run.suite_id is None:
            raise EvaluationFailed(f"suite {run.suite} is deleted")
        else:
            content = await asyncio.to_thread(
                self._contents.decrypt, run.suite_tenant, run.suite_id, run.content
            )
        suite = await asyncio.to_thread(parse_suite, content)
        if suite.sha256 != run.suite_sha256:
            raise EvaluationFailed(f"this release has another suite {run.suite}: evaluate again")
        return suite

    @property
    def _contents(self) -> EncryptedContents:
        return contents_of(self.planes.dependencies)


def pause_s(headers: Mapping[str, str]) -> float:
    """Return how long the next case waits, in seconds, so that half of each rate is left to the tenant's other requests."""
    longest = 0.0
    for name in ("requests", "tokens"):
        limit = int(headers.get(f"x-ratelimit-limit-{name}", 0))
        missing = limit / SHARE - int(headers.get(f"x-ratelimit-remaining-{name}", limit))
        if limit:
            longest = max(longest, missing / (limit / 60))
    return min(longest, LONGEST_PAUSE_S)


def _result(content: bytes) -> CaseResult:
    return msgspec.json.decode(content, type=CaseResult)


def _latency(side: list[CaseResult]) -> dict[str, float] | None:
    """Return the median and the 95th percentile of an answer's seconds."""
    seconds = [each.seconds for each in side]
    if len(seconds) < 2:
        return {"p50": seconds[0], "p95": seconds[0]} if seconds else None
    return {
        "p50": statistics.median(seconds),
        "p95": statistics.quantiles(seconds, n=20, method="inclusive")[-1],
    }
