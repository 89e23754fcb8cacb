"""Situations about what was answered, and what it cost: other words, another model, another bill."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from tests.end_to_end.live_server import RUN, LiveServer, environment, serving
from tests.runbooks.provoked import Provoked, chat, clients, headers_of, send

from loraplex.platform.demo.tenants import ADAPTERS_FOLDER

QUESTION = "Where is my parcel?"
SAMPLES = 10
IMPATIENT_S = 1.0


@contextmanager
def wrong_output(folder: Path, model: Path) -> Iterator[Provoked]:
    """The alias still splits its requests between two versions, long after the canary."""
    with serving(folder, model, "--port", "0") as server:
        options = ("--tenant", "acme", "--name", "support", "--no-alias", "--data-dir", str(folder))
        run("adapter", "push", str(ADAPTERS_FOLDER / "records"), *options)
        headers = headers_of(server, "acme")
        alias = f"{server.url}/tenant/v1/adapters/support/aliases/production"
        tag = httpx.get(alias, headers=headers).headers["etag"]
        split = {"split": [{"version": 1, "weight": 50}, {"version": 2, "weight": 50}]}
        httpx.put(alias, json=split, headers={**headers, "if-match": tag}).raise_for_status()
        old = next(
            answer for answer in answers(server) if answer.headers["x-loraplex-adapter"] == "support@1"
        )
        said = (
            "Version 2 of our adapter is live since last month, but half of the answers are in the old style."
        )
        with clients(1, lambda _: slowly(server, chat(QUESTION, 16))):
            yield Provoked(server, said, "acme", {"REQUEST_ID": old.headers["x-request-id"]})


def answers(server: LiveServer) -> Iterator[httpx.Response]:
    for number in range(60):
        yield send(server, "acme", chat(f"{QUESTION} It is number {number}.", 8))


def slowly(server: LiveServer, body: dict[str, object]) -> None:
    send(server, "acme", body)
    time.sleep(0.5)


@contextmanager
def upgrade(folder: Path, model: Path) -> Iterator[Provoked]:
    """The new unit file has `quantization = int8`, which the release notes did not ask for."""
    greedy = chat(QUESTION, 24, temperature=0)
    with serving(folder, model, "--port", "0") as before:
        for _ in range(SAMPLES):
            send(before, "acme", greedy)
        before.stop()
    with serving(folder, model, "--port", "0", settings={"quantization": "int8"}) as server:
        said = (
            "Since last night's upgrade our regression suite fails: same prompts, temperature 0, other words."
        )
        with clients(1, lambda _: slowly(server, greedy)):
            yield Provoked(server, said, "acme")


@contextmanager
def bills_differ(folder: Path, model: Path) -> Iterator[Provoked]:
    """The customer's client gives up after a second and tries again; its log has the requests that it waited for."""
    with serving(folder, model, "--port", "0") as server:

        def impatient(_: int) -> None:
            with suppress(httpx.ReadTimeout):
                send(server, "acme", chat(QUESTION, 64), IMPATIENT_S)
            send(server, "acme", chat(QUESTION, 4))

        said = "You bill us several times the tokens that our log adds up, from the `usage` of every answer that we got."
        with clients(2, impatient):
            yield Provoked(server, said, "acme")


def run(*arguments: str) -> None:
    """Run a command of `loraplex` to its end. Its output would say what the reader is to find."""
    command = [sys.executable, "-c", RUN, *arguments]
    subprocess.run(command, env=environment({}), check=True, stdout=subprocess.DEVNULL)
