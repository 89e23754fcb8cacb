"""Work that outlives its request goes on to its end, and its error is not lost with its caller."""

import asyncio

import pytest
from structlog.testing import capture_logs

from loraplex.platform.inference.background_tasks import BackgroundTasks
from loraplex.tenants.errors import JournalUnavailable


@pytest.mark.parametrize(
    ("error", "level"), [(ZeroDivisionError(), "error"), (JournalUnavailable("the disk is slow"), "warning")]
)
async def test_an_error_behind_a_client_that_left_is_logged(error: Exception, level: str) -> None:
    tasks, go_on = BackgroundTasks(), asyncio.Event()

    async def settle() -> None:
        await go_on.wait()
        raise error

    request = asyncio.create_task(tasks.finish(settle()))
    await asyncio.sleep(0)
    request.cancel()
    with capture_logs() as logs:
        with pytest.raises(asyncio.CancelledError):
            await request
        go_on.set()
        await tasks.join()
        await asyncio.sleep(0)
    assert [each["log_level"] for each in logs] == [level]


async def test_an_error_that_the_caller_gets_is_its_own_to_log() -> None:
    async def settle() -> None:
        raise ZeroDivisionError

    with capture_logs() as logs, pytest.raises(ZeroDivisionError):
        await BackgroundTasks().finish(settle())
    assert logs == []
