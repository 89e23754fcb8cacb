"""Content of tenants and secrets of keys are in no log (level debug), error body, metric, PostgreSQL column or Valkey key.

All content that tenants send contains a leak marker. Every column of every table is searched, as its owner. `STORED_MARKER` is stored
on purpose and must be found until the tenant is deleted.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import redis
from psycopg import sql
from tests.platform.server.serve_process import (
    Serve,
    make_key,
    make_operator_key,
    model_folder,
    script,
    serving,
    stores,
    until,
)
from tests.platform.web.upload_server import CONFIG, WEIGHTS, declared

from loraplex.tenants.api_keys.key_format import ParsedKey, generate_key

__all__ = ["model_folder", "stores"]

LEAK_MARKER = "kanarienvogel7f3a9c"
STORED_MARKER = "leuchtturm5b2d8e"
SCHEMA = {
    "type": "object",
    "description": LEAK_MARKER,
    "properties": {
        LEAK_MARKER: {"enum": [LEAK_MARKER, "b"]},
        "c": {"type": "string", "pattern": f"^{LEAK_MARKER}$"},
    },
    "required": [LEAK_MARKER, "c"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": LEAK_MARKER, "description": LEAK_MARKER, "parameters": SCHEMA},
}
ANSWERED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chat/completions", {}),
    ("chat/completions", {"stream": True, "stream_options": {"include_usage": True}}),
    ("chat/completions", {"user": LEAK_MARKER, "metadata": {"k": LEAK_MARKER}, "stop": [LEAK_MARKER]}),
    ("chat/completions", {"cache_salt": LEAK_MARKER, "prompt_cache_key": LEAK_MARKER}),
    ("chat/completions", {"tools": [TOOL], "tool_choice": "required"}),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": LEAK_MARKER, "schema": SCHEMA}}},
    ),
    ("chat/completions", {"structured_outputs": {"regex": f"{LEAK_MARKER}|b"}}),
    ("completions", {"prompt": LEAK_MARKER}),
    ("tokenize", {"prompt": LEAK_MARKER}),
)
# Wrong in many ways, each with the leak marker in place of content. An error may quote a wrong word in place of a setting.
REFUSED: tuple[dict[str, Any], ...] = (
    {"no_such_parameter": LEAK_MARKER},
    {"max_tokens": 10_000_000},
    {"messages": [{"role": "nobody", "content": LEAK_MARKER}]},
    {"messages": LEAK_MARKER},
    {"messages": [LEAK_MARKER]},
    {"messages": [{"role": "user", "content": {"text": LEAK_MARKER}}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": [LEAK_MARKER]}]}]},
    {"tools": LEAK_MARKER},
    {"tools": [{"type": "function", "function": {"name": f"{LEAK_MARKER} not allowed"}}]},
    {"stop": LEAK_MARKER * 1000},
    {"user": LEAK_MARKER * 1000},
    {"cache_salt": LEAK_MARKER * 1000},
    {"structured_outputs": {"choice": LEAK_MARKER}},
    {"prompt": LEAK_MARKER},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": LEAK_MARKER}}}]},
    {
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"pattern": f"({LEAK_MARKER}"}}}
        ]
    },
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": LEAK_MARKER}}},
    {"structured_outputs": {"regex": f"({LEAK_MARKER}"}},
    {"structured_outputs": {"grammar": f"root ::= {LEAK_MARKER}"}},
    {"structured_outputs": {"json": f'{{"type": "{LEAK_MARKER}"'}},
)


@dataclass
class Watch:
    """The error bodies of clients, and the secrets that were handed out."""

    serve: Serve
    admin: str
    refusals: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)

    def ask(self, method: str, path: str, body: object = None, key: str | None = None, **headers: str) -> Any:
        headers = {"authorization": f"Bearer {key or self.admin}", **headers}
        answer = httpx.request(method, f"{self.serve.url}{path}", json=body, headers=headers, timeout=120)
        if answer.status_code >= 400:
            self.refusals.append(answer.text)
        return answer


@pytest.fixture
def watch(tmp_path: Path, model_folder: Path, stores: dict[str, str]) -> Iterator[Watch]:
    settings = {**stores, "log_level": "debug"}
    with serving(tmp_path / "s", model_folder, script(), settings=settings) as serve:
        admin = make_key(stores["database_url"], scopes=["tenant:admin"])
        yield Watch(serve, admin, secrets=[admin])


def infer(watch: Watch) -> None:
    base = {"model": "tiny", "messages": [{"role": "user", "content": LEAK_MARKER}], "max_tokens": 4}
    for path, fields in ANSWERED:
        body = {**base, **fields} if path.startswith("chat") else {"model": "tiny", **fields}
        answer = watch.ask("POST", f"/v1/{path}", body)
        # A grammar's constraints may end in an error of the scripted engine, but not in one of the request.
        assert answer.status_code < 500, answer.text
    for fields in REFUSED:
        answer = watch.ask("POST", "/v1/chat/completions", {**base, **fields})
        assert 400 <= answer.status_code < 500, (fields, answer.text)
    broken = f'{{"model": "tiny", "messages": "{LEAK_MARKER}'.encode()
    for content in (broken, broken + b'"', LEAK_MARKER.encode(), b'["' + LEAK_MARKER.encode() + b'"]'):
        headers = {"authorization": f"Bearer {watch.admin}"}
        answer = httpx.post(f"{watch.serve.url}/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code == 400
        watch.refusals.append(answer.text)


def manage(watch: Watch) -> None:
    """Keys, wrong keys, repeated requests, and refused bodies."""
    for path, body in (
        ("/tenant/v1/keys", {"name": "made", "scopes": ["inference"]}),
        ("/tenant/v1/adapters", {"name": "adapter", "description": STORED_MARKER}),
    ):
        answers = [watch.ask("POST", path, body, **{"idempotency-key": path}) for _ in range(2)]
        assert answers[0].status_code == 201 and answers[0].content == answers[1].content
        watch.secrets += [answers[0].json()["api_key"]] if "api_key" in answers[0].json() else []
        for wrong in (
            {**body, "extra": LEAK_MARKER},
            {**body, "name": [LEAK_MARKER]},
            {"name": {LEAK_MARKER: 1}},
        ):
            assert watch.ask("POST", path, wrong).status_code == 400
    for query in ("cursor", "limit"):
        assert watch.ask("GET", f"/tenant/v1/keys?{query}={LEAK_MARKER}").status_code == 400
    _, environment, key_id, _, _ = watch.admin.split("_")
    forged = ParsedKey(environment, key_id, LEAK_MARKER.ljust(43, "0")).plaintext
    unknown = generate_key("live").plaintext
    watch.secrets += [forged, unknown]
    for key in (LEAK_MARKER, f"lpx_live_{LEAK_MARKER}", forged, unknown, watch.admin[:-1] + "_"):
        assert watch.ask("GET", "/v1/models", key=key).status_code == 401
    assert watch.ask("GET", "/v1/models", key="x", **{"if-match": LEAK_MARKER}).status_code == 401


def upload(watch: Watch) -> None:
    """Files full of the leak marker, whole and in a part; what is no adapter, and what is not what was declared."""
    header = json.dumps({"__metadata__": {LEAK_MARKER: LEAK_MARKER}}).encode()
    weights = struct.pack("<Q", len(header)) + header + LEAK_MARKER.encode()
    config = json.dumps(
        {"base_model_name_or_path": LEAK_MARKER, "task_type": LEAK_MARKER, "notes": LEAK_MARKER}
    ).encode()
    files = {CONFIG: config, WEIGHTS: weights}
    headers = {"authorization": f"Bearer {watch.admin}"}
    adapter = f"{watch.serve.url}/tenant/v1/adapters/adapter"
    whole = {name: (LEAK_MARKER, content) for name, content in files.items()}
    for sent in (
        whole,
        {**whole, "other": (LEAK_MARKER, LEAK_MARKER.encode())},
        {CONFIG: (LEAK_MARKER, config)},
    ):
        answer = httpx.post(f"{adapter}/versions", files=sent, headers=headers, timeout=120)
        assert answer.status_code < 500, answer.text
        watch.refusals += [answer.text] if answer.status_code >= 400 else []
    opened = watch.ask("POST", "/tenant/v1/adapters/adapter/uploads", {"files": declared(files)}).json()
    part = f"{watch.serve.url}/tenant/v1/uploads/{opened['id']}/{CONFIG}/parts/1"
    for content, status in ((LEAK_MARKER.encode(), 400), (config, 200)):
        answer = httpx.put(part, content=content, headers=headers)
        assert answer.status_code == status, answer.text
        watch.refusals += [answer.text] if status >= 400 else []


def delete(watch: Watch, database_url: str) -> None:
    """The tenant, by an operator; a janitor of the running server erases it."""
    operator = make_operator_key(database_url)
    tenant_id = watch.ask("GET", "/tenant/v1/me").json()["tenant"]["id"]
    path = f"/operator/v1/tenants/{tenant_id}"
    assert watch.ask("DELETE", path, key=operator).status_code == 202
    assert watch.ask("GET", "/tenant/v1/me").status_code == 401
    until(lambda: watch.ask("GET", path, key=operator).json()["erased_at"] is not None)


def rows(database_url: str) -> Iterator[str]:
    """Every row of every table as text; bytes as hexadecimal digits."""
    with psycopg.connect(database_url) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        for (table,) in tables:
            query = sql.SQL("SELECT t::text FROM {} t").format(sql.Identifier(table))
            yield from (f"{table}: {row}" for (row,) in connection.execute(query))


def values(redis_url: str) -> Iterator[str]:
    """Every key of Valkey with its value."""
    readers = {
        b"string": lambda client, key: client.get(key),
        b"hash": lambda client, key: client.hgetall(key),
        b"list": lambda client, key: client.lrange(key, 0, -1),
        b"set": lambda client, key: client.smembers(key),
        b"zset": lambda client, key: client.zrange(key, 0, -1, withscores=True),
        b"stream": lambda client, key: client.xrange(key),
    }
    with redis.Redis.from_url(redis_url) as client:
        for key in client.scan_iter():
            yield f"{key!r}: {readers[client.type(key)](client, key)!r}"


def found(text: str, wanted: str) -> bool:
    return wanted in text or wanted.encode().hex() in text.lower()


def test_content_of_tenants_is_written_nowhere(watch: Watch, stores: dict[str, str]) -> None:
    infer(watch)
    manage(watch)
    upload(watch)
    with redis.Redis.from_url(stores["redis_url"]) as client:
        client.hset("marker", "field", STORED_MARKER)
    metrics = httpx.get(f"{watch.serve.url}/metrics").text
    logs = (watch.serve.folder / "stderr").read_text()
    assert len(watch.refusals) > len(REFUSED) and "vllm:" in metrics and logs
    places = {
        "errors": watch.refusals,
        "metrics": [metrics],
        "logs": logs.splitlines(),
        "PostgreSQL": list(rows(stores["database_url"])),
        "Valkey": list(values(stores["redis_url"])),
    }
    for place in ("PostgreSQL", "Valkey"):
        assert any(found(text, STORED_MARKER) for text in places[place]), place
    secrets = [key.split("_")[3] for key in watch.secrets]
    leaks = [
        (place, text[:300])
        for place, texts in places.items()
        for text in texts
        for wanted in (LEAK_MARKER, *secrets)
        if found(text, wanted)
    ]
    assert leaks == []
    delete(watch, stores["database_url"])
    # What was stored on purpose goes with the tenant; what the audit log noted of it stays for its own time.
    left = [row for row in rows(stores["database_url"]) if found(row, STORED_MARKER)]
    assert {row.partition(":")[0] for row in left} == {"audit_entries"}
    until(lambda: not [*watch.serve.folder.rglob("adapter_model.safetensors")])
