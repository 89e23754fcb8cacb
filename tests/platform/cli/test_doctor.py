"""`loraplex doctor` distinguishes a machine that can serve from one that cannot."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psycopg
import pytest
from tests.platform.certificates import certificate_of
from typer.testing import CliRunner

from loraplex.adapters.errors import ValidationUnavailable
from loraplex.adapters.validation.result import ValidationResult
from loraplex.platform.cli import doctor
from loraplex.platform.cli.doctor import GIB, grade
from loraplex.platform.config import load_settings
from loraplex.platform.datastores.migrations import newest_revision
from loraplex.platform.server.adapter_validation import AdapterValidation


def run(*arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
    result = CliRunner().invoke(doctor.app, [*arguments, "--json"])
    return result.exit_code, {
        row["name"]: (row["status"], row["detail"]) for row in json.loads(result.stdout)
    }


def test_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("REDIS_URL", raising=False)
    code, checks = run("--data-dir", str(tmp_path / "new"))
    assert {"python", "torch", "gpu", "cpu", "memory", "disk", "postgresql", "valkey"} <= set(checks)
    assert checks["postgresql"][0] == checks["valkey"][0] == checks["data directory"][0] == "ok"
    assert code == int("failed" in {status for status, _ in checks.values()})
    assert checks["uploads"] == ("ok", "validated by processes without network")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("host", "proxies", "status"),
    [
        ("127.0.0.1", "", "ok"),
        ("localhost", "", "ok"),
        ("0.0.0.0", "", "warning"),
        ("::", "10.0.0.0/8", "ok"),
    ],
)
def test_keys_that_cross_a_network_unencrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, proxies: str, status: str
) -> None:
    monkeypatch.setenv("LORAPLEX_HOST", host)
    monkeypatch.setenv("LORAPLEX_TRUSTED_PROXIES", proxies)
    check = doctor.check_network(load_settings({"data_dir": tmp_path, "metrics_port": 9100}))
    assert check.status == status and ("TLS" in check.detail) == (status == "warning")


def test_a_certificate_that_cannot_be_served(tmp_path: Path) -> None:
    file = certificate_of("localhost", tmp_path)
    flags: dict[str, Any] = {
        "data_dir": tmp_path,
        "host": "0.0.0.0",
        "tls_certificate": file,
        "tls_key": file,
    }
    check = doctor.check_network(load_settings(flags))
    assert check.status == "warning" and "`metrics_port`" in check.detail
    flags["metrics_port"] = 9100
    assert doctor.check_network(load_settings(flags)) == doctor.Check(
        "network", "ok", "0.0.0.0, port 8000, https"
    )
    file.unlink()
    check = doctor.check_network(load_settings(flags))
    assert check.status == "failed" and "setting `tls_certificate`" in check.detail


def test_configured(database_url: str, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("REDIS_URL", valkey_url)
    _, checks = run()
    assert checks["postgresql"] == ("ok", f"PostgreSQL 18, schema {newest_revision()}")
    assert checks["valkey"][0] == "ok"


def test_a_database_without_schema_is_a_warning(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    _, checks = run()
    assert checks["postgresql"][0] == "warning" and "loraplex migrate" in checks["postgresql"][1]


def test_a_database_of_a_newer_version_is_not_to_be_migrated(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    _, checks = run()
    assert checks["postgresql"][0] == "warning" and "start the newer version" in checks["postgresql"][1]


def test_what_is_missing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:secret@/x?host=/nonexistent")
    monkeypatch.setenv("REDIS_URL", f"unix://{tmp_path}/none.sock")
    (tmp_path / "file").write_text("")
    code, checks = run("--data-dir", str(tmp_path / "file"))
    assert code == 1
    assert [checks[name][0] for name in ("postgresql", "valkey", "data directory")] == ["failed"] * 3
    assert "secret" not in str(checks)


def test_a_folder_open_to_others_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert run("--data-dir", str(tmp_path))[1]["data directory"][0] == "warning"


@pytest.mark.parametrize(
    ("free", "status", "refused"),
    [
        (
            (64 << 20) - 1,
            "failed",
            ["requests are refused below 0.0625 GiB", "uploads are refused below 5 GiB"],
        ),
        (2 * GIB, "warning", ["uploads are refused below 5 GiB"]),
        (50 * GIB, "ok", []),
    ],
)
def test_a_disk_below_a_floor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str, refused: list[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    check = doctor.check_disk(load_settings({"data_dir": tmp_path, "storage_floor_bytes": 5 * GIB}))
    assert check.status == status and check.detail.split("; ")[1:] == refused


def test_a_table_for_people(tmp_path: Path) -> None:
    assert "postgresql" in CliRunner().invoke(doctor.app, ["--data-dir", str(tmp_path)]).stdout


def test_uploads_that_cannot_be_confined_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: AdapterValidation, tenant_id: UUID, folder: Path) -> ValidationResult:
        raise ValidationUnavailable("a validation cannot be confined here: prctl(22)")

    monkeypatch.setattr(AdapterValidation, "validate", refuse)
    status, detail = run("--data-dir", str(tmp_path))[1]["uploads"]
    assert status == "warning" and "prctl(22)" in detail


def test_grades() -> None:
    assert [grade(amount * GIB, 1, 2 * GIB) for amount in (0, 1, 2)] == ["failed", "warning", "ok"]
