"""Records what the clients send: `python -m tests.outside.clients.record TOKENIZER_FOLDER [client …]`.

Each client's script runs against `scripted_server`. Of requests that differ in their texts alone one is kept.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.outside.clients.environments import CLIENTS, RUN_S, command_of, variables, version_of
from tests.outside.clients.scripted_server import MODEL, recording

RECORDED = Path(__file__).parent / "recorded"
MAX_TEXT = 300
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def shortened(value: Any, name: str = "", texts: int | None = MAX_TEXT) -> Any:
    """A body whose prompts and messages have at most `texts` characters each."""
    if isinstance(value, dict):
        return {key: shortened(each, key, texts) for key, each in value.items()}
    if isinstance(value, list):
        return [shortened(each, name, texts) for each in value]
    return value[:texts] if isinstance(value, str) and name in ("content", "text", "prompt") else value


def compact(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One of each kind under `/v1`, without what differs from run to run. Probes and metrics are for the live test."""
    kinds: dict[str, dict[str, Any]] = {}
    for request in (each for each in requests if each["path"].startswith("/v1/")):
        headers = {name: UUID.sub("0", value) for name, value in request["headers"].items()}
        kept = {**request, "headers": headers}
        kind = json.dumps(shortened(kept, texts=0), sort_keys=True)
        kinds.setdefault(kind, shortened(kept))
    return list(kinds.values())


def record(client: str, tokenizer: Path) -> None:
    """Write `recorded/<client>.json`: the client with its version, and a request on each line."""
    with recording() as server:
        environment = variables(f"{server.url}/v1", "sk-recorded", MODEL, tokenizer)
        subprocess.run(command_of(client), env=environment, check=True, timeout=RUN_S)
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in compact(server.requests))
    text = f'{{"client": {json.dumps(version_of(client))}, "requests": [\n{lines}\n]}}\n'
    (RECORDED / f"{client}.json").write_text(text)


if __name__ == "__main__":
    for name in sys.argv[2:] or CLIENTS:
        record(name, Path(sys.argv[1]))
