"""A served request crosses a budget, and the webhook says so; the meter file gets the hours that closed before."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import psycopg
from standardwebhooks import Webhook
from tests.platform.server.serve_process import (
    make_key,
    make_operator_key,
    model_folder,
    script,
    serving,
    stores,
    until,
)

from loraplex.tenants.scopes import TENANT_ADMIN

__all__ = ["model_folder", "stores"]

ROLLUP = """
    INSERT INTO usage_rollups (tenant_id, hour, adapter_id, api_key_id, price_version_id, currency, requests,
        uncached_tokens, cached_tokens, completion_tokens, amount_pico)
    SELECT id, %s, id, id, id, 'USD', 1, 11, 0, 7, 1 FROM tenants
"""


@contextmanager
def receiving(requests: list[tuple[dict[str, str], bytes]]) -> Iterator[int]:
    """Record the requests to a port, which is yielded."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_crossed_budget_reaches_a_webhook_and_closed_hours_a_file(
    tmp_path: Path, model_folder: Path, stores: dict[str, str]
) -> None:
    admin = make_key(stores["database_url"], scopes=(TENANT_ADMIN,))
    operator = make_operator_key(stores["database_url"])
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=3)
    with psycopg.connect(stores["database_url"]) as connection:
        connection.execute(ROLLUP, [hour])
        (tenant_id,) = connection.execute("SELECT id FROM tenants").fetchone() or ("",)
    meter, requests = tmp_path / "meter.jsonl", list[tuple[dict[str, str], bytes]]()
    settings = {"webhook_allow_private": "true", "meter_export": str(meter), **stores}
    with (
        receiving(requests) as port,
        serving(tmp_path / "s", model_folder, script(), settings=settings) as serve,
    ):
        until(lambda: httpx.get(f"{serve.url}/readyz").status_code == 200)
        with httpx.Client(base_url=serve.url, headers={"authorization": f"Bearer {operator}"}) as client:
            limits = client.patch(
                f"/operator/v1/tenants/{tenant_id}/quotas",
                json={"tokens_per_day": 1000},
                headers={"if-match": '"1"'},
            )
            assert limits.status_code == 200, limits.text
        with httpx.Client(
            base_url=serve.url, headers={"authorization": f"Bearer {admin}"}, timeout=60
        ) as client:
            body: dict[str, object] = {"url": f"http://127.0.0.1:{port}/in", "events": ["quota.threshold"]}
            secret = client.post("/tenant/v1/webhooks", json=body).json()["secret"]
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 850}
            assert client.post("/v1/completions", json=body).status_code == 200
            until(lambda: requests)
            (webhook,) = client.get("/tenant/v1/webhooks").json()["data"]
            path = f"/tenant/v1/webhooks/{webhook['id']}/deliveries?state=delivered"
            until(lambda: client.get(path).json()["data"])
        until(lambda: meter.exists() and meter.read_bytes().count(b"\n") == 2)
    (headers, content) = requests[0]
    event = Webhook(secret).verify(content, headers)
    assert event["type"] == "quota.threshold" and event["data"]["threshold"] == 80
    assert event["data"]["limit"] == 1000 and event["data"]["used"] >= 800
    lines = [json.loads(line) for line in meter.read_text().splitlines()]
    assert [line["payload"]["value"] for line in lines] == ["7", "11"]
    assert {line["timestamp"] for line in lines} == {int(hour.timestamp())}
