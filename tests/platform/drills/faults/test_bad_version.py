"""What a drill of a bad version finds kept and broken, and what it asks for."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.platform.config import load_settings
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults import bad_version
from loraplex.platform.drills.faults.bad_version import AFTERWARDS, BACK_S, Answer, BadVersion
from loraplex.platform.drills.faults.fault import Observed
from loraplex.platform.drills.installation import Installation
from loraplex.platform.drills.ledger_drift import LedgerDrift
from loraplex.platform.drills.traffic import DrillLoad
from loraplex.platform.parameters.adapter_profile import read_profile_change
from loraplex.platform.web.adapters.alias_routes import AliasTargets
from loraplex.platform.web.request_bodies import validated

BACK, SERVES, ALONE = (
    "version 2 is back at 0 % within 60 s of its 20 requests",
    "version 1 answers meanwhile",
    "version 1 alone answers afterwards",
)
MISSED = "schema_not_satisfied"


def fault_of(tmp_path: Path, **seen: Any) -> BadVersion:
    found = Installation(load_settings({"data_dir": tmp_path}), "postgresql://x/y", "", ("http://x",))
    return BadVersion(installation=found, seconds=120.0, **seen)


def answers(version: int, count: int, code: str | None = None) -> list[Answer]:
    return [Answer(f"drill@{version}", code, float(second)) for second in range(count)]


@pytest.mark.parametrize(
    ("first", "second", "back_s", "afterwards", "broken"),
    [
        (None, 20, 19 + BACK_S, 1, []),
        (None, 20, 19.1 + BACK_S, 1, [BACK]),
        (None, 20, None, 1, [BACK]),
        (None, 19, 25.0, 1, [BACK]),
        (MISSED, 20, 25.0, 1, [SERVES]),
        (None, 20, 25.0, 2, [ALONE]),
    ],
    ids=["kept", "late", "never", "too few", "version 1 misses", "version 2 goes on"],
)
async def test_promises(
    tmp_path: Path,
    first: str | None,
    second: int,
    back_s: float | None,
    afterwards: int,
    broken: list[str],
) -> None:
    fault = fault_of(
        tmp_path,
        answers=answers(1, 20, first) + answers(2, second, MISSED),
        afterwards=answers(afterwards, AFTERWARDS),
        back_s=back_s,
    )
    promises = await fault.promises(Observed([], 0.0, 1.0, LedgerDrift()))
    assert [promise.name for promise in promises if not promise.kept] == broken
    assert fault.notes == [f"{second} of {second} answers of version 2 missed their schema"]


def test_what_it_asks_for_is_allowed(tmp_path: Path) -> None:
    assert validated(AliasTargets, bad_version.SPLIT).guard is not None
    for defaults in bad_version.DEFAULTS:
        assert read_profile_change({"defaults": defaults})["defaults"] == defaults
    drill, canary = fault_of(tmp_path).tenants(DrillLoad(), 600.0)
    assert drill.scopes == ("inference",) and "adapters:write" in canary.scopes


async def test_a_refusal_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(403, text=json.dumps({"error": {"message": "no"}}))

    fault, client = fault_of(tmp_path), httpx.AsyncClient

    def scripted(**options: Any) -> httpx.AsyncClient:
        return client(transport=httpx.MockTransport(refuse), **options)

    monkeypatch.setattr(httpx, "AsyncClient", scripted)
    with pytest.raises(DrillImpossible, match="PUT /tenant/v1/adapters/drill/aliases/production: HTTP 403"):
        await fault.begin()
