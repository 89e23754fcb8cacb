"""Situations of single engines: one of two that is slow, and one that dies again and again."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
from tests.end_to_end.live_server import LiveServer, command_line, descendants, serving
from tests.end_to_end.lost_stores import scripted
from tests.runbooks.provoked import Provoked, chat, clients, send

from loraplex.engine.fake_engine import Fault

POISON = 777
"""A token that ends the engine which reads it."""
POISON_EVERY_S = 8.0
PATIENCE_S = 3.0
RUNS_S, STANDS_S = 0.1, 0.4
TENANTS = ("acme", "ledger", "harbor")
STORY = chat("Write a story.", 60)


@contextmanager
def slow_stream(folder: Path, model: Path) -> Iterator[Provoked]:
    """One of two engines gets its processor for a fifth of the time, as on a card that is too hot."""
    with serving(folder, model, "--port", "0", "--engines", "2", settings=scripted_by(folder)) as server:
        pids = [pid for pid in descendants(server.process.pid) if "engines.main" in command_line(pid)]
        said = (
            "Some streams crawl, a word each second, and others are as fast as ever. It is the same prompts."
        )
        with throttled(max(pids)), clients(6, lambda number: send(server, TENANTS[number % 3], STORY)):
            yield Provoked(server, said, "acme")


def scripted_by(folder: Path, *faults: Fault) -> dict[str, str]:
    """The settings of an engine that writes 50 tokens per second and computes none."""
    script = folder / "script.json"
    script.write_bytes(msgspec.json.encode(scripted(0.02, faults)))
    return {"fake_engine": str(script)}


@contextmanager
def throttled(pid: int) -> Iterator[None]:
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            os.kill(pid, signal.SIGSTOP)
            stopped.wait(STANDS_S)
            os.kill(pid, signal.SIGCONT)
            stopped.wait(RUNS_S)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@contextmanager
def dying_engine(folder: Path, model: Path) -> Iterator[Provoked]:
    """Prompts of one tenant end the engine, each of them a new one, so that no memory of deaths knows it."""
    fault = Fault(kind="crash", prompt_token=POISON, after_tokens=2)
    with serving(folder, model, "--port", "0", settings=scripted_by(folder, fault)) as server:
        said = "The engine was restarted dozens of times since noon, and the streams of everybody pause for seconds."
        with (
            clients(2, lambda number: patiently(server, TENANTS[number])),
            clients(1, lambda _: poison(server)),
        ):
            yield Provoked(server, said, "acme")


def patiently(server: LiveServer, tenant: str) -> None:
    """A client that waits before it tries again."""
    if send(server, tenant, STORY).status_code != 200:
        time.sleep(PATIENCE_S)


def poison(server: LiveServer) -> None:
    (owner,) = (each for each in server.access.tenants if each.name == "harbor")
    prompt = [*random.sample(range(1000, 40_000), 12), POISON]
    httpx.post(
        f"{server.url}/v1/completions",
        json={"model": server.access.model, "prompt": prompt, "max_tokens": 20},
        headers={"authorization": f"Bearer {owner.api_key}"},
        timeout=300,
    )
    time.sleep(POISON_EVERY_S)
