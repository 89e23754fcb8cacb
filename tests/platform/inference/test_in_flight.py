"""The sequences in progress are bounded, and the largest tenants are shed: by example and against random arrivals. Requests end
with their tenant, key or version.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.errors import (
    InvalidParameter,
    KeyRevoked,
    Overloaded,
    RequestRevoked,
    ShareExceeded,
    TenantStopped,
    VersionDeleted,
    describe,
)
from loraplex.platform.inference.admission import RequestContext
from loraplex.platform.inference.in_flight import InFlightRequest, InFlightRequests
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.tenants.ledger.usage_ledger import Ended

BIG, SMALL, THIRD = UUID(int=1), UUID(int=2), UUID(int=3)
ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "arrive", "start", "end"]),
        st.integers(0, 4),
        st.integers(1, 40),
    ),
    max_size=80,
)


def context_of(
    tenant_id: UUID, policy_epoch: int = 1, api_key_id: UUID = SMALL, model: ResolvedModel | None = None
) -> RequestContext:
    key: Any = None
    caller = Caller(
        tenant_id=tenant_id,
        tenant_name="acme",
        api_key_id=api_key_id,
        key_id="k",
        scopes=frozenset(),
        weight=1.0,
        tier="standard",
        policy_epoch=policy_epoch,
        address=None,
        key=key,
    )
    never: Any = None
    return RequestContext(
        caller=caller, request_id="r", renew_caller=never, confirm_caller=never, model=model
    )


def place(requests: InFlightRequests, tenant_id: UUID, sequences: int) -> InFlightRequest:
    return requests.add(context_of(tenant_id), sequences)


def ignore(_: RequestRevoked) -> None:
    """Stops nothing."""


async def wait(request: InFlightRequest) -> None:
    """Wait for an engine that does not start the request."""
    async with request.until_started():
        await asyncio.Event().wait()


async def waiting(requests: InFlightRequests, tenant_id: UUID, sequences: int) -> "asyncio.Task[None]":
    task = asyncio.create_task(wait(place(requests, tenant_id, sequences)))
    await asyncio.sleep(0)
    return task


async def outcome(task: "asyncio.Task[None]") -> BaseException | None:
    """The error that ended a request, None while it waits."""
    await asyncio.wait((task,), timeout=0.01)
    return task.exception() if task.done() else None


async def cancel(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_newest_request_of_the_largest_tenant_gives_way() -> None:
    requests = InFlightRequests(10)
    older, newer = await waiting(requests, BIG, 2), await waiting(requests, BIG, 3)
    others = await waiting(requests, THIRD, 4)
    small = place(requests, SMALL, 2)
    assert isinstance(await outcome(newer), Overloaded)
    assert await outcome(older) is None and await outcome(others) is None
    small.release()
    await cancel(older, others)
    assert not requests._sequences and not requests._by_tenant


async def test_what_the_engine_has_started_is_not_shed() -> None:
    requests = InFlightRequests(4)
    async with AsyncExitStack() as stack:
        started = place(requests, BIG, 2)
        await stack.enter_async_context(started.until_started())
        started.started(ignore)
        others = await waiting(requests, THIRD, 2)
        assert place(requests, SMALL, 1).sequences == 1
        assert isinstance(await outcome(others), Overloaded)


async def test_no_request_gives_way_to_a_tenant_as_large() -> None:
    requests = InFlightRequests(4)
    others = await waiting(requests, BIG, 2), await waiting(requests, THIRD, 2)
    with pytest.raises(Overloaded, match="server has as many"):
        place(requests, SMALL, 2)
    assert [await outcome(each) for each in others] == [None, None]
    await cancel(*others)


async def test_one_tenant_has_half_at_most() -> None:
    requests = InFlightRequests(8)
    first = place(requests, BIG, 3)
    with pytest.raises(ShareExceeded, match="This tenant may have 4"):
        place(requests, BIG, 2)
    with pytest.raises(InvalidParameter, match="must be at most 4") as never:
        place(requests, SMALL, 5)
    assert never.value.param == "n"
    for _ in range(2):
        first.release()
    place(requests, BIG, 4)


async def test_a_request_that_was_shed_just_before_it_started_does_not_start() -> None:
    requests = InFlightRequests(2)
    request = place(requests, BIG, 1)
    with pytest.raises(Overloaded, match="gave way"):
        async with request.until_started():
            request.shed()
            request.started(ignore)


async def test_errors_of_the_request_itself_pass_and_free_its_place() -> None:
    requests = InFlightRequests(2)
    for error in (ZeroDivisionError, TimeoutError):
        with pytest.raises(error):
            async with place(requests, BIG, 1).until_started():
                raise error
    assert not requests._sequences


@given(st.integers(10, 60), ARRIVALS)
def test_a_tenant_below_its_share_is_refused_only_for_requests_that_have_started(
    total: int, steps: list[tuple[str, int, int]]
) -> None:
    """Its share: the total by the tenants in flight and one more."""
    asyncio.run(play(total, steps))


async def play(total: int, steps: list[tuple[str, int, int]]) -> None:
    requests, placed = InFlightRequests(total), list[PlacedRequest]()
    for kind, number, sequences in steps:
        placed = [each for each in placed if not each.gone(requests)]
        if kind == "arrive":
            placed += await arrive(requests, placed, UUID(int=number), min(sequences, total // 2), total)
        elif placed and kind == "start":
            placed[number % len(placed)].request.started(ignore)
        elif placed:
            await cancel(placed[number % len(placed)].task)
        sizes = requests._sequences
        assert sizes.total() <= total and all(size <= total // 2 for size in sizes.values())
    await cancel(*(each.task for each in placed))
    assert not requests._sequences and not requests._by_tenant


@dataclass(frozen=True)
class PlacedRequest:
    """A request in flight and the task that waits for the engine."""

    request: InFlightRequest
    task: "asyncio.Task[None]"

    def gone(self, requests: InFlightRequests) -> bool:
        return self.request not in requests._by_tenant.get(self.request.tenant_id, {})


async def arrive(
    requests: InFlightRequests, placed: list[PlacedRequest], tenant_id: UUID, sequences: int, total: int
) -> list[PlacedRequest]:
    """The new request, or none if it was refused."""
    before = dict(requests._sequences)
    own = before.get(tenant_id, 0) + sequences
    try:
        request = place(requests, tenant_id, sequences)
    except ShareExceeded:
        assert dict(requests._sequences) == before and own > max(1, total // 2)
        return []
    except Overloaded:
        assert dict(requests._sequences) == before
        larger = [each.request for each in placed if before[each.request.tenant_id] > own]
        if own <= total / (len(before | {tenant_id: 0}) + 1):
            assert any(not each.may_be_shed for each in larger)
        return []
    gone = [each for each in placed if each.gone(requests)]
    assert all(before[each.request.tenant_id] > own for each in gone)
    task = asyncio.create_task(wait(request))
    await asyncio.sleep(0)
    for each in gone:
        assert isinstance(await outcome(each.task), Overloaded)
    return [PlacedRequest(request, task)]


ADAPTER, OTHER = uuid4(), uuid4()
FIRST = ResolvedModel("poet", "poet@1", adapter_id=ADAPTER, version=1)
SECOND = ResolvedModel("poet", "poet@2", adapter_id=ADAPTER, version=2)
NEW_POLICY = context_of(BIG, policy_epoch=4)
OTHER_KEY = context_of(BIG, api_key_id=OTHER)
ON_FIRST, ON_SECOND = context_of(BIG, model=FIRST), context_of(BIG, model=SECOND)
OTHER_TENANT = context_of(THIRD)
EVERY = [NEW_POLICY, OTHER_KEY, ON_FIRST, ON_SECOND, OTHER_TENANT]


@pytest.mark.parametrize(
    ("ended", "contexts", "error", "status", "code"),
    [
        (Ended(BIG, 3), [OTHER_KEY, ON_FIRST, ON_SECOND], TenantStopped, 403, "tenant_suspended"),
        (Ended(BIG, 0, frozenset({OTHER})), [OTHER_KEY], KeyRevoked, 401, "api_key_revoked"),
        (
            *(Ended(BIG, versions=frozenset({(ADAPTER, 1), (OTHER, 2)})), [ON_FIRST]),
            *(VersionDeleted, 404, "adapter_deleted"),
        ),
        (Ended(SMALL, 9, frozenset({SMALL}), frozenset({(ADAPTER, 1)})), [], RequestRevoked, 0, ""),
    ],
    ids=["tenant", "key", "version", "another tenant"],
)
@pytest.mark.parametrize("started", [False, True])
async def test_only_what_ended_ends(
    ended: Ended,
    contexts: list[RequestContext],
    error: type[RequestRevoked],
    status: int,
    code: str,
    started: bool,
) -> None:
    requests, stopped = InFlightRequests(20), list[RequestRevoked]()
    placed = [requests.add(context, 1) for context in EVERY]
    if started:
        for request in placed:
            async with request.until_started():
                request.started(stopped.append)
        tasks = []
    else:
        tasks = [asyncio.create_task(wait(request)) for request in placed]
        await asyncio.sleep(0)
    for _ in range(2):
        requests.end(ended)
    errors = [*stopped] if started else [found for task in tasks if (found := await outcome(task))]
    assert [type(each) for each in errors] == [error] * len(contexts)
    assert [context for context, request in zip(EVERY, placed, strict=True) if request.ended] == contexts
    for each in errors:
        assert isinstance(each, error)
        row = describe(each).row
        assert (row.status, row.code) == (status, code) and "while this request ran" in describe(each).message
    left = len(placed) if started else len(placed) - len(contexts)
    assert requests._sequences.total() == left, "what runs keeps its place until it is closed"
    await cancel(*tasks)


async def test_what_has_ended_is_not_shed_while_it_is_closed() -> None:
    requests, closing = InFlightRequests(4), asyncio.Event()

    async def run() -> None:
        async with requests.add(OTHER_KEY, 2).until_started():
            try:
                await asyncio.Event().wait()
            finally:
                closing.set()
                await asyncio.sleep(0.05)

    task, other = asyncio.create_task(run()), await waiting(requests, THIRD, 2)
    await asyncio.sleep(0)
    requests.end(Ended(BIG, 1))
    await closing.wait()
    assert place(requests, SMALL, 1).sequences == 1
    assert isinstance(await outcome(other), Overloaded)
    await asyncio.wait((task,))
    assert isinstance(task.exception(), TenantStopped)


async def test_a_request_that_ended_just_before_it_started_does_not_start() -> None:
    requests = InFlightRequests(4)
    request = requests.add(OTHER_KEY, 1)
    with pytest.raises(TenantStopped):
        async with request.until_started():
            requests.end(Ended(BIG, 1))
            request.started(ignore)
    assert not requests._sequences
