"""What `/readyz` of each gateway says beside a load, second by second, against what requests to that gateway get.

Invariant: it counts whether a request is taken, which readiness promises, not whether a response that began is cut off later.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import httpx

from loraplex.platform.drills.traffic import RequestOutcome

INTERVAL_S: Final = 0.25
PROBE_TIMEOUT_S: Final = 1.0
"""A probe without an answer for so long says unready, as Kubernetes takes it."""

Samples = Sequence[tuple[float, bool]]
"""Times of `time.monotonic`, and whether the gateway said then that it was ready."""


@dataclass(frozen=True, slots=True)
class ReadinessFigures:
    """Seconds of all gateways. `ready_refused`: all probes said ready, and a request got an error in place of a response.
    `unready_served`: all said unready, and a request got its response. `unready`: all said so.
    """

    ready_refused: int = 0
    unready_served: int = 0
    unready: int = 0


@dataclass(slots=True)
class ReadinessWatch:
    """Probes each of `base_urls` in its block."""

    base_urls: Sequence[str]
    samples: dict[str, list[tuple[float, bool]]] = field(default_factory=lambda: defaultdict(list))
    _probing: Sequence["asyncio.Task[None]"] = ()

    async def __aenter__(self) -> Self:
        self._probing = [asyncio.create_task(self._probe(url)) for url in self.base_urls]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._probing:
            task.cancel()
        await asyncio.gather(*self._probing, return_exceptions=True)

    async def _probe(self, url: str) -> None:
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S) as client:
            while True:
                asked_s = time.monotonic()
                try:
                    is_ready = (await client.get(f"{url}/readyz")).status_code == httpx.codes.OK
                except httpx.TransportError:
                    is_ready = False
                self.samples[url].append((asked_s, is_ready))
                await asyncio.sleep(max(0.0, asked_s + INTERVAL_S - time.monotonic()))


def readiness_figures(
    samples: Mapping[str, Samples], outcomes: Iterable[RequestOutcome], since_s: float
) -> ReadinessFigures:
    """Compare each whole second since `since_s` with the requests that began in it."""
    refused, served = set[tuple[str, int]](), set[tuple[str, int]]()
    for outcome in outcomes:
        begun = outcome.base_url, math.floor(outcome.started_s - since_s)
        if outcome.complete:
            served.add(begun)
        elif outcome.status != httpx.codes.OK:
            refused.add(begun)
    ready, unready = set[tuple[str, int]](), set[tuple[str, int]]()
    for url, found in samples.items():
        for second, said in _seconds(found, since_s).items():
            if len(said) == 1:
                (ready if said == {True} else unready).add((url, second))
    return ReadinessFigures(len(ready & refused), len(unready & served), len(unready))


def _seconds(samples: Samples, since_s: float) -> dict[int, set[bool]]:
    """What was said in each second; in one without a probe, while an earlier one waited, what that one found."""
    said: dict[int, set[bool]] = defaultdict(set)
    last: tuple[int, bool] | None = None
    for asked_s, is_ready in samples:
        second = math.floor(asked_s - since_s)
        if last is not None:
            for between in range(last[0] + 1, second):
                said[between].add(last[1])
        said[second].add(is_ready)
        last = second, is_ready
    return {second: each for second, each in said.items() if second >= 0}
