"""Each drill once against one running installation, which survives it: nothing is lost, nothing is charged twice, quotas stay exact."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from tests.benchmarks.chaos.disks import namespace_command
from tests.end_to_end.drilled_installation import DrillPlan, DrillRun
from tests.end_to_end.lost_stores import scripted
from tests.platform.free_ports import free_ports
from tests.platform.server.serve_process import stores

from loraplex.platform.drills.drill import WARM_UP
from loraplex.platform.processes.child_process import module_command

__all__ = ["stores"]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600

LOAD = ["--rate", "10", "--max-tokens", "12"]
DRILLS = {
    "redis-flush": ["redis-flush", "--seconds", "1", *LOAD],
    "db-outage": ["db-outage", "--seconds", "2", *LOAD],
    "disk-full": ["disk-full", "--seconds", "2", *LOAD],
    "engine-hang": ["engine-hang", *LOAD],
    "engine-kill": ["engine-kill", *LOAD],
    "gateway-kill": ["gateway-kill", *LOAD],
    # Long responses: at most some requests per second are this machine's capacity, and not that of its client.
    "overload": ["overload", "--seconds", "10", "--max-tokens", "150"],
}
LONG = ("engine-kill", "gateway-kill", "overload")
"""They start a process once more, or last longer, and take half of the time: with `--long` only."""
PRICES = {"price_prompt": "1500001", "price_cached_prompt": "150007", "price_completion": "6000011"}
TMPFS_MIB = 160
"""Beyond the 64 MiB below which a journal admits nothing."""


def plan_of(
    folder: Path, model: Path, stores: dict[str, str], *, mounts: bool, without: Sequence[str]
) -> DrillPlan:
    (folder / "script.json").write_bytes(msgspec.json.encode(scripted(token_interval_s=0.02)))
    settings = {
        **PRICES,
        **stores,
        "model": str(model),
        "fake_engine": str(folder / "script.json"),
        "log_level": "warning",
        # A busy machine lets Valkey wait too, which is not what is tested.
        "valkey_timeout_s": "1",
    }
    skipped = [*without, *(() if mounts else ("disk-full",))]
    drills = [arguments for name, arguments in DRILLS.items() if name not in skipped]
    return DrillPlan(
        data_dir=str(folder / "data"),
        port=free_ports(1)[0],
        settings=settings,
        tmpfs_mib=TMPFS_MIB if mounts else None,
        drills=drills,
    )


def run_plan(plan: DrillPlan, errors: Path) -> list[DrillRun]:
    command = module_command("tests.end_to_end.drilled_installation")
    with errors.open("w") as log:
        ended = subprocess.run(
            command if plan.tmpfs_mib is None else [*namespace_command(), *command],
            input=msgspec.json.encode(plan) + b"\n",
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": f"{ROOT / '.src'}{os.pathsep}{ROOT}"},
            timeout=TIMEOUT_S,
            check=False,
        )
    assert ended.returncode == 0, errors.read_text()
    return [msgspec.json.decode(line, type=DrillRun) for line in ended.stdout.splitlines()]


@pytest.mark.long
def test_a_guard_sets_a_bad_version_back(tmp_path: Path, demo_model: Path, stores: dict[str, str]) -> None:
    """The versions differ by their defaults, which a scripted engine does not heed."""
    plan = plan_of(tmp_path, demo_model, stores, mounts=False, without=())
    settings = {name: value for name, value in plan.settings.items() if name != "fake_engine"}
    drills = [["bad-version", "--seconds", "300", "--rate", "1", "--max-tokens", "4"]]
    (run,) = run_plan(msgspec.structs.replace(plan, settings=settings, drills=drills), tmp_path / "stderr")
    report = json.loads(run.output)
    print(report)
    assert run.exit_code == 0 and report["survived"]
    with psycopg.connect(stores["database_url"], options="-c role=app_operator") as connection:
        query = "SELECT after->>'reason' FROM audit_entries WHERE action = 'alias.revert'"
        assert connection.execute(query).fetchall() == [("max_unsatisfied",)]
        assert connection.execute("SELECT FROM tenants WHERE deleted_at IS NULL").fetchall() == []


def check_report(report: dict[str, Any]) -> None:
    drift = report["drift"]
    assert drift["drift_pico"] == drift["drift_tokens"] == 0
    assert drift["amount_pico"] > 0 and drift["rows"] >= report["completed"] >= WARM_UP
    # A scripted engine's first token takes 20 ms: on a busy machine the comparison of such times is one of its pauses.
    broken = [each for each in report["promises"] if not each["kept"] and "p95 TTFT" not in each["name"]]
    assert not broken


def test_an_installation_survives_every_drill(
    tmp_path: Path, demo_model: Path, stores: dict[str, str], request: pytest.FixtureRequest
) -> None:
    """Errors are those that each fault may cause, and after it nothing of the drill is left."""
    without = () if request.config.getoption("--long") else LONG
    plan = plan_of(tmp_path, demo_model, stores, mounts=bool(namespace_command()), without=without)
    if plan.tmpfs_mib is None:
        print("\ndisk-full is left out: this user may not mount a small file system")
    runs = run_plan(plan, tmp_path / "stderr")
    assert len(runs) == len(plan.drills)
    for drill, run in zip(plan.drills, runs, strict=True):
        assert run.output, f"{drill}: {run.errors} {(tmp_path / 'stderr').read_text()}"
        report = json.loads(run.output)
        print(
            f"\n{drill[0]}: {run.seconds:.1f} s, {report['requests']} requests, errors {report['errors']}, recovered after "
            f"{report['recovery_s']:.2f} s, {report['drift']}"
        )
        check_report(report)
        assert run.exit_code == (0 if report["survived"] else 1)
        assert not [name for name in run.files if name.startswith("drill")]
        if drill[0] in ("disk-full", "gateway-kill"):
            assert report["errors"]
        assert report["survived"] or drill[0] == "overload"
    with psycopg.connect(stores["database_url"], options="-c role=app_operator") as connection:
        left = connection.execute("SELECT name FROM tenants WHERE deleted_at IS NULL").fetchall()
        audited = connection.execute("SELECT DISTINCT action FROM audit_entries").fetchall()
    assert left == []
    assert {"tenant.create", "key.create", "quotas.change", "tenant.delete"} <= {row[0] for row in audited}
