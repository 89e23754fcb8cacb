"""A disk that fills up under `loraplex serve`: `/readyz` says what requests get, and the log says once when it began and ended."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import httpx
import pytest
from tests.benchmarks.chaos.disks import Disk
from tests.platform.server.serve_process import Serve, make_key, model_folder, script, serving, stores, until

from loraplex.tenants.ledger.journal.file import MIN_FREE_BYTES

__all__ = ["model_folder", "stores"]

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """The disk of the data directory of `serving(tmp_path, …)`."""
    disk = Disk(tmp_path / "data", MIN_FREE_BYTES + 48 * MIB)
    try:
        disk.mount()
    except CalledProcessError:
        pytest.skip("this user may not mount a file system")
    yield disk
    disk.unmount()


def readiness(serve: Serve) -> tuple[int, str]:
    response = httpx.get(f"{serve.url}/readyz", timeout=30)
    return response.status_code, " ".join(response.json().get("reasons", []))


def complete(serve: Serve, key: str) -> tuple[int, str | None]:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
    headers = {"authorization": f"Bearer {key}"}
    response = httpx.post(f"{serve.url}/v1/completions", json=body, headers=headers, timeout=60)
    return response.status_code, response.json().get("error", {}).get("code")


def refusals(folder: Path) -> list[tuple[str, str]]:
    lines: list[dict[str, Any]] = []
    for line in (folder / "stderr").read_text().splitlines():
        if line.startswith("{"):
            lines.append(json.loads(line))
    return [(each["state"], each["event"]) for each in lines if "refusing" in each["event"]]


def test_readiness_says_what_requests_get_on_a_full_disk(
    tmp_path: Path, model_folder: Path, stores: dict[str, str], disk: Disk
) -> None:
    settings = {"storage_floor_bytes": str(MIN_FREE_BYTES + 256 * MIB), **stores}
    with serving(tmp_path, model_folder, script(), settings=settings) as serve:
        until(lambda: readiness(serve)[0] == 200)
        key = make_key(stores["database_url"])
        assert complete(serve, key) == (200, None)
        # Below the floor of uploads from the start on: the server warns, and serves requests.
        until(lambda: refusals(tmp_path) == [("disk", "refusing uploads")])
        disk.fill(MIN_FREE_BYTES - MIB)
        until(lambda: readiness(serve)[0] == 503)
        assert f"less than {MIN_FREE_BYTES} bytes free" in readiness(serve)[1]
        for _ in range(3):
            assert complete(serve, key)[0] == 507
        assert httpx.get(f"{serve.url}/livez").status_code == 200
        disk.clear()
        until(lambda: readiness(serve)[0] == 200)
        assert complete(serve, key) == (200, None)
        until(lambda: len(refusals(tmp_path)) == 3)
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(60) == 0
    assert refusals(tmp_path) == [
        ("disk", "refusing uploads"),
        ("journal", "refusing requests"),
        ("journal", "not refusing requests any more"),
    ]
