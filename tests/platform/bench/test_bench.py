"""`loraplex bench` from end to end: its own server with real stores, scripted or with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.platform.bench import rate_search
from loraplex.platform.cli.bench import app


@pytest.fixture
def fake_engine(tmp_path: Path) -> Path:
    path = tmp_path / "script.json"
    info = msgspec.structs.replace(DEFAULT_INFO, vocab_size=400)
    path.write_bytes(msgspec.json.encode(FakeScript(info=info, token_interval_s=0.002)))
    return path


def run(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.long
def test_a_load_over_http_with_adapters_of_two_tenants(
    tmp_path: Path, tiny_model: Path, fake_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@localhost:1/the-users-own")
    options = [
        "--model",
        str(tiny_model),
        "--setting",
        f"fake_engine={fake_engine}",
        "--out",
        str(tmp_path / "out"),
    ]
    load = ["--num-requests", "30", "--concurrency", "6", "--output-len", "12", "--cancel-share", "0.3"]
    adapters = ["--adapters", "3", "--rank", "2", "--tenants", "2", "--distribution", "zipf"]
    (line,) = run("serve", *options, *load, *adapters, "--goodput", "ttft:60000")
    figure = line["figure"]
    assert figure["failed"] == 0
    assert figure["completed"] + figure["cancelled"] == 30 and figure["cancelled"] > 0
    assert figure["total_output_tokens"] == figure["completed"] * 12
    assert figure["request_goodput"] == pytest.approx(figure["request_throughput"])
    assert figure["median_ttft_ms"] > 0 and figure["median_itl_ms"] > 0
    (file,) = (tmp_path / "out").iterdir()
    assert json.loads(file.read_text())["figure"] == figure


@pytest.mark.long
def test_many_adapters_on_a_tiny_model(tmp_path: Path, tiny_model: Path) -> None:
    shape = ["--registered", "6", "--resident", "3", "--num-requests", "12", "--output-len", "8"]
    options = ["--model", str(tiny_model), "--dtype", "float32", "--repeats", "1", "--samples", "4"]
    lines = {line["case"]: line for line in run("adapters", *shape, *options, "--out", str(tmp_path / "out"))}
    assert lines["parity with lone runs"]["figure"]["compared"] == 4
    assert lines["answers equal to lone runs, or within the margin"]["figure"]["holds"]
    assert lines["all registered"]["figure"]["adapter_loads"] > 0
    assert lines["resident only"]["figure"]["adapter_loads"] == 0


@pytest.mark.long
def test_the_rate_that_holds_and_what_it_costs(
    tmp_path: Path, tiny_model: Path, fake_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_search, "PROBE_S", 0.5)
    monkeypatch.setattr(rate_search, "MAX_RATE", 64.0)
    server = [
        "--model",
        str(tiny_model),
        "--setting",
        f"fake_engine={fake_engine}",
        "--out",
        str(tmp_path / "out"),
    ]
    search = ["--slo", "ttft_p95=60s,e2el_p50=30s", "--find-rate", "--rate", "32", "--num-requests", "8"]
    *probes, found, _, _, _, _, _, cost = run(
        "serve", *server, *search, "--price-per-hour", "3.6", "--output-len", "12", "--input-len", "20"
    )
    assert [probe["case"] for probe in probes] == ["32 per s", "64 per s"]
    assert found["figure"] == {"rate": 64.0, "broken_at": None, "broken_by": None}
    assert cost["figure"]["per_million_output"] > cost["figure"]["per_million_total"] > 0
    assert cost["figure"]["per_million_output_interval"] >= 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--distribution", "normal"], "--distribution"),
        (["serve", "--base-url", "http://localhost:1"], "--api-key"),
        (["serve", "--setting", "dtype"], "--setting"),
        (["serve", "--mix", "video"], "--mix"),
        (["serve", "--find-rate"], "--slo"),
        (["serve", "--slo", "ttft_p95=1s"], "--find-rate"),
        (["serve", "--find-rate", "--slo", "ttft=1s"], "METRIC_PERCENTILE=TIME"),
        (["serve", "--price-per-hour", "cheap"], "--price-per-hour"),
        (["lora", "--rows", "2/4"], "--rows"),
        (["lora", "--model", "/does/not/exist"], "/does/not/exist"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], named: str, tiny_model: Path) -> None:
    given = arguments if "--model" in arguments else [*arguments, "--model", str(tiny_model)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code != 0
    assert named in result.output


def test_the_commands_are_those_for_users() -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    assert set(group.commands) == {"serve", "lora", "adapters", "cache", "grammar", "determinism"}


def test_the_module_imports_neither_torch_nor_tests() -> None:
    code = "import sys, loraplex.platform.cli.bench; print({'torch', 'tests'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
