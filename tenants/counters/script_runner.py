"""Loads and runs the Lua scripts.

Invariant: a script is one atomic step and runs at most once per call. It is sent by its digest, and with its text only after
the server has replied that it did not run.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import Any, Literal

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from loraplex.tenants.counters.pipelined_commands import PipelinedCommands
from loraplex.tenants.errors import CountersNewer, ValkeyUnavailable
from loraplex.tenants.valkey import FAILURES

FOLDER = Path(__file__).parent / "lua"
# Every script begins with these files: their functions are local to it.
OPENING = ("state", "bucket", "reservation")
# So few that each of thousands of bulk calls is answered in its time, which begins with its turn.
MAX_COMMANDS = 32
# How the error of `state.lua` begins.
NEWER = "NEWER"
NEWER_MESSAGE = "a gateway of a newer release counts for this tenant"

ScriptName = Literal[
    "admit",
    "settle",
    "heartbeat",
    "expired",
    "rebuild",
    "settled",
    "read",
    "publish_policy",
    "explain",
    "invalidate",
]


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha1: str


def load_script(name: ScriptName) -> Script:
    text = "\n".join((FOLDER / f"{part}.lua").read_text() for part in (*OPENING, name))
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


class ScriptRunner:
    """Runs scripts on one client, until it has been silent for `deadline_s`. The client's own timeouts are longer.

    Calls that are `bulk` take turns; those that requests wait for do not.
    """

    def __init__(
        self,
        client: Redis,
        deadline_s: float,
        *,
        bulk: bool = False,
        on_newer: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_newer` gets the key of counters whose layout is of a newer release."""
        self._on_newer = on_newer
        self._commands = PipelinedCommands(client)
        self._deadline_s = deadline_s
        self._turns = asyncio.Semaphore(MAX_COMMANDS)
        self._send = self._in_turn if bulk else self._commands.run
        self.fallbacks = 0
        """Scripts that had to be sent with their text."""

    async def run(
        self,
        script: Script,
        state_key: str,
        arguments: Sequence[str | int],
        *,
        deadline_s: float | None = None,
    ) -> Any:
        """Run a script. Raises `ValkeyUnavailable`; then it may or may not have run. Raises `CountersNewer`; then it has done
        nothing. `deadline_s`: in place of the runner's own.
        """
        deadline_s = deadline_s or self._deadline_s
        try:
            try:
                return await self._send(deadline_s, ("EVALSHA", script.sha1, 1, state_key, *arguments))
            except NoScriptError:
                self.fallbacks += 1
                return await self._send(deadline_s, ("EVAL", script.text, 1, state_key, *arguments))
        except TimeoutError as error:
            raise ValkeyUnavailable(f"Valkey did not answer within {deadline_s:g} s") from error
        except ResponseError as error:
            if str(error).startswith(NEWER):
                self._on_newer(state_key)
                raise CountersNewer(NEWER_MESSAGE) from error
            raise ValkeyUnavailable(f"Valkey did not answer: {error}") from error
        except FAILURES as error:
            raise ValkeyUnavailable(f"Valkey did not answer: {error}") from error

    async def _in_turn(self, deadline_s: float, arguments: Sequence[str | int]) -> Any:
        async with self._turns:
            return await self._commands.run(deadline_s, arguments)
