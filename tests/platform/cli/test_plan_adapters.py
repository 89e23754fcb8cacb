"""Tiers of adapters in `loraplex plan`: slots and rates against arithmetic by hand, and the model against a simulated memory."""

import json
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.platform.cli.test_plan import LLAMA_3_8B
from typer.testing import CliRunner

from loraplex.platform.cli.main import main
from loraplex.platform.cli.plan_adapters import lru_hit_rate

# Rank 16 on all projections of Llama 3 8B: 32 layers of (in + out) of q, k, v, o, gate, up and down, 16 ranks of 2 bytes.
RANK_16 = 32 * (2 * 8192 + 2 * 5120 + 3 * 18432) * 16 * 2


def plan(folder: Path, *arguments: str, code: int = 0) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    options = ["plan", "--model", str(folder), "--device-memory", "80GiB", *arguments]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == code, result.output
    return result.output


def tiers(folder: Path, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(folder, "--json", *arguments))["adapter_tiers"]
    return found


def test_slots_and_rates_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_ADAPTER_BYTES", str(100 * RANK_16))
    monkeypatch.setenv("LORAPLEX_ADAPTER_HOST_BYTES", str(1200 * RANK_16))
    found = tiers(
        tmp_path, "--adapters", "2000", "--engines", "4", "--zipf", "0", "--requests-per-second", "50"
    )
    assert (found["device_slots"], found["device_slots_in_all"]) == (100, 400)
    assert (found["host_slots"], found["host_slots_in_all"]) == (300, 1200)
    # All equally often: the share of the slots. 50 x 0.8 loads a second, of which 50 x 0.4 from the disk.
    assert found["device_hit_rate"] == pytest.approx(0.2) and found["memory_hit_rate"] == pytest.approx(0.6)
    assert found["loads_per_second"] == pytest.approx(40) and found["disk_reads_per_second"] == pytest.approx(
        20
    )
    found = tiers(tmp_path, "--adapters", "2000", "--engines", "4", "--adapters-in-use", "400")
    assert (found["device_hit_rate"], found["loads_per_second"]) == (1.0, None)
    text = " ".join(plan(tmp_path, "--adapters", "2000", "--engines", "4", "--zipf", "0").split())
    assert "device slots: 100 per engine, 400 on 4" in text
    assert "20.0% on the device, 60.0% with host memory" in text
    assert "more than the 5 of --adapters" in plan(
        tmp_path, "--adapters", "5", "--adapters-in-use", "6", code=2
    )


def test_two_adapters_in_one_slot_by_hand() -> None:
    """Shares of 2/3 and 1/3. The last request decides what is there, so exactly 4/9 + 1/9 hit; the model says a little less."""
    assert lru_hit_rate(2, 1, 1.0) == pytest.approx(5 / 9, abs=0.06)


@pytest.mark.parametrize(("adapters", "slots", "zipf"), [(200, 40, 1.0), (2000, 160, 1.0), (300, 100, 0.6)])
def test_the_model_is_what_a_simulated_memory_does(adapters: int, slots: int, zipf: float) -> None:
    random, memory, hits, requests = Random(1), OrderedDict[int, None](), 0, 60_000
    weights = [(each + 1) ** -zipf for each in range(adapters)]
    for number, each in enumerate(random.choices(range(adapters), weights, k=2 * requests)):
        hits += each in memory and number >= requests
        memory.pop(each, None)
        memory[each] = None
        if len(memory) > slots:
            memory.popitem(last=False)
    assert lru_hit_rate(adapters, slots, zipf) == pytest.approx(hits / requests, abs=0.01)
