"""`loraplex engine` against running servers: engines are listed, added, drained and replaced under load, and no request fails."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.platform.server.serve_process import (
    make_key,
    make_operator_key,
    model_folder,
    script,
    serving,
    stores,
    until,
)
from typer.testing import CliRunner

from loraplex.platform.cli import engine

__all__ = ["model_folder", "stores"]
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 10}


def command(key: str, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(engine.app, [*arguments, "--key", "-"], input=f"{key}\n")
    assert result.exit_code == code, result.output
    return result.output


def numbers(key: str, *arguments: str) -> list[tuple[int, str]]:
    rows = json.loads(command(key, "list", *arguments, "--json"))
    return [(row["number"], row["state"]) for row in rows]


@contextmanager
def load(url: str, key: str) -> Iterator[list[int]]:
    """Requests of four clients until the block ends: their statuses."""
    statuses, ends = list[int](), threading.Event()

    def ask() -> None:
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=url, headers=headers, timeout=120) as client:
            while not ends.is_set():
                statuses.append(client.post("/v1/completions", json=COMPLETION).status_code)

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        yield statuses
    finally:
        ends.set()
        for client in clients:
            client.join()


def test_an_engine_is_replaced_and_drained_under_load_and_no_request_fails(
    tmp_path: Path, model_folder: Path, stores: dict[str, str]
) -> None:
    with serving(
        tmp_path / "s", model_folder, script(token_interval_s=0.01), "--engines", "2", settings=stores
    ) as serve:
        operator, here = make_operator_key(stores["database_url"]), ("--data-dir", f"{tmp_path}/s/data")
        until(lambda: numbers(operator, *here) == [(0, "up"), (1, "up")])
        with load(serve.url, make_key(stores["database_url"])) as statuses:
            until(lambda: len(statuses) > 20)
            command(operator, "drain", "0", "--replace", "--json", *here)
        assert set(statuses) == {200}
        assert numbers(operator, *here) == [(1, "up"), (2, "up")]
        assert "There is no engine 9" in command(operator, "drain", "9", "--url", serve.url, code=1)
        refused = command(operator, "add", "--address", "ipc:///a", *here, code=1)
        assert "starts its engines itself" in refused
    assert "no server runs" in command(operator, "list", *here, code=1)


@pytest.mark.long
def test_engines_are_added_and_drained_under_load_until_one_is_left(
    tmp_path: Path, model_folder: Path, stores: dict[str, str]
) -> None:
    with serving(
        tmp_path / "s", model_folder, script(token_interval_s=0.01), "--engines", "2", settings=stores
    ) as serve:
        operator, here = make_operator_key(stores["database_url"]), ("--data-dir", f"{tmp_path}/s/data")
        with load(serve.url, make_key(stores["database_url"])) as statuses:
            until(lambda: numbers(operator, *here) == [(0, "up"), (1, "up")])
            for number in (0, 1):
                added = json.loads(command(operator, "add", "--json", *here))
                assert (added["number"], added["state"]) == (number + 2, "up")
                before = len(statuses)
                command(operator, "drain", str(number), "--grace-s", "60", *here)
                until(lambda before=before: len(statuses) > before + 20)  # type: ignore[misc]
            command(operator, "drain", "2", *here)
            assert "add one first" in command(operator, "drain", "3", *here, code=1)
        assert set(statuses) == {200}
        command(operator, "drain", "3", "--force", *here)
        until(lambda: numbers(operator, *here) == [])
        assert httpx.get(f"{serve.url}/readyz").status_code == 503
        command(operator, "add", *here)
        until(lambda: httpx.get(f"{serve.url}/readyz").status_code == 200)
        serve.process.terminate()
        assert serve.process.wait(60) == 0


@pytest.mark.long
def test_a_gateway_follows_the_engines_of_other_units(
    tmp_path: Path, model_folder: Path, stores: dict[str, str]
) -> None:
    def unit(name: str, *arguments: str) -> Any:
        options = ("--role", "engine", "--engine", f"ipc://{tmp_path}/run/{name}.sock")
        return serving(tmp_path / name, model_folder, script(), *options, *arguments, wait=False)

    pattern = ("--role", "gateway", "--engine", f"ipc://{tmp_path}/run/*.sock")
    with (
        unit("0") as first,
        serving(tmp_path / "g", model_folder, script(), *pattern, settings=stores) as gateway,
    ):
        operator, url = make_operator_key(stores["database_url"]), ("--url", gateway.url)
        assert numbers(operator, *url) == [(0, "up")]
        with unit("1"), load(gateway.url, make_key(stores["database_url"])) as statuses:
            until(lambda: numbers(operator, *url) == [(0, "up"), (1, "up")])
            command(operator, "drain", "0", *url)
            assert first.process.wait(60) == 0
            until(lambda: numbers(operator, *url) == [(1, "up")])
            with unit("0"):
                # Its number comes back with its socket.
                until(lambda: numbers(operator, *url) == [(0, "up"), (1, "up")])
                count = len(statuses)
                until(lambda: len(statuses) > count + 20)
                command(operator, "drain", "0", *url)
        assert set(statuses) == {200}
