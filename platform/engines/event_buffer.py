"""Bounded buffer of one request's events between the engine's socket and the task that reads them; the engine never waits for it.

Invariant: while the reader lags, at most one `Delta` per choice is pending; later ones are merged into it.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from loraplex.engine.messages import Delta, Event, Failed, Finished, TokenLogprob, Usage

READER_STALL_S: Final = 60.0
"""A client that reads nothing for this long has gone: its request is aborted and its connection closed."""


@dataclass(frozen=True, slots=True)
class EventBufferConfig:
    """Bounds of a reader's lag: `tokens` unread tokens, and `stall_s` seconds for an unread event."""

    tokens: int = 8192
    stall_s: float = READER_STALL_S


DEFAULT_BUFFER: Final = EventBufferConfig()


class _UnsentDelta:
    """Unread deltas of one choice."""

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
    """Queue for a single reader. `put` never waits; it returns False once the reader lags beyond the bounds."""

    def __init__(self, choices: int, config: EventBufferConfig) -> None:
        self._config = config
        self._open_choices = choices
        self._pending: deque[Event | _UnsentDelta] = deque()
        self._deltas: dict[int, _UnsentDelta] = {}
        self._tokens = 0
        self._ready = asyncio.Event()
        self._failure: Failed | None = None
        self._usage: dict[int, Usage] = {}
        self.ended = False

    def put(self, event: Event) -> bool:
        """Add an event. False means that the caller must abort the request. Events after the last one are ignored."""
        if self.ended:
            return True
        if self._failure is not None:
            self._put_usage(event)
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

    def fail(self, failure: Failed) -> None:
        """Deliver no more tokens. `failure` is the last event, with the usage of the choices that the abort ends.

        The caller aborts the request, and calls `end` when the engine has acknowledged that.
        """
        if not self.ended and self._failure is None:
            self._failure = failure

    def end(self) -> None:
        """End with the event given to `fail`. Has no effect without one."""
        if self._failure is not None and not self.ended:
            self.ended = True
            self._pending.append(replace(self._failure, usage=self._usage))
            self._ready.set()

    async def get(self) -> Event:
        """Wait for the next event and return it. Do not call again after the last event."""
        while not self._pending:
            self._ready.clear()
            await self._ready.wait()
        entry = self._pending.popleft()
        if not isinstance(entry, _UnsentDelta):
            return entry
        delta = entry.merged()
        self._tokens -= len(delta.token_ids)
        if self._deltas.get(delta.choice) is entry:
            del self._deltas[delta.choice]
        return delta

    def drained(self) -> bool:
        """True once the last event has been read."""
        return self.ended and not self._pending

    def _put_usage(self, event: Event) -> None:
        """Keep the usage of a choice that ends after `fail`; its tokens are part of it."""
        if isinstance(event, Finished):
            self._open_choices -= 1
            self._usage[event.choice] = event.usage
        elif isinstance(event, Failed):
            self._usage |= event.usage
        if isinstance(event, Failed) or self._open_choices <= 0:
            self.end()

    def _put_delta(self, delta: Delta) -> bool:
        self._tokens += len(delta.token_ids)
        pending = self._deltas.get(delta.choice)
        if pending is None:
            pending = self._deltas[delta.choice] = _UnsentDelta(delta)
            self._pending.append(pending)
            self._ready.set()
        else:
            pending.rest.append(delta)
        return self._tokens <= self._config.tokens and self._lag_s(pending) <= self._config.stall_s

    def _lag_s(self, pending: _UnsentDelta) -> float:
        return time.monotonic() - pending.since if pending.rest else 0.0
