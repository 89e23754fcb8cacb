"""Real clients, unmodified, against one demo server: each gets what its script asserts, and sees the usage that the ledger has.

Each client is installed from the package index into an environment of its own, so this is long.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.end_to_end.conftest import demo_model
from tests.end_to_end.live_server import LiveServer, serving
from tests.outside.clients.environments import (
    CLIENTS,
    RUN_S,
    NotInstalled,
    command_of,
    needs_node,
    variables,
)

from loraplex.platform.web.cursors import MAX_LIMIT

__all__ = ["demo_model"]

# What was settled so long ago is in the report of usage.
SETTLED_S = 30.0
PROBES = ("/health", "/metrics")


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A demo of its own: that of `end_to_end` may belong to another process of the run."""
    with serving(tmp_path_factory.mktemp("clients"), demo_model, "--port", "0") as server:
        yield server


@pytest.mark.long
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_is_served(server: LiveServer, demo_model: Path, client: str) -> None:
    if needs_node(client) and shutil.which("node") is None:
        pytest.skip("it needs node")
    try:
        command = command_of(client)
    except NotInstalled as error:
        pytest.fail(str(error))
    key = new_key(server, client)
    environment = variables(f"{server.url}/v1", key["api_key"], server.access.model, demo_model)
    done = subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert seen["requests"]
    unseen = seen.get("unseen", 0)
    ledger = usage_of(server, key["id"], seen["requests"] + unseen)
    assert ledger["requests"] == seen["requests"] + unseen, ledger
    for tokens in ("prompt_tokens", "completion_tokens"):
        assert ledger[tokens] > seen[tokens] if unseen else ledger[tokens] == seen[tokens], (ledger, seen)


@pytest.mark.long
@pytest.mark.parametrize("path", PROBES)
def test_what_load_generators_ask_first(server: LiveServer, path: str) -> None:
    assert httpx.get(f"{server.url}{path}").status_code == 200


def management(server: LiveServer) -> httpx.Client:
    """As the administrator of the first tenant."""
    headers = {"authorization": f"Bearer {server.access.tenants[0].admin_key}"}
    return httpx.Client(base_url=f"{server.url}/tenant/v1", headers=headers)


def new_key(server: LiveServer, name: str) -> dict[str, Any]:
    """A key that one client uses alone."""
    with management(server) as tenant:
        response = tenant.post(
            "/keys", json={"name": f"{name} {os.urandom(4).hex()}", "scopes": ["inference"]}
        )
    assert response.status_code == 201, response.text
    made: dict[str, Any] = response.json()
    return made


def usage_of(server: LiveServer, key_id: str, requests: int) -> dict[str, int]:
    """What was settled for a key, once it is at least `requests`, or after `SETTLED_S`."""
    now = datetime.now(UTC)
    query: dict[str, str | int] = {
        "from": (now - timedelta(days=1)).isoformat(),
        "to": (now + timedelta(days=1)).isoformat(),
        "bucket": "1mo",
        "group_by": "key",
        "limit": MAX_LIMIT,
    }
    deadline = time.monotonic() + SETTLED_S
    while True:
        with management(server) as tenant:
            rows = tenant.get("/usage", params=query).json()["data"]
        found = [row for row in rows if row["key_id"] == key_id]
        total = {
            name: sum(row[name] for row in found)
            for name in ("requests", "prompt_tokens", "completion_tokens")
        }
        if total["requests"] >= requests or time.monotonic() > deadline:
            return total
        time.sleep(0.5)
