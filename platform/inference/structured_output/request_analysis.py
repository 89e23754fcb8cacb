"""Analyses large requests in a worker process of low priority, off the event loop.

Invariant: the requests of a tenant that wait for it are within a bound of bytes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeAlias

import structlog

from loraplex.grammar import errors as grammar_errors
from loraplex.grammar.errors import GrammarRefused, GrammarTooCostly
from loraplex.platform.errors import (
    GatewayError,
    InvalidBody,
    InvalidParameter,
    Overloaded,
    ShareExceeded,
    WorkersUnavailable,
)
from loraplex.platform.inference.structured_output.build_task import (
    Analysis,
    AnalysisSetup,
    BuildPlan,
    CachedPlan,
    CheckBody,
)
from loraplex.platform.workers.messages import Done, Ended, Failed, Refused
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import Sandbox, TaskSpec

SANDBOX: Final = Sandbox(niceness=10, data_bytes=2 << 30)
MAX_PLAN_BYTES: Final = 256 << 20
WAITING_BYTES: Final = 256 << 20
TENANT_BYTES: Final = 32 << 20

Refusal: TypeAlias = GatewayError | GrammarRefused
REFUSALS: Final[dict[str, type[Refusal]]] = {
    each.__name__: each
    for each in (
        InvalidBody,
        InvalidParameter,
        GrammarRefused,
        grammar_errors.AnalysisFailed,
        grammar_errors.GrammarInvalid,
        grammar_errors.GrammarTooCostly,
        grammar_errors.GrammarTooLarge,
        grammar_errors.SchemaNotEnforceable,
    )
}


def request_analysis_task(
    setup: AnalysisSetup,
    environment: Mapping[str, str],
    *,
    deadline_s: float = 20.0,
    queue_timeout_s: float = 60.0,
) -> TaskSpec[CachedPlan | None]:
    """Return the task. One process runs it, so that large requests take one core at most."""
    return TaskSpec(
        name="request_analysis",
        work="large requests",
        unavailable="requests of this size cannot be analysed now",
        function="loraplex.platform.inference.structured_output.build_task:analyzer",
        setup=setup,
        result=CachedPlan | None,
        mode="reuse",
        sandbox=SANDBOX,
        environment=environment,
        deadline_s=deadline_s,
        queue_timeout_s=queue_timeout_s,
        refusals=tuple(REFUSALS.values()),
        max_reply_bytes=MAX_PLAN_BYTES,
    )


class RequestAnalysis:
    """Analyses large requests in the worker pool of a gateway.

    `waiting_bytes` bounds the bodies and constraints that wait, `tenant_bytes` those of one tenant.
    """

    def __init__(
        self,
        pool: WorkerPool,
        task: TaskSpec[CachedPlan | None],
        *,
        waiting_bytes: int = WAITING_BYTES,
        tenant_bytes: int = TENANT_BYTES,
    ) -> None:
        self._pool = pool
        self._task = task
        self._max_waiting = waiting_bytes
        self._max_of_tenant = tenant_bytes
        self._waiting: Counter[bytes] = Counter()
        self._log = structlog.get_logger("loraplex.request_analysis")

    async def check_body(self, namespace: bytes, body: bytes) -> None:
        """Check a body. Raises what `parse_object` raises for it, `ShareExceeded`, `Overloaded`, `WorkersUnavailable`."""
        reply = await self._run(namespace, CheckBody(body), len(body))
        if reply is None:
            raise InvalidBody("The body could not be parsed within the allowed memory.")

    async def plan(self, namespace: bytes, packed: bytes) -> CachedPlan:
        """Build the output plan of constraints packed by `pack_constraints`.

        Raises `GrammarRefused`, `ShareExceeded`, `Overloaded`, `WorkersUnavailable`.
        """
        reply = await self._run(namespace, BuildPlan(packed), len(packed))
        if reply is None or reply.result is None:
            raise GrammarTooCostly("the schemas of this request take too much memory to analyse")
        return reply.result

    async def _run(self, namespace: bytes, analysis: Analysis, size: int) -> Done[CachedPlan | None] | None:
        """Return the result; None when the process ended during it. Raises the error of the request."""
        with self._reserved_bytes(namespace, size):
            reply = await self._pool.run(self._task, (analysis,), namespace)
        match reply:
            case Done():
                return reply
            case Refused():
                raise error_of(reply)
            case Failed(error=error):
                raise RuntimeError(f"the analysis of a request failed: {error}")
            case Ended(how="deadline"):
                self._log.error("analysis late", task=type(analysis).__name__)
                raise WorkersUnavailable(
                    f"this request could not be analysed within {self._task.deadline_s:g} s"
                )
            case Ended(exit_code=exit_code):
                self._log.error("analysis lost", task=type(analysis).__name__, exit_code=exit_code)
                return None

    @contextmanager
    def _reserved_bytes(self, namespace: bytes, size: int) -> Iterator[None]:
        if self._waiting[namespace] + size > max(self._max_of_tenant, size):
            raise ShareExceeded(
                f"More than {self._max_of_tenant} bytes of this tenant's requests wait to be analysed.",
                limit="analysed_bytes",
            )
        if self._waiting.total() + size > max(self._max_waiting, size):
            raise Overloaded(f"More than {self._max_waiting} bytes of requests wait to be analysed.")
        self._waiting[namespace] += size
        try:
            yield
        finally:
            self._waiting[namespace] -= size
            self._waiting += Counter()


def error_of(refused: Refused) -> Refusal:
    """Rebuild the error as the worker raised it."""
    kind = REFUSALS[refused.error]
    if issubclass(kind, GrammarRefused):
        return kind(refused.message, param=refused.param, pointer=refused.pointer)
    return kind(refused.message, param=refused.param)
