"""The engine on the pretended device gives the tokens of the engine on a CPU, waits in no step, and races nowhere."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns
from tests.engine.pretended_cuda.engine_runs import (
    BROKEN,
    Settings,
    decided,
    on_cpu,
    on_device,
    save_tiny_model,
)
from tests.engine.pretended_cuda.pairs import every_pair, pairs_of, possible

if INTERPRETING:
    from tests.engine.pretended_cuda.installation import pretended_cuda

QUICK = (
    Settings("none", "1", "graphs", "penalties", "cancel"),
    Settings("int8", "0", "eager", "masks", "preemption"),
    Settings("int4", "0", "graphs", "forced tokens", "cancel"),
    Settings("fp8 kv", "1", "eager", "sampled", "quarantine"),
    Settings("none", "1", "graphs", "logprobs", "preemption"),
)
"""Each factor's values but those of many adapters, which cost as much as all of these."""
AT_START = (
    "capacity/memory_rate.py",
    "checkpoints/weights.py",
    "quantization/quantized_weight.py",
    "lora/site.py",
    "models/decoder.py",
    "lora/memory/slot_tables.py",
    "runner/cuda_graphs/replay.py",
)
"""Whatever waits before the first step: loading, and a capture that the warm step must have ended before."""
SCORE_TOLERANCE = {"none": 1e-4, "int8": 1e-3, "int4": 1e-3, "fp8 kv": 0.2}
"""By weights. A key between two values of fp8 moves with the last bits."""
MIN_DECIDED = 0.5
"""Of the tokens, with a cache whose rounding depends on the last bits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("pretended") / "tiny"
    save_tiny_model(path)
    return path


def compared(folder: Path, settings: Settings) -> None:
    """Run both sides. `LORAPLEX_PRETENDED_LINES` names a file that gets a line of figures."""
    began = time.process_time()
    expected = on_cpu(folder, settings)
    with pretended_cuda() as findings:
        at_start: dict[tuple[str, str], int] = {}

        def started() -> None:
            at_start.update(findings.waits)
            findings.waits.clear()

        found = on_device(folder, settings, started)
    assert [place for _, place in at_start if not place.startswith(AT_START)] == []
    assert findings.waits == {}
    assert findings.races == {}
    assert found.happened, f"no {settings.event}"
    assert found.errors == expected.errors
    assert found.errors.keys() == ({BROKEN} if settings.event == "quarantine" else set())
    assert bool(found.replayed) is (settings.steps == "graphs")
    counts = {name: len(tokens) for name, tokens in expected.tokens.items()}
    if settings.weights == "fp8 kv":
        counts = decided(folder, settings, expected)
        assert sum(counts.values()) >= MIN_DECIDED * sum(map(len, expected.tokens.values()))
    assert found.tokens.keys() == expected.tokens.keys()
    assert found.scores.keys() == expected.scores.keys()
    assert bool(found.scores) is (settings.sampling == "logprobs")
    for name, values in expected.scores.items():
        assert found.scores[name] == pytest.approx(values, abs=SCORE_TOLERANCE[settings.weights]), name
    for name, count in counts.items():
        assert found.tokens[name][:count] == expected.tokens[name][:count], name
    lines = os.environ.get("LORAPLEX_PRETENDED_LINES")
    if lines is not None:
        tokens = sum(counts.values())
        figures = {"tokens": tokens, "launches": findings.launches, "replayed": found.replayed}
        seconds = round(time.process_time() - began, 1)
        with Path(lines).open("a") as file:
            file.write(json.dumps({"settings": str(settings), "seconds": seconds} | figures) + "\n")


@pytest.mark.skipif(not INTERPRETING, reason="the interpreter has a process of its own")
@pytest.mark.parametrize("settings", QUICK, ids=str)
def test_the_device_gives_the_tokens_of_the_cpu(folder: Path, settings: Settings) -> None:
    compared(folder, settings)


@pytest.mark.long
@pytest.mark.skipif(not INTERPRETING, reason="the interpreter has a process of its own")
@pytest.mark.parametrize("settings", every_pair(), ids=str)
def test_every_pair_of_settings(folder: Path, settings: Settings) -> None:
    compared(folder, settings)


def test_the_settings_hold_every_pair() -> None:
    wanted = {pair for settings in possible() for pair in pairs_of(settings)}
    assert {pair for settings in every_pair() for pair in pairs_of(settings)} == wanted
    for index in range(5):
        values = {
            pair[1] for settings in QUICK for both in pairs_of(settings) for pair in both if pair[0] == index
        }
        assert len(values) >= 2


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(__file__, seconds=40)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) >= len(QUICK)
