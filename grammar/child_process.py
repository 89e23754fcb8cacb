"""Child processes that work for this one in the background, spoken to over their standard input and output.

Invariant: they share this process's session, inside which their low priority counts, but not its group: what a terminal
sends to the group does not reach them. Between fork and exec nothing runs but `setpgrp`, which takes no lock (uvloop does not
know `process_group`).
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

READ_AHEAD: Final = 1 << 20


async def spawn_child(module: str, *arguments: str, environment: Mapping[str, str]) -> Process:
    """`python -m module arguments`. A line of its output has at most `READ_AHEAD` bytes. Raises `OSError`."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        env=dict(environment),
        limit=READ_AHEAD,
        preexec_fn=os.setpgrp,
    )


async def end_child(process: Process) -> None:
    """Kill and reap it."""
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
