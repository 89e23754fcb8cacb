"""Environments of child processes have no secret of the installation."""

import pytest

from loraplex.platform.processes.environment import engine_environment


def test_an_engine_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LORAPLEX_SECRET", "DATABASE_URL", "REDIS_URL", "LORAPLEX_DATABASE_URL", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "postgresql://name:canary@host/db")
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    environment = engine_environment()
    assert "canary" not in "".join(environment.values())
    assert environment["OMP_PROC_BIND"] == "close" and environment["PATH"]
    assert environment["GOMP_SPINCOUNT"] == "3000"
