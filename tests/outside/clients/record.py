"""Records what the clients send: `python -m tests.outside.clients.record TOKENIZER_FOLDER [client …]`.

Each client's script runs against `scripted_server`. Of requests that differ in their texts alone one is kept.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.outside.clients.environments import AGENTS, CLIENTS, RUN_S, command_of, variables, version_of
from tests.outside.clients.scripted_answers import AGENT_ANSWERS
from tests.outside.clients.scripted_server import MODEL, recording
from tests.outside.clients.sealed_network import run_sealed

RECORDED = Path(__file__).parent / "recorded"
MAX_TEXT = 300
TEXTS = frozenset(("content", "text", "prompt", "instructions", "system", "description", "output"))
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# What tells of the machine and the hour, in texts and headers of agents.
PRIVATE = (
    (re.compile(r"/tmp/tmp\w+"), "/home/user"),
    (re.compile(r"(OS Version: )[^\\]+"), r"\1Linux"),
    (re.compile(r"(codex_exec/\S+) \(.*?\) \w+"), r"\1"),
    (re.compile(r"(date\W+(?:is )?)20\d\d-\d\d-\d\d", re.IGNORECASE), r"\g<1>2026-01-01"),
    (re.compile(r"(unix_ms\W+)\d+"), r"\g<1>0"),
    (re.compile(r"(Chunk ID: )\w+"), r"\g<1>0"),
    (re.compile(r"(Wall time: )[\d.]+"), r"\g<1>0"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "0"),
)


def shortened(value: Any, name: str = "", texts: int | None = MAX_TEXT) -> Any:
    """A body whose prompts and messages have at most `texts` characters each."""
    if isinstance(value, dict):
        return {key: shortened(each, key, texts) for key, each in value.items()}
    if isinstance(value, list):
        return [shortened(each, name, texts) for each in value]
    return value[:texts] if isinstance(value, str) and name in TEXTS else value


def compact(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One of each kind under `/v1`, without what differs from run to run. Probes and metrics are for the live test."""
    kinds: dict[str, dict[str, Any]] = {}
    for request in (each for each in requests if each["path"].startswith("/v1/")):
        headers = {name: UUID.sub("0", value) for name, value in request["headers"].items()}
        kept = impersonal(shortened({**request, "headers": headers}))
        kinds.setdefault(json.dumps(shortened(kept, texts=0), sort_keys=True), kept)
    return list(kinds.values())


def impersonal(request: Any) -> Any:
    """The request without what tells of its machine; its ids, numbered in their order, stay distinct."""
    ids: dict[str, str] = {}
    text = UUID.sub(lambda found: ids.setdefault(found[0], f"id{len(ids)}"), json.dumps(request))
    for pattern, shown in PRIVATE:
        text = pattern.sub(shown, text)
    return json.loads(text)


def record(client: str, tokenizer: Path) -> None:
    """Write `recorded/<client>.json`: the client with its version, and a request on each line."""
    command = command_of(client)
    with recording(AGENT_ANSWERS.get(client, ())) as server:
        environment = variables(f"{server.url}/v1", "sk-recorded", MODEL, tokenizer)
        if client in AGENTS:
            run_sealed(command, environment, RUN_S).check_returncode()
        else:
            subprocess.run(command, env=environment, check=True, timeout=RUN_S)
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in compact(server.requests))
    text = f'{{"client": {json.dumps(version_of(client))}, "requests": [\n{lines}\n]}}\n'
    (RECORDED / f"{client}.json").write_text(text)


if __name__ == "__main__":
    for name in sys.argv[2:] or (*CLIENTS, *AGENTS):
        record(name, Path(sys.argv[1]))
