"""Child processes: the command of a Python child, and background children with pipes on standard input and output.

Invariants: no child imports modules from the working directory. A background child shares this process's session, in which
its low priority counts, but not its process group, so that terminal signals do not reach it.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection, Mapping
from typing import Final

READ_AHEAD: Final = 1 << 20


def python_command(*arguments: str) -> tuple[str, ...]:
    """Return a command of this interpreter, without the working directory or a script's folder on its module path."""
    return (sys.executable, "-P", *arguments)


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs `module` as a program."""
    return python_command("-m", module, *arguments)


async def spawn_child(
    module: str, *arguments: str, environment: Mapping[str, str], descriptors: Collection[int] = ()
) -> Process:
    """Start a module as a program; it inherits `descriptors`, under their numbers. Raises `OSError`.

    Up to twice `READ_AHEAD` bytes of its output wait in this process to be read.
    """
    return await asyncio.create_subprocess_exec(
        *module_command(module, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        env=dict(environment),
        limit=READ_AHEAD,
        pass_fds=tuple(descriptors),
        preexec_fn=os.setpgrp,  # uvloop has no `process_group`; `setpgrp` takes no lock between fork and exec
    )
