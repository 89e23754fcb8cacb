"""Situations of an engine under load: what waits, what is computed twice, and who takes the rows."""

import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.end_to_end.live_server import serving
from tests.runbooks.provoked import Provoked, chat, clients, send

QUESTION = "Where is my parcel?"
POLICY = "Answer in one sentence, be polite, name no price, and never promise a date of delivery. " * 12
TENANTS = ("acme", "harbor", "ledger")
ONE_ADAPTER_BYTES = 2_000_000
"""Room for one adapter of the demo, which takes 1.2 MB."""
SMALL_KV_BYTES = 1600 * 23_040
"""KV cache of 1,600 tokens."""


@contextmanager
def idle_with_queue(folder: Path, model: Path) -> Iterator[Provoked]:
    """`adapter_bytes` holds one adapter, and the requests of the moment name three."""
    settings = {"adapter_bytes": str(ONE_ADAPTER_BYTES)}
    with serving(folder, model, "--port", "0", settings=settings) as server:
        said = "Requests queue, and the processor's dashboard says that there is plenty to spare. Do we need more machines?"
        with clients(12, lambda number: send(server, TENANTS[number % 3], chat(QUESTION, 24))):
            yield Provoked(server, said, "acme")


@contextmanager
def busy_but_slow(folder: Path, model: Path) -> Iterator[Provoked]:
    """The KV cache holds a few of the rows that `max_num_seqs` lets in: they are preempted, and computed again."""
    with serving(folder, model, "--port", "0", settings={"kv_cache_bytes": str(SMALL_KV_BYTES)}) as server:
        said = "The processor is at its limit all day, and users get half of the tokens per second that they had in the test."
        with clients(
            12, lambda number: send(server, TENANTS[number % 3], chat(f"{uuid.uuid4()}: {POLICY}", 300))
        ):
            yield Provoked(server, said, "acme")


@contextmanager
def no_prefix_gain(folder: Path, model: Path) -> Iterator[Provoked]:
    """The system prompt begins with an id of the conversation, so no two prompts share a block."""
    with serving(folder, model, "--port", "0") as server:

        def ask(_: int) -> None:
            system = {"role": "system", "content": f"Conversation {uuid.uuid4()}. {POLICY}"}
            messages = [system, {"role": "user", "content": QUESTION}]
            send(server, "acme", {"messages": messages, "max_tokens": 8})

        said = "All our prompts share a system prompt of 250 tokens, but the bill has no cached tokens."
        with clients(1, ask):
            yield Provoked(server, said, "acme")


@contextmanager
def slow_first_token(folder: Path, model: Path) -> Iterator[Provoked]:
    """The client sends its tools in another order each time: long prompts, of which nothing is found in the cache."""
    with serving(folder, model, "--port", "0") as server:

        def ask(_: int) -> None:
            tools = [tool(number) for number in range(6)]
            random.shuffle(tools)
            send(server, "acme", chat(QUESTION, 8, tools=tools))

        ask(0)
        said = "Our users ask four words and look at an empty page for seconds. Once it begins to write it is fast."
        with clients(1, ask):
            yield Provoked(server, said, "acme")


def tool(number: int) -> dict[str, Any]:
    fields = {
        name: {"type": "string", "description": f"The {name} of the search."}
        for name in ("query", "after", "before", "author", "language")
    }
    function = {
        "name": f"search_{number}",
        "description": "Search one collection of documents by text and date, and return the best of them.",
        "parameters": {"type": "object", "properties": fields, "required": ["query"]},
    }
    return {"type": "function", "function": function}


@contextmanager
def hurting_tenant(folder: Path, model: Path) -> Iterator[Provoked]:
    """A tenant without limits has been given a hundred times the share of the others, and keeps a queue."""
    with serving(folder, model, "--port", "0", settings={"max_num_seqs": "8"}) as server:
        operator = {"authorization": f"Bearer {server.access.operator_key}"}
        tenants = f"{server.url}/operator/v1/tenants"
        known = httpx.get(tenants, headers=operator).json()["data"]
        (number,) = (each["id"] for each in known if each["name"] == "ledger")
        tag = {"if-match": httpx.get(f"{tenants}/{number}", headers=operator).headers["etag"]}
        change = httpx.patch(f"{tenants}/{number}/tier", json={"weight": 100}, headers={**operator, **tag})
        change.raise_for_status()
        said = (
            "Since this morning each of our short questions takes seconds. We send two at a time, as always."
        )
        with (
            clients(24, lambda _: send(server, "ledger", chat("Write all that you know.", 100))),
            clients(2, lambda _: send(server, "acme", chat(QUESTION, 8))),
        ):
            yield Provoked(server, said, "acme")
