"""How much of our own code one chat passes before the engine, and how deep admission lies: a table that grows by decision only.

`pytest tests/platform/inference/test_hops.py -s` prints it. Counted are the calls of functions of the product, on the event loop's
thread, and how often a coroutine goes on, once the gateway has served the same request before.
"""

import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import httpx
import pytest
from tests.platform.web.gateway import BASE_MODEL, start_gateway
from tests.platform.web.limited_gateway import CACHED, limited

import loraplex.tenants
from loraplex.engine.fake_engine import FakeEngine
from loraplex.engine.messages import EngineRequest, Event
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.tenants.counters import pipelined_commands
from loraplex.tenants.database import Database

__all__ = ["start_gateway"]

CHAT = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
MOST = {"calls": 447, "functions": 296, "files": 67, "frames of admit": 6, "frames of settle": 6}
# Tasks that the request starts inherit it; those that ran before have it not.
OF_THE_CHAT = ContextVar("of_the_chat", default=False)
PRODUCT = next(iter(loraplex.tenants.__path__)).removesuffix("tenants")


@dataclass
class Hops:
    """The calls of the product's functions, by (file, function), and the depths of Valkey commands below `admit` and `settle`."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    depths: dict[str, list[str]] = field(default_factory=dict)
    _counts: bool = True

    def see(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and self._counts and OF_THE_CHAT.get() and file.startswith(PRODUCT):
            self.calls[(file, frame.f_code.co_qualname)] += 1

    def stop(self) -> None:
        self._counts = False

    @property
    def table(self) -> dict[str, int]:
        return {
            "calls": self.calls.total(),
            "functions": len(self.calls),
            "files": len({file for file, _ in self.calls}),
            **{f"frames of {name}": len(frames) for name, frames in self.depths.items()},
        }


def frames_below(name: str) -> list[str]:
    """The product's frames from the controller's method of this name to the caller's caller, the outermost first."""
    frame, found = sys._getframe(2), list[str]()
    while frame is not None:
        if frame.f_code.co_filename.startswith(PRODUCT):
            found.insert(0, frame.f_code.co_qualname)
            if frame.f_code.co_qualname == f"QuotaAdmissionController.{name}":
                return found
        frame = frame.f_back  # type: ignore[assignment]
    return []


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hops]:
    hops = Hops()
    submit, send = FakeEngine.submit, pipelined_commands._Pipe.send

    async def submitted(self: FakeEngine, request: EngineRequest) -> AsyncIterator[Event]:
        hops.stop()
        async for event in submit(self, request):
            yield event

    def sent(self: Any, command: bytes) -> Any:
        for name in ("admit", "settle"):
            if (found := frames_below(name)) and name not in hops.depths:
                hops.depths[name] = found
        return send(self, command)

    monkeypatch.setattr(FakeEngine, "submit", submitted)
    monkeypatch.setattr(pipelined_commands._Pipe, "send", sent)
    OF_THE_CHAT.set(True)
    sys.setprofile(hops.see)
    try:
        yield hops
    finally:
        sys.setprofile(None)
        monkeypatch.undo()


async def test_a_chat_passes_no_more_than_was_decided(
    start_gateway: Any, database: Database, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = limited(start_gateway, database, valkey_url, CACHED, ServingConfig(), requests_per_minute=1000)
    async with warm as (gateway, _):
        transport, headers = httpx.ASGITransport(gateway.app), {"authorization": f"Bearer {gateway.key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as http:
            for _ in range(3):
                assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
            with counted(monkeypatch) as hops:
                assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    print()
    for name, value in hops.table.items():
        print(f"{name:18}{value:6} at most {MOST[name]}")
    for name, frames in hops.depths.items():
        print(f"{name}: {' > '.join(frames)}")
    for (file, function), count in hops.calls.most_common(40):
        print(f"{count:5} {file.removeprefix(PRODUCT)}: {function}")
    assert {name for name, value in hops.table.items() if value > MOST[name]} == set()
