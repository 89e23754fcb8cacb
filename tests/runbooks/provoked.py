"""What an on-call person has of a situation, and the clients that keep it going. Invariant: `said` never names the cause."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
from tests.end_to_end.live_server import LiveServer


@dataclass(frozen=True)
class Provoked:
    """A situation that is going on. `said` is what was reported, of the tenant `tenant`.

    `more`: variables of the page besides those of every installation, such as `REQUEST_ID`.
    """

    server: LiveServer
    said: str
    tenant: str
    more: Mapping[str, str] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """The variables of the page's commands."""
        (owner,) = (each for each in self.server.access.tenants if each.name == self.tenant)
        return {
            "URL": self.server.url,
            "OPERATOR_KEY": self.server.access.operator_key,
            "TENANT": self.tenant,
            "TENANT_KEY": owner.admin_key,
            "ADAPTER": owner.adapters[0],
            "DATA_DIR": str(self.server.data_dir),
            "LOG": f"{self.server.data_dir}/errors.*",
            "MONTH": f"{datetime.now(UTC):%Y-%m}",
            **self.more,
        }


def headers_of(server: LiveServer, tenant: str) -> dict[str, str]:
    """Those of an administrator of a tenant of the demo."""
    (owner,) = (each for each in server.access.tenants if each.name == tenant)
    return {"authorization": f"Bearer {owner.admin_key}"}


def send(
    server: LiveServer, tenant: str, body: Mapping[str, Any], timeout_s: float = 300.0
) -> httpx.Response:
    """Send a chat with the inference key of a tenant of the demo; its own adapter unless `body` names a model."""
    (owner,) = (each for each in server.access.tenants if each.name == tenant)
    return httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": owner.adapters[0], **body},
        headers={"authorization": f"Bearer {owner.api_key}"},
        timeout=timeout_s,
    )


def chat(content: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A body of so many tokens exactly."""
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **more}


@contextmanager
def clients(count: int, call: Callable[[int], object]) -> Iterator[None]:
    """So many clients: each calls with its number again once its last call has returned, until the block ends."""
    stopped = threading.Event()

    def run(number: int) -> None:
        while not stopped.is_set():
            try:
                call(number)
            except httpx.TransportError:
                # The server of a block that has ended is killed under its clients.
                if not stopped.wait(1.0):
                    raise

    for number in range(count):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    try:
        yield
    finally:
        stopped.set()
