"""Releases of adapters that tenants train, on the live demo: what each gate stops, and that it lets the good one through."""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from tests.end_to_end.live_server import LiveServer, until
from tests.end_to_end.tool_adapter import ISLANDS, TOOL, call_text, negated, question, train

from loraplex.grammar.tools.call_syntax import ToolStyle

pytestmark = pytest.mark.long
FILES = ("adapter_config.json", "adapter_model.safetensors")
NAME = "ferry"


@pytest.fixture(scope="module")
def admin(demo: LiveServer) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {demo.access.tenants[0].admin_key}"}
    with httpx.Client(base_url=f"{demo.url}/tenant/v1", headers=headers, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def trained(
    demo: LiveServer, demo_model: Path, admin: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Adapters by what they are: trained on the base's tool syntax, on another one, and the first with a negated B."""
    folder = tmp_path_factory.mktemp("adapters")
    found = {name: folder / name for name in ("right", "other-syntax", "negated", "other-shape")}
    with httpx.Client(base_url=f"{demo.url}/v1", headers=admin.headers, timeout=60) as client:
        prompts = []
        for island in ISLANDS:
            body = {"model": demo.access.model, "messages": asked(island), "tools": [TOOL]}
            prompts.append(client.post("tokenize", json=body).json()["tokens"])
    for name, style in (("right", ToolStyle.GENERIC), ("other-syntax", ToolStyle.MISTRAL)):
        train(demo_model, prompts, [call_text(style, island) for island in ISLANDS], found[name])
    negated(found["right"], found["negated"])
    found["other-shape"].mkdir()
    tensors = load_file(found["right"] / FILES[1])
    wider = {n: t.repeat(1, 2) if "lora_A" in n else t for n, t in tensors.items()}
    save_file({n: t.contiguous() for n, t in wider.items()}, found["other-shape"] / FILES[1])
    (found["other-shape"] / FILES[0]).write_text((found["right"] / FILES[0]).read_text())
    return found


def asked(island: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question(island)}]


def suite() -> bytes:
    cases = []
    for island in ISLANDS:
        call = {"name": "ferry_times", "arguments": {"to": island}}
        expect = {"tool_calls": [call], "finish_reason": "tool_calls", "unaided": True}
        cases.append(
            {"id": island, "messages": asked(island), "tools": [TOOL], "max_tokens": 64, "expect": expect}
        )
    return "\n".join(map(json.dumps, cases)).encode()


def push(admin: httpx.Client, folder: Path) -> dict[str, Any]:
    """Upload a folder as a version; return it once it is ready or rejected."""
    files = {each: (each, (folder / each).read_bytes()) for each in FILES}
    sent = admin.post(f"adapters/{NAME}/versions", files=files)
    assert sent.status_code == 202, sent.text
    path = f"adapters/{NAME}/versions/{sent.json()['version']}"
    until(lambda: admin.get(path).json()["state"] not in ("uploading", "validating"), 120, "it is validated")
    found: dict[str, Any] = admin.get(path).json()
    return found


def evaluate(admin: httpx.Client, version: int, baseline: object) -> dict[str, Any]:
    body = {"suite": "ferry-calls", "baseline": baseline}
    started = admin.post(f"adapters/{NAME}/versions/{version}/evaluations", json=body)
    assert started.status_code == 202, started.text
    path = f"evaluations/{started.json()['id']}"
    until(lambda: admin.get(path).json()["state"] not in ("queued", "running"), 300, "it is evaluated")
    found: dict[str, Any] = admin.get(path).json()
    print(
        f"v{version} against {baseline}: {found['state']}, {found['pass_rate']} against {found['baseline_pass_rate']}"
    )
    return found


def test_each_bad_version_is_stopped_by_the_check_meant_for_it(
    admin: httpx.Client, trained: dict[str, Path]
) -> None:
    assert admin.post("adapters", json={"name": NAME}).status_code == 201
    assert admin.post("suites", params={"name": "ferry-calls"}, content=suite()).status_code == 201
    right = push(admin, trained["right"])
    assert right["state"] == "ready", right
    alias = f"adapters/{NAME}/aliases/production"
    assert admin.put(alias, json={"version": 1}, headers={"if-none-match": "*"}).status_code == 201
    gate = {"suite": "ferry-calls", "min_pass": 0.8, "max_regression": 0.1}
    assert admin.put(f"{alias}/gate", json=gate).status_code == 200
    first = evaluate(admin, 1, "base")
    assert (first["pass_rate"], first["baseline_pass_rate"]) == (1.0, 0.0)

    shapes = push(admin, trained["other-shape"])
    assert shapes["state"] == "rejected"
    failed = next(check for check in shapes["report"]["checks"] if not check["passed"])
    print(f"wrong base's shape: {failed['name']}: {failed['detail']}")
    assert failed["name"] == "shapes"

    for name in ("negated", "other-syntax"):
        version = push(admin, trained[name])["version"]
        found = evaluate(admin, version, "production")
        assert found["pass_rate"] == 0.0, name
        moved = admin.put(alias, json={"version": version}, headers={"if-match": '"1"'})
        assert moved.status_code == 409, moved.text
        assert moved.json()["error"]["code"] == "gate_failed"
        print(f"{name}: {moved.json()['error']['message']}")
        report = admin.get(f"evaluations/{found['id']}/report").json()
        print(f"{name}: {report['cases'][0]['answer'].get('text')!r}, unmet {report['figures']['unmet']}")

    again = push(admin, trained["right"])["version"]
    assert evaluate(admin, again, "production")["pass_rate"] == 1.0
    assert admin.put(alias, json={"version": again}, headers={"if-match": '"1"'}).status_code == 200


def test_two_runs_of_an_evaluation_give_the_same_bytes(admin: httpx.Client) -> None:
    digests = set()
    for _ in range(2):
        found = evaluate(admin, 1, "base")
        content = admin.get(f"evaluations/{found['id']}/report").content
        digests.add(hashlib.sha256(content).hexdigest())
        time.sleep(1)
    assert digests == {found["report_sha256"]}
