"""Request analysis in another process: correct replies in order, also when the process or a request ends early."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from tests.platform.process_table import alive

from loraplex.grammar.constraints import JsonSchema, OutputConstraints, SchemaLimits, Tool
from loraplex.grammar.errors import GrammarTooCostly, GrammarTooLarge, SchemaNotEnforceable
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.errors import (
    InvalidBody,
    InvalidParameter,
    MissingParameter,
    Overloaded,
    ShareExceeded,
    WorkersUnavailable,
)
from loraplex.platform.inference.structured_output.build_task import (
    AnalysisSetup,
    pack_constraints,
)
from loraplex.platform.inference.structured_output.request_analysis import (
    REFUSALS,
    Refusal,
    RequestAnalysis,
    error_of,
    request_analysis_task,
)
from loraplex.platform.parameters.json_object import BodyLimits
from loraplex.platform.workers.messages import Refused
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task_function import TaskFunction

ONE, OTHER = b"1" * 32, b"2" * 32
# Each pair of alternatives is compared.
SLOW = {"oneOf": [{"const": {"a": i, "b": [1, 2, {"c": i}]}} for i in range(100)]}


SETUP = AnalysisSetup(BodyLimits(max_values=50_000), SchemaLimits(), frozenset({"<|im_end|>"}))


class Analysis(RequestAnalysis):
    """Request analysis with a pool of its own."""

    def __init__(
        self,
        waiting_bytes: int = 1 << 30,
        tenant_bytes: int = 1 << 30,
        environment: Any = os.environ,
        **bounds: Any,
    ) -> None:
        self.pool = WorkerPool()
        self.task = request_analysis_task(SETUP, environment, **bounds)
        super().__init__(self.pool, self.task, waiting_bytes=waiting_bytes, tenant_bytes=tenant_bytes)

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        return next(iter(self.pool.stats(self.task).pids), None)

    async def start(self) -> None:
        await self.pool.start(self.task)

    async def close(self) -> None:
        await self.pool.close()


@pytest.fixture
async def analyzer() -> AsyncIterator[Analysis]:
    analyzer = Analysis()
    yield analyzer
    await analyzer.close()


def packed(schema: dict[str, Any], *, strict: bool = False) -> bytes:
    return pack_constraints(OutputConstraints(format=JsonSchema(schema, strict, "p")), ToolStyle.GENERIC)


async def test_bodies_are_checked_as_in_this_process(analyzer: Analysis) -> None:
    await analyzer.check_body(ONE, json.dumps({"a": [0] * 40_000}).encode())
    with pytest.raises(InvalidBody, match="more than 50000"):
        await analyzer.check_body(ONE, json.dumps({"a": [0] * 50_000}).encode())
    with pytest.raises(InvalidParameter, match="occurs twice") as twice:
        await analyzer.check_body(ONE, b'{"model": 1, "model": 2}')
    assert twice.value.param == "model"


async def test_a_plan_parses_like_one_built_in_this_process(analyzer: Analysis) -> None:
    tools = tuple(
        Tool(name, "", {"type": "object", "properties": {"a": {"uniqueItems": True}}}, False, name)
        for name in ("f", "g")
    )
    for style in ToolStyle:
        form = OutputConstraints(tools=tools, tool_choice="required")
        cached = await analyzer.plan(ONE, pack_constraints(form, style))
        assert cached.plan.enforcement == "validated" and cached.plan.spec is not None
    cached = await analyzer.plan(ONE, pack_constraints(form, ToolStyle.GENERIC))
    noted: list[tuple[str, str]] = []
    reader = cached.plan.parser(lambda schema, value: noted.append((schema, value)))
    pieces = reader.feed('<tool_call>{"name": "g", "arguments": {"a": [1, 1]}}</tool_call>')
    assert len(pieces) >= 2 and reader.finish("stop")[1] == "tool_calls"
    assert [value for _, value in noted] == ['{"a": [1, 1]}']


async def test_refusals_arrive_with_field_and_place(analyzer: Analysis) -> None:
    with pytest.raises(SchemaNotEnforceable) as refused:
        await analyzer.plan(ONE, packed({"items": {"uniqueItems": True}}, strict=True))
    assert refused.value.param == "p" and refused.value.pointer == "/items/uniqueItems"
    with pytest.raises(GrammarTooLarge, match="at most 262144"):
        await analyzer.plan(ONE, packed({"enum": ["a" * 300_000]}))


async def test_a_request_that_leaves_takes_no_other_reply(analyzer: Analysis) -> None:
    await analyzer.start()
    pid = analyzer.pid
    for index in range(4):
        left = asyncio.create_task(analyzer.plan(ONE, packed({**SLOW, "title": str(index)})))
        await asyncio.sleep(0.01)
        left.cancel()
    cached = await analyzer.plan(ONE, packed({"const": "mine"}))
    assert cached.plan.spec is not None and "mine" in cached.plan.spec.source
    assert analyzer.pid == pid


async def test_two_cancellations_of_a_request_take_no_other_reply() -> None:
    """A disconnect and a timeout are two cancellations of one request."""
    analyzer = Analysis(queue_timeout_s=0.2)
    try:
        await analyzer.start()
        pid = analyzer.pid
        for delay_s in (0.01, 0.19, 0.2):
            left = asyncio.create_task(analyzer.plan(OTHER, packed({**SLOW, "title": str(delay_s)})))
            await asyncio.sleep(delay_s)
            for _ in range(3):
                left.cancel()
                await asyncio.sleep(0.001)
        refused = 0
        while not refused:
            with suppress(WorkersUnavailable):
                try:
                    await analyzer.check_body(ONE, b'{"a": 1, "a": 2}')
                    raise AssertionError("another request's answer")
                except InvalidParameter:
                    refused += 1
        assert analyzer.pid == pid
    finally:
        await analyzer.close()


async def test_a_cancelled_start_leaves_no_unread_reply() -> None:
    analyzer = Analysis()
    starting = asyncio.create_task(analyzer.start())
    await asyncio.sleep(0.1)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    try:
        with pytest.raises(InvalidParameter):
            await analyzer.check_body(ONE, b'{"a": 1, "a": 2}')
        await analyzer.check_body(OTHER, b"{}")
    finally:
        await analyzer.close()
    with pytest.raises(WorkersUnavailable):
        await analyzer.check_body(ONE, b"{}")


async def test_waiting_bytes_are_bounded_per_tenant_and_in_total() -> None:
    analyzer = Analysis(tenant_bytes=1_000, waiting_bytes=1_500)
    body = b"{" + b" " * 698 + b"}"
    try:
        checks = [analyzer.check_body(tenant, body) for tenant in (ONE, ONE, OTHER, b"3" * 32)]
        ended = await asyncio.gather(*checks, return_exceptions=True)
        assert [type(each) for each in ended] == [type(None), ShareExceeded, type(None), Overloaded]
        await analyzer.check_body(ONE, b"{" + b" " * 5_000 + b"}")
    finally:
        await analyzer.close()


async def test_an_internal_error_fails_one_request_and_not_the_process(analyzer: Analysis) -> None:
    await analyzer.start()
    pid = analyzer.pid
    with pytest.raises(RuntimeError, match="failed: JSONDecodeError"):
        await analyzer.plan(ONE, b"no form")
    await analyzer.plan(ONE, packed({"multipleOf": 10**400}))
    assert analyzer.pid == pid


async def test_one_tenants_tasks_do_not_delay_other_tenants(analyzer: Analysis) -> None:
    await analyzer.start()
    ended: list[str] = []

    async def plan(namespace: bytes, schema: dict[str, Any], name: str) -> None:
        await analyzer.plan(namespace, packed(schema))
        ended.append(name)

    greedy = [plan(ONE, {**SLOW, "title": str(index)}, "greedy") for index in range(4)]
    await asyncio.gather(*greedy, plan(OTHER, {"const": 1}, "modest"))
    assert ended.index("modest") <= 1


async def test_the_process_has_low_priority_and_the_session_of_the_server(analyzer: Analysis) -> None:
    await analyzer.start()
    assert analyzer.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, analyzer.pid) == max(10, os.getpriority(os.PRIO_PROCESS, 0))
    assert os.getpgid(analyzer.pid) == analyzer.pid and os.getsid(analyzer.pid) == os.getsid(0)


async def test_a_killed_process_fails_only_its_task(analyzer: Analysis) -> None:
    await analyzer.start()
    old = analyzer.pid
    assert old is not None
    os.kill(old, signal.SIGSTOP)
    lost = asyncio.create_task(analyzer.plan(ONE, packed(SLOW)))
    await asyncio.sleep(0.05)
    os.kill(old, signal.SIGKILL)
    with pytest.raises(GrammarTooCostly):
        await lost
    await analyzer.check_body(ONE, b"{}")
    assert analyzer.pid != old and not alive(old)


async def test_a_task_has_a_deadline() -> None:
    analyzer = Analysis(deadline_s=0.3)
    try:
        await analyzer.start()
        old = analyzer.pid
        assert old is not None
        os.kill(old, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(WorkersUnavailable, match=r"within 0\.3 s"):
            await analyzer.check_body(ONE, b"{}")
        assert time.monotonic() - begun < 30 and not alive(old)
    finally:
        await analyzer.close()


async def test_without_a_process_requests_are_refused() -> None:
    analyzer = Analysis(environment={"PYTHONHOME": "/nowhere"})
    with pytest.raises(WorkersUnavailable):
        await analyzer.check_body(ONE, b"{}")
    with pytest.raises(WorkersUnavailable):
        await analyzer.start()


async def test_the_process_ends_with_the_analyzer(analyzer: Analysis) -> None:
    await analyzer.start()
    pid = analyzer.pid
    await analyzer.close()
    assert pid is not None and not alive(pid)


@pytest.mark.parametrize("kind", REFUSALS.values())
def test_every_refusal_arrives_as_it_was_raised(kind: type[Refusal]) -> None:
    error = refused_by(kind("why", param="p"))
    assert type(error) is kind and str(error) == "why" and error.param == "p"


def test_a_place_in_a_schema_arrives_too_and_a_subclass_as_what_is_known() -> None:
    held = refused_by(SchemaNotEnforceable("why", param="p", pointer="/not"))
    assert isinstance(held, SchemaNotEnforceable) and held.pointer == "/not"
    assert type(refused_by(MissingParameter("why"))) is InvalidParameter
    assert refused_by(InvalidBody("why")).param is None


def refused_by(error: Exception) -> Refusal:
    """The error as the gateway rebuilds it from what a worker sends."""

    def fail(number: int) -> None:
        raise error

    function = TaskFunction(fail, frozenset(REFUSALS))
    return error_of(msgspec.msgpack.decode(function(msgspec.msgpack.encode((1,))), type=Refused))
