"""`loraplex decision calibrate` of a running gateway: what it does to an overconfident adapter and to an honest one, and where it is void."""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.end_to_end.live_server import RUN, environment
from tests.end_to_end.opinionated_model import (
    StartEngine,
    paths_in,
    save_opinionated_model,
    save_surer_adapter,
    start_engine,
)
from tests.end_to_end.thinking_model import TEMPLATE
from tests.platform.web.gateway import Gateway, StartGateway, start_gateway

from loraplex.platform.cli.decision import options_values
from loraplex.platform.inference.decisions.calibration import tempered
from loraplex.platform.inference.decisions.wording import FORMAT
from loraplex.platform.parameters.decision_request import DecisionRequest

__all__ = ["start_engine", "start_gateway"]

FACTOR = 4.0
DIGESTS = {"honest": "a" * 64, "sure": "b" * 64, "newer": "c" * 64}
HEADER = "x-loraplex-decision-calibration"
GIVEN = "Ticket 0"
INPUTS = 40
DRAWS = 12
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "Is it urgent?"},
    {"type": "choice", "instructions": "Which team?", "choices": [{"value": each} for each in "uvwxy"]},
    {
        "type": "score",
        "instructions": "How angry?",
        "levels": [{"label": "calm"}, {"label": "cross"}, {"label": "mad"}],
    },
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.fixture
def chat_tokenizer(model: Path) -> Any:
    return save_opinionated_model(model)


@pytest.fixture
async def gateway(
    start_gateway: StartGateway, start_engine: StartEngine, chat_tokenizer: Any, model: Path, tmp_path: Path
) -> Gateway:
    """With an honest adapter, an overconfident one, and the newer version of that, which has other bytes."""
    for name, factor in (("honest", 1.0), ("sure", FACTOR), ("newer", FACTOR + 1)):
        save_surer_adapter(model, tmp_path / DIGESTS[name], factor)

    found = await start_gateway(real_engine=await start_engine(model), adapter_path=paths_in(tmp_path))
    found.key = await found.tenant("owner", ("inference", "adapters:read", "adapters:write"))
    for name in ("honest", "sure"):
        await found.adapter("owner", name, DIGESTS[name])
    await found.adapter("owner", "sure", DIGESTS["newer"])
    return found


async def asked(gateway: Gateway, name: str, given: str) -> tuple[list[list[float]], str]:
    """The probabilities of each of `QUESTIONS`, and what calibrated them."""
    raw = await gateway.client().decisions.with_raw_response.create(
        model=name,
        input=given,
        questions=QUESTIONS,  # type: ignore[arg-type]
    )
    predicate, *others = json.loads(raw.text)["answers"]
    found = [[predicate["probability"], 1 - predicate["probability"]]]
    return found + [[p["probability"] for p in each["probabilities"]] for each in others], raw.headers[HEADER]


async def write_examples(gateway: Gateway, file: Path) -> None:
    """Questions with answers that are drawn from what the base model believes, so that it is calibrated."""
    read = DecisionRequest.model_validate({"model": "base", "input": "a", "questions": QUESTIONS})
    values = [options_values(each) for each in read.questions]
    chance, lines = random.Random(1), []
    for number in range(INPUTS):
        given = f"Ticket {chance.randbytes(6).hex()} of customer {number}"
        believed, _ = await asked(gateway, "demo/base", given)
        for question, shares, options in zip(QUESTIONS, believed, values, strict=True):
            lines += [
                json.dumps({"input": given, "question": question, "answer": answer})
                for answer in chance.choices(options, shares, k=DRAWS)
            ]
    file.write_text("\n".join(lines))


async def calibrate(gateway: Gateway, adapter: str, file: Path) -> dict[str, Any]:
    """What the command wrote."""
    options = ("--adapter", adapter, "--examples", str(file), "--url", gateway.url, "--key", gateway.key)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, "decision", "calibrate", *options),
        env=environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    print(f"\n{output.decode()}")
    name, _, version = adapter.partition("@")
    path = f"/tenant/v1/adapters/{name}/versions/{version}/decision-calibration"
    response = await gateway.get(path, [("authorization", f"Bearer {gateway.key}")])
    written: dict[str, Any] = response.json()
    assert f"{adapter}: calibration {written['sha256'][:16]}" in output.decode()
    return written


async def test_what_is_too_sure_becomes_right_and_what_is_right_stays(
    gateway: Gateway, tmp_path: Path
) -> None:
    file = tmp_path / "examples.jsonl"
    await write_examples(gateway, file)
    before, header = await asked(gateway, "sure@1", GIVEN)
    assert header == "none"
    sure, honest = [await calibrate(gateway, each, file) for each in ("sure@1", "honest@1")]
    for kind, measured in sure["report"].items():
        assert measured["before"]["ece"] > 0.1, kind
        assert measured["after"]["ece"] <= measured["before"]["ece"] / 2, kind
        assert measured["after"]["accuracy"] == measured["before"]["accuracy"]
        assert sure["temperatures"][kind] == pytest.approx(FACTOR, rel=0.3)
    for kind, measured in honest["report"].items():
        assert measured["after"]["ece"] <= measured["before"]["ece"], kind
        assert honest["temperatures"][kind] == 1
    after, header = await asked(gateway, "sure@1", GIVEN)
    assert header == sure["sha256"][:16]
    for question, old, new in zip(QUESTIONS, before, after, strict=True):
        assert new == pytest.approx(tempered(old, sure["temperatures"][question["type"]]), abs=1e-6)


async def test_a_calibration_is_void_for_anything_else(
    gateway: Gateway,
    start_gateway: StartGateway,
    start_engine: StartEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other weights, another chat template of the same model, another wording; each alone."""
    plain, header = await asked(gateway, "sure@1", GIVEN)
    assert header == "none"
    served = await gateway.client().models.retrieve("sure@1")
    assert served.model_extra is not None
    written = {"format": FORMAT, "system_fingerprint": served.model_extra["system_fingerprint"]}
    written |= {"temperatures": {"choice": 2.0}, "report": {}}
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        http.headers["authorization"] = f"Bearer {gateway.key}"
        done = await http.put("/tenant/v1/adapters/sure/versions/1/decision-calibration", json=written)
        assert done.status_code == 200, done.text
    calibrated, prefix = await asked(gateway, "sure@1", GIVEN)
    assert prefix == done.json()["sha256"][:16] and calibrated[1] != plain[1]
    assert (await asked(gateway, "sure@2", GIVEN))[1] == (await asked(gateway, "honest", GIVEN))[1] == "none"
    save_opinionated_model(tmp_path / "other", TEMPLATE.replace("user", "customer"))
    other = await start_gateway(
        other=gateway.database,
        real_engine=await start_engine(tmp_path / "other"),
        adapter_path=paths_in(tmp_path),
    )
    other.key = gateway.key
    assert (await asked(other, "sure@1", GIVEN))[1] == "none"
    monkeypatch.setattr("loraplex.platform.inference.decisions.pipeline.FORMAT", "2")
    assert await asked(gateway, "sure@1", GIVEN) == (plain, "none")
    monkeypatch.undo()
    assert await asked(gateway, "sure@1", GIVEN) == (calibrated, prefix)
