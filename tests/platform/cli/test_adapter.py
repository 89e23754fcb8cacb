"""`loraplex adapter` on a real PostgreSQL, with a tiny model and adapters that PEFT wrote: output and exit codes."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from loraplex.adapters.storage.object_store import ObjectStore, S3Options
from loraplex.engine.checkpoints.digest import model_digest
from loraplex.platform.cli.adapter import app
from loraplex.platform.cli.command_context import open_tenant_command
from loraplex.platform.server.base_model_file import BaseModelFacts, write_base_model
from loraplex.platform.web.adapters.validation_report import REMEDIATIONS
from loraplex.tenants.actors import command_actor
from loraplex.tenants.ledger.journal.folder import JOURNAL_FOLDER
from loraplex.tenants.registry import use_cases as aliases


@pytest.fixture
def home(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory that no server runs on now, on a database with the tenants acme and bolt."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        for name in ("acme", "bolt"):
            connection.execute(
                "INSERT INTO tenants (id, name, weight) VALUES (gen_random_uuid(), %s, 1)", (name,)
            )
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    (folder / JOURNAL_FOLDER).mkdir()
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 2 layers and an adapter of rank 4 on q_proj in `adapter` next to it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    base = LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "model")
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "model"


GUARD = "max_failure_ratio=2,min_requests=50"


def run(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--tenant", "acme", "--data-dir", str(home)])


def run_json(home: Path, *arguments: str) -> Any:
    result = run(home, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


async def split(home: Path, targets: dict[int, int]) -> None:
    async with open_tenant_command("acme", home) as command, command.unit_of_work() as uow:
        await aliases.move(uow, command.tenant_id, "voice", "production", targets)


def test_the_life_of_an_adapter(home: Path, model: Path) -> None:
    folder = str(model.parent / "adapter")
    write_base_model(home, BaseModelFacts("tiny", str(model), model_digest(str(model))))
    first = run_json(home, "push", folder, "--name", "voice", "--no-probe")
    assert (first["version"], first["rank"], first["promoted"]) == (1, 4, True)
    config = model.parent / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 16'))
    second = run_json(home, "push", folder, "--name", "voice", "--no-promote", "--no-probe")
    assert (second["version"], second["promoted"]) == (2, False) and second["digest"] != first["digest"]

    (listed,) = run_json(home, "list")
    assert (listed["name"], listed["aliases"], len(listed["versions"])) == ("voice", {"production": 1}, 2)
    assert run_json(home, "alias", "voice", "production", "2")["version"] == 2
    shown = run_json(home, "show", "voice")
    assert shown["aliases"] == {"production": 2} and shown["shares"] == {"production": {"2": 100}}
    assert [version["digest"] for version in shown["versions"]] == [first["digest"], second["digest"]]
    assert run_json(home, "rollback", "voice")["version"] == 1
    asyncio.run(split(home, {1: 70, 2: 30}))
    assert run_json(home, "show", "voice")["shares"] == {"production": {"1": 70, "2": 30}}
    guarded = run_json(home, "alias", "voice", "production", "2", "--share", "5", "--guard", GUARD)
    assert guarded["version"] == 1
    guard = run_json(home, "show", "voice")["guards"]["production"]
    assert (guard["baseline"], guard["canary"], guard["max_failure_ratio"], guard["min_requests"]) == (
        1,
        2,
        2,
        50,
    )
    assert "voice:production goes back from version 2 to 1 at 100 %: max_failure_ratio=2 0%" in " ".join(
        run(home, "show", "voice").output.split()
    )
    own = run(home, "alias", "voice", "production", "1", "--share", "5")
    assert own.exit_code == 2 and "version 1 keeps the rest" in own.output
    asyncio.run(split(home, {1: 70, 2: 30}))
    assert {"70", "30"} <= set(run(home, "show", "voice").output.split())
    assert len(list((home / "adapters").glob("*/*/adapter_model.safetensors"))) == 2
    refused = run(home, "delete", "voice")
    assert refused.exit_code == 1 and "has these aliases: production" in refused.output
    assert run_json(home, "alias", "voice", "production", "--delete")["version"] is None
    assert run_json(home, "delete", "voice", "--version", "2") == {"deleted": "voice@2"}
    assert run_json(home, "delete", "voice") == {"deleted": "voice"}
    assert run_json(home, "list") == []
    assert not list((home / "adapters").glob("*/*/adapter_model.safetensors"))


def test_without_a_server_a_version_waits_for_the_next_start(home: Path, model: Path) -> None:
    push = ["push", str(model.parent / "adapter"), "--name", "voice", "--model", str(model)]
    result = run(home, *push, "--json")
    assert result.exit_code == 0, result.output
    pushed = json.loads(result.stdout)
    assert (pushed["version"], pushed["state"], pushed["promoted"]) == (1, "validating", False)
    assert "no server runs on this data directory" in result.stderr and "probes it" in result.stderr
    (shown,) = run_json(home, "show", "voice")["versions"]
    assert shown["state"] == "validating" and shown["report"]["checks"] == []
    refused = run(home, "delete", "voice")
    assert refused.exit_code == 1 and "is being validated" in refused.output


def test_a_profile_before_and_after_the_first_alias(home: Path, model: Path) -> None:
    folder = str(model.parent / "adapter")
    push = ["push", folder, "--name", "voice", "--model", str(model), "--no-probe"]
    assert run_json(home, *push, "--no-alias")["promoted"] is False
    assert run_json(home, "show", "voice")["aliases"] == {}
    options = ("--tool-style", "hermes", "--reasoning-style", "[plan],[/plan]", "--decision-read", "values")
    changed = run_json(home, "profile", "voice", "1", *options, "--defaults", '{"temperature": 0.2}')
    assert changed == {
        "name": "voice",
        "version": 1,
        "tool_style": "hermes",
        "reasoning_style": {"start": "[plan]", "end": "[/plan]"},
        "defaults": {"temperature": 0.2},
        "decision": {"read": "values"},
    }
    run_json(home, "alias", "voice", "production", "1")
    assert run_json(home, "profile", "voice", "1") == changed
    assert "[plan],[/plan]" in run(home, "profile", "voice", "1").stdout
    for option, style in (("--tool-style", "none"), ("--reasoning-style", "base")):
        refused = run(home, "profile", "voice", "1", option, style)
        assert refused.exit_code == 1 and "has had an alias" in refused.output
    pushed = run_json(home, *push, "--tool-style", "mistral", "--reasoning-style", "none", "--defaults", "{}")
    assert (pushed["version"], pushed["promoted"]) == (2, True)
    shown = run_json(home, "show", "voice")["versions"]
    assert [(each["tool_style"], each["reasoning_style"], each["defaults"]) for each in shown] == [
        ("hermes", {"start": "[plan]", "end": "[/plan]"}, {"temperature": 0.2}),
        ("mistral", "none", {}),
    ]
    assert "mistral" in run(home, "show", "voice").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tool-style", "jinja"], "tool_style"),
        (["--reasoning-style", "jinja"], "reasoning_style"),
        (["--reasoning-style", "<a>,<a>"], "one marker contains the other"),
        (["--defaults", '{"temperature": 9}'], "defaults.temperature"),
        (["--defaults", '{"chat_template": "x"}'], "defaults.chat_template"),
        (["--defaults", "[]"], "JSON object"),
        (["--defaults", "{"], "not valid JSON"),
    ],
)
def test_a_wrong_profile_is_wrong_usage(home: Path, options: list[str], message: str) -> None:
    result = run(home, "profile", "voice", "1", *options)
    assert result.exit_code == 2, result.output
    assert message in re.sub(r"[\s│]+", " ", result.output), "a table may break the line"


def test_no_new_adapter_is_called_like_the_base_model(home: Path, model: Path) -> None:
    push = ["push", str(model.parent / "adapter"), "--model", str(model), "--no-probe"]
    for name in ("model", "tiny"):
        refused = run(home, *push, "--name", name)
        assert refused.exit_code == 2 and "name" in refused.output
        assert "is that of the base model" in re.sub(r"\s+", " ", refused.output)
        assert run_json(home, "list") == [] and not list((home / "adapters").glob("*/*/*.safetensors"))
        write_base_model(home, BaseModelFacts("tiny", str(model), model_digest(str(model))))
    # The folder's name is no longer that of the base model; a name that becomes it later goes on having versions.
    assert run_json(home, *push, "--name", "model")["version"] == 1
    write_base_model(home, BaseModelFacts("model", str(model), model_digest(str(model))))
    assert run_json(home, *push, "--name", "model")["version"] == 1


def test_a_quarantined_version_is_released(home: Path, model: Path, database_url: str) -> None:
    push = ["push", str(model.parent / "adapter"), "--name", "voice", "--model", str(model)]
    run_json(home, *push, "--no-probe")
    refused = run(home, "release", "voice", "1")
    assert refused.exit_code == 1 and "is ready, from where it does not become ready" in refused.output
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE adapter_versions SET state = 'quarantined'")
        released = run_json(home, "release", "voice", "1")
        assert released == {"name": "voice", "version": 1, "state": "ready"}
        entries = connection.execute("SELECT action, actor FROM audit_entries WHERE action LIKE 'version.%'")
        assert ("version.release", command_actor().name) in entries.fetchall()
    assert run(home, "release", "voice", "2").exit_code == 1


def test_tables_for_people(home: Path, model: Path) -> None:
    push = ["push", str(model.parent / "adapter"), "--name", "voice", "--model", str(model)]
    pushed = run(home, *push, "--no-probe")
    assert pushed.exit_code == 0 and "every value is finite" in pushed.stdout
    assert "production@1" in run(home, "list").stdout
    assert "ready" in run(home, "show", "voice").stdout
    assert "voice:canary is version 1" in run(home, "alias", "voice", "canary", "1").stdout
    assert "deleted voice:canary" in run(home, "alias", "voice", "canary", "--delete").stdout
    assert "deleted voice" in run(home, "delete", "voice", "--force").stdout


def test_a_digest_is_the_same_with_or_without_a_server(home: Path, model: Path) -> None:
    folder = str(model.parent / "adapter")
    named = run_json(home, "push", folder, "--name", "voice", "--model", str(model))
    write_base_model(home, BaseModelFacts("tiny", str(model), model_digest(str(model))))
    assert run_json(home, "push", folder, "--name", "voice")["digest"] == named["digest"]


def test_a_refused_adapter_names_the_tensor(home: Path, model: Path) -> None:
    config = model.parent / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 8'))
    result = run(home, "push", str(config.parent), "--name", "voice", "--model", str(model), "--json")
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert error["check"] == "ranks" and "layers.0.self_attn.q_proj.lora_A" in error["subject"]
    assert error["report"][-1]["passed"] is False
    assert "adapter_config.json says 8" in result.stderr
    assert (
        error["remediation"] == REMEDIATIONS["ranks"] and f"mend it: {REMEDIATIONS['ranks']}" in result.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["push", ".", "--name", "voice"], 1, "base_model.json is missing"),
        (["push", ".", "--name", "a:b", "--model", "MODEL"], 2, "adapter name 'a:b' is not allowed"),
        (["push", ".", "--name", "voice", "--model", "MODEL"], 1, "adapter_config.json: is missing"),
        (["show", "nothing"], 1, "no adapter named 'nothing'"),
        (["alias", "nothing", "production", "1"], 1, "no adapter named 'nothing'"),
        (["alias", "nothing", "production", "zero"], 2, "Usage: adapter alias"),
        (["rollback", "nothing"], 1, "no adapter named 'nothing'"),
        (["push"], 2, "Missing"),
        (["push", ".", "--name", "voice", "--url", "http://127.0.0.1:1"], 2, "--url and --key"),
        (
            ["push", ".", "--name", "voice", "--url", "u", "--key", "k", "--no-probe"],
            2,
            "--no-probe and --model",
        ),
        (["alias", "voice", "production"], 2, "either VERSION or --delete"),
        (["alias", "voice", "production", "1", "--delete"], 2, "either VERSION or --delete"),
        (["alias", "voice", "production", "1", "--guard", "max_unsatisfied=0.1"], 2, "--guard needs --share"),
        (["alias", "voice", "production", "1", "--share", "5", "--guard", "most=1"], 2, "--guard most"),
        (
            ["alias", "voice", "production", "1", "--share", "5", "--guard", "max_ttft_ratio=nan"],
            2,
            "--guard max_ttft_ratio",
        ),
        (
            ["alias", "voice", "production", "1", "--share", "5", "--guard", "max_unsatisfied=2"],
            2,
            "--guard max_unsatisfied",
        ),
    ],
)
def test_errors(home: Path, model: Path, arguments: list[str], exit_code: int, message: str) -> None:
    result = run(home, *(str(model) if argument == "MODEL" else argument for argument in arguments))
    assert result.exit_code == exit_code, result.output
    assert message in result.output and "Traceback" not in result.output


def test_another_tenant_sees_nothing(home: Path, model: Path) -> None:
    run_json(home, "push", str(model.parent / "adapter"), "--name", "voice", "--model", str(model))
    result = CliRunner().invoke(app, ["show", "voice", "--tenant", "bolt", "--data-dir", str(home)])
    assert result.exit_code == 1 and "no adapter named 'voice'" in result.output
    result = CliRunner().invoke(app, ["list", "--tenant", "nobody", "--data-dir", str(home)])
    assert result.exit_code == 1 and "no tenant named 'nobody'" in result.output


def test_with_a_bucket_a_push_reaches_it_and_a_deletion_empties_it(
    home: Path, model: Path, s3_bucket: S3Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "BLOB_STORE": "s3",
        "S3_BUCKET": s3_bucket.bucket,
        "S3_ENDPOINT": s3_bucket.endpoint or "",
        "S3_REGION": s3_bucket.region or "",
        "S3_ACCESS_KEY_ID": s3_bucket.access_key_id or "",
        "S3_SECRET_ACCESS_KEY": s3_bucket.secret_access_key or "",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"LORAPLEX_{name}", value)
    adapter = str(model.parent / "adapter")
    pushed = run_json(home, "push", adapter, "--name", "support", "--model", str(model), "--no-probe")
    bucket = ObjectStore(home / "objects", replace(s3_bucket, prefix=None))
    tenant = asyncio.run(bucket.folders("adapters"))
    assert asyncio.run(bucket.folders(f"adapters/{tenant[0]}")) == [pushed["digest"]]
    assert run(home, "delete", "support", "--force").exit_code == 0
    assert asyncio.run(bucket.folders("adapters")) == []
