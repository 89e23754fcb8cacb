"""`loraplex plan`: figures for programs, a table for people, and exit codes that say whether it fits."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loraplex.platform.cli.main import main
from loraplex.platform.cli.plan import parse_size
from loraplex.platform.startup_errors import SettingsError

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model of which there is only the configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["plan", "--model", "model", *arguments])
    return result.exit_code, result.output


def document(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["plan", "--model", "model", "--json", *arguments])
    read: dict[str, Any] = json.loads(result.stdout)
    assert read["fits"] is (result.exit_code == 0)
    return read


def test_figures() -> None:
    plan = document("--device-memory", "141GB", "--context", "512", "--rank", "64")
    assert plan["fits"] and plan["device_bytes"] == 141 * 10**9 and plan["dtype"] == "bfloat16"
    parts = ("weights_bytes", "reserve_bytes", "adapter_budget_bytes", "kv_cache_bytes")
    assert plan["total_bytes"] == sum(plan[part] for part in parts)
    assert plan["weights_bytes"] == sum(weight["bytes"] for weight in plan["weights"])
    assert plan["kv_bytes_per_token"] == 131_072
    assert plan["rows"] == plan["kv_tokens"] // 512
    size = 4 * 83_886_080
    resident = plan["adapter_budget_bytes"] // size
    assert plan["adapters"][0] == {"rank": 64, "dtype": "bfloat16", "bytes": size, "resident": resident}
    assert resident > 64


def test_settings_count(folder: Path) -> None:
    (folder / "loraplex.toml").write_text("adapter_bytes = 0\nmemory_utilization = 0.5\n")
    plan = document("--device-memory", "80GiB", "--quantization", "int4")
    assert plan["budget_bytes"] == 40 << 30
    assert plan["adapter_budget_bytes"] == 0
    assert {weight["format"] for weight in plan["weights"]} == {"bfloat16", "int8", "int4/128"}


def test_a_plan_that_does_not_fit_says_what_to_lower() -> None:
    code, output = run("--device-memory", "16GB")
    assert code == 1
    assert "It does not fit" in output and "`quantization` int4: the weights take 5.23 GB" in output
    assert document("--device-memory", "16GB")["advice"][0].startswith("`quantization` int8")


def test_a_table_for_people() -> None:
    code, output = run("--device-memory", "141GB")
    assert code == 0
    for words in (
        "projections",
        "13.96 GB",
        "KV cache",
        "tokens of 131.07 kB",
        "126.90 GB that may be used of 141",
    ):
        assert words in " ".join(output.split())


def test_a_cpu_has_no_budget() -> None:
    plan = document("--device", "cpu", "--dtype", "float32")
    assert plan["budget_bytes"] is None and plan["kv_cache_bytes"] <= 1 << 30


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device-memory", "lots"], "allowed is a size such as 141GB"),
        (["--device-memory", "80GB", "--max-model-len", "8193"], "must lie in 1..8192"),
        (["--model", "nowhere"], "neither a directory"),
        (["--rank", "257"], "256"),
        (["--context", "0"], "'--context'"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], words: str) -> None:
    code, output = run(*arguments)
    assert code == 2 and words in " ".join(output.split())


@pytest.mark.parametrize(
    ("text", "size"),
    [("141GB", 141 * 10**9), ("80 GiB", 80 << 30), ("1.5tb", 15 * 10**11), ("2097152", 1 << 21)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "1e9", "-1GB", "12XB", "1KB", "9" * 16, "99999TB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--device-memory"):
        parse_size(text)


def priced(*arguments: str) -> tuple[int, str]:
    return run("--device-memory", "141GB", "--price-per-hour", "2.50", *arguments)


def test_the_cost_of_tokens_from_a_rate() -> None:
    cost = document(
        *("--device-memory", "141GB", "--price-per-hour", "2.50", "--currency", "EUR"),
        *("--tokens-per-second", "1000"),
    )["cost"]
    assert cost == {
        "currency": "EUR",
        "price_per_hour_micro": 2_500_000,
        "tokens_per_second": 1000.0,
        "cost_per_million_tokens_micro": 694_444,
        "cost_per_million_output_tokens_micro": None,
    }
    code, output = priced("--tokens-per-second", "1000")
    assert code == 0
    assert "2.50 USD per hour at 1,000 tokens per second: 0.694444 USD per million tokens" in output


def test_the_cost_of_tokens_from_a_benchmark(folder: Path) -> None:
    figures = {"total_input_tokens": 30_000, "total_output_tokens": 10_000, "duration": 8.0}
    older = {"benchmark": "serve", "case": "x", "figure": {**figures, "duration": 99.0}}
    ratio = {"benchmark": "serve", "case": "ratio", "figure": {"ratio": 2.0}}
    lines = [older, {"benchmark": "serve", "case": "y", "figure": figures}, ratio]
    (folder / "result.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, output = priced("--bench-result", "result.jsonl")
    assert code == 0
    assert "at 5,000 tokens per second: 0.138889 USD per million tokens" in output
    assert "charged to responses: 0.555556 USD per million tokens" in output


@pytest.mark.parametrize("price", ["0", "-1", "two", "0.0000001", "1e99", "nan", "inf"])
def test_prices_that_are_none_are_refused(price: str) -> None:
    code, output = run("--device-memory", "141GB", "--tokens-per-second", "9", f"--price-per-hour={price}")
    assert code == 2 and "--price-per-hour" in output


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--tokens-per-second", "0"),
        ("--tokens-per-second", "9", "--bench-result", "result.jsonl"),
        ("--bench-result", "result.jsonl"),
        ("--bench-result", "no-such-file"),
    ],
)
def test_a_cost_needs_one_throughput(folder: Path, arguments: tuple[str, ...]) -> None:
    (folder / "result.jsonl").write_text('{"benchmark": "lora", "figure": {}}\n')
    assert priced(*arguments)[0] == 2
