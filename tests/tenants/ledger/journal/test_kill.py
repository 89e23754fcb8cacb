"""A gateway that is killed while it writes: the next one on its data directory finds all that it had promised."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from tests.tenants.ledger.journal.fixtures import MAX_BYTES

from loraplex.tenants.ledger.journal.journal import left_behind
from loraplex.tenants.ledger.journal.records import Ended

ROOT = Path(__file__).parents[4]
LINES = 200


async def test_a_killed_process_loses_nothing_that_it_had_promised(tmp_path: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.tenants.ledger.journal.killed_journal", str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / '.src'}{os.pathsep}{ROOT}"},
    )
    assert child.stdout is not None
    said = [await child.stdout.readline() for _ in range(LINES)]
    assert [each async for each in left_behind(tmp_path, max_bytes=MAX_BYTES)] == []
    child.send_signal(signal.SIGKILL)
    said += (await child.stdout.read()).splitlines(keepends=True)
    await child.wait()

    whole = [line.decode().split() for line in said if line.endswith(b"\n")]
    assert len(whole) >= LINES
    found = [each async for each in left_behind(tmp_path, max_bytes=MAX_BYTES)]
    (journal,) = found
    records = await journal.unshipped(10 * len(whole))
    ended = [str(each.reservation.id) for each in records if isinstance(each, Ended)]
    admitted = [str(each.reservation.id) for each in records if not isinstance(each, Ended)]
    open_ids = {str(each.reservation.id) for each in await journal.open_requests()}
    assert {id for what, id in whole if what == "ended"} <= set(ended)
    assert {id for what, id in whole if what == "admitted"} <= set(admitted)
    assert len(ended) == len(set(ended)) and len(admitted) == len(set(admitted))
    assert open_ids == set(admitted) - set(ended)
    await journal.close()
