"""Background child processes with pipes on standard input and output.

Invariant: a child shares this process's session, in which its low priority counts, but has its own process group, so
that terminal signals do not reach it. Only `setpgrp`, which takes no lock, runs between fork and exec (uvloop has no
`process_group`).
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
    """Start `python -m module arguments`. A line of its output has at most `READ_AHEAD` bytes. Raises `OSError`."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        env=dict(environment),
        limit=READ_AHEAD,
        preexec_fn=os.setpgrp,
    )


async def end_child(process: Process) -> None:
    """Kill the process and reap it."""
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
