"""The events of one request between the socket and its reader: bounded, and never waited for by the engine.

Invariant: while the reader lags at most one `Delta` per choice is pending; later ones are merged into it.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from loraplex.engine.messages import Delta, Event, Failed, Finished, TokenLogprob


@dataclass(frozen=True, slots=True)
class EventBufferConfig:
    """A reader may lag by `tokens` tokens or leave an event unread for `stall_s` seconds, not more."""

    tokens: int = 8192
    stall_s: float = 60.0


class _PendingDelta:
    """Deltas of one choice that nobody read yet."""

    __slots__ = ("first", "rest", "since")

    def __init__(self, first: Delta) -> None:
        self.first = first
        self.rest: list[Delta] = []
        self.since = time.monotonic()

    def merged(self) -> Delta:
        if not self.rest:
            return self.first
        parts = [self.first, *self.rest]
        token_ids = [token for part in parts for token in part.token_ids]
        logprobs: list[TokenLogprob] | None = None
        if self.first.logprobs is not None:
            logprobs = [entry for part in parts for entry in part.logprobs or ()]
        text = "".join(part.text for part in parts)
        return Delta(self.first.request_id, self.first.choice, token_ids, text, logprobs)


class EventBuffer:
    """A single reader's queue. `put` never waits; it returns False once the reader lags beyond the limits."""

    def __init__(self, choices: int, limits: EventBufferConfig) -> None:
        self._limits = limits
        self._open_choices = choices
        self._pending: deque[Event | _PendingDelta] = deque()
        self._deltas: dict[int, _PendingDelta] = {}
        self._tokens = 0
        self._ready = asyncio.Event()
        self.ended = False

    def put(self, event: Event) -> bool:
        """Add an event. False asks the caller to abort the request; what comes after the end is ignored."""
        if self.ended:
            return True
        if isinstance(event, Delta):
            return self._put_delta(event)
        if isinstance(event, Finished):
            self._open_choices -= 1
            self._deltas.pop(event.choice, None)
        self.ended = isinstance(event, Failed) or self._open_choices <= 0
        self._pending.append(event)
        self._ready.set()
        return True

    async def get(self) -> Event:
        """The next event, waiting for it. Do not call again after the last one."""
        while not self._pending:
            self._ready.clear()
            await self._ready.wait()
        entry = self._pending.popleft()
        if not isinstance(entry, _PendingDelta):
            return entry
        delta = entry.merged()
        self._tokens -= len(delta.token_ids)
        if self._deltas.get(delta.choice) is entry:
            del self._deltas[delta.choice]
        return delta

    def drained(self) -> bool:
        """True once the last event was read."""
        return self.ended and not self._pending

    def _put_delta(self, delta: Delta) -> bool:
        self._tokens += len(delta.token_ids)
        pending = self._deltas.get(delta.choice)
        if pending is None:
            pending = self._deltas[delta.choice] = _PendingDelta(delta)
            self._pending.append(pending)
            self._ready.set()
        else:
            pending.rest.append(delta)
        return self._tokens <= self._limits.tokens and self._lag_s(pending) <= self._limits.stall_s

    def _lag_s(self, pending: _PendingDelta) -> float:
        return time.monotonic() - pending.since if pending.rest else 0.0
