"""kill -9 of a gateway under load, alone and with its stores: what ended is in the ledger once, what was open is charged once for
what the journal last knew, and nothing stays reserved.
"""

import asyncio
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.end_to_end.billed_load import (
    SETTINGS,
    Answers,
    BilledLoad,
    Usage,
    all_shipped,
    check_sums,
    ledger_rows,
    make_callers,
)
from tests.end_to_end.live_server import descendants, lives, until
from tests.end_to_end.lost_stores import (
    MODEL,
    check_drift,
    external,
    facts_of,
    ready,
    scripted,
    settings_of,
)
from tests.platform.server.serve_process import Serve, serving

from loraplex.platform.datastores.embedded.servers import ServerPair
from loraplex.tenants.ledger.journal.journal import left_behind
from loraplex.tenants.quotas.limits import PER_SESSION

__all__ = ["external"]

SCRIPT = scripted(token_interval_s=0.02)
LONGEST = 300
JOURNAL_BYTES = 64 << 20


def kill(serve: Serve, *others: int) -> None:
    """Kill a gateway and others in one moment: none of them sees another end."""
    below = descendants(serve.process.pid)
    os.kill(serve.process.pid, signal.SIGSTOP)
    for pid in (*others, serve.process.pid):
        # A process of PostgreSQL may have ended with its postmaster already.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    serve.process.wait()
    until(lambda: not any(map(lives, below)), 60, "no process is left")


def loaded(serve: Serve, keys: list[str]) -> BilledLoad:
    load = BilledLoad(serve.url, MODEL, keys, workers=8, longest=LONGEST)
    until(lambda: len(load.answers.finished) > 5, 120, "answers arrive")
    time.sleep(2)
    return load


def open_in_journals(data_dir: Path, copy: Path) -> dict[str, Usage]:
    """What the journals of a killed gateway last knew of its open requests, read from a copy."""
    shutil.copytree(data_dir / "journal", copy)

    async def read() -> dict[str, Usage]:
        found = {}
        async for journal in left_behind(copy, max_bytes=JOURNAL_BYTES):
            for each in await journal.open_requests():
                used = each.usage
                tokens = Usage(used.prompt_tokens, used.cached_tokens, used.completion_tokens)
                found[each.reservation.request.request_id] = tokens
            await journal.close()
        return found

    return asyncio.run(read())


def check(database_url: str, answers: Answers, opened: dict[str, Usage]) -> str:
    """Every request has the row that it must have. Return the figures."""
    until(lambda: all_shipped(database_url), 120, "the journal is in the ledger, and nothing is reserved")
    rows = ledger_rows(database_url)
    assert not answers.errors, answers.errors
    for name, charged in answers.finished.items():
        assert (rows[name].outcome, rows[name].usage) == ("completed", charged)
    assert {name: row.usage for name, row in rows.items() if row.outcome == "unknown"} == opened
    assert rows.keys() <= answers.finished.keys() | answers.left | answers.broken.keys()
    assert any(used.prompt and used.completion for used in opened.values()), "what it had computed"
    behind = max(answers.broken.get(name, 0) - used.completion for name, used in opened.items())
    pico = check_sums(database_url)
    return (
        f"{len(answers.finished)} finished once, {len(opened)} in flight charged for "
        f"{sum(used.prompt for used in opened.values())} prompt and {sum(used.completion for used in opened.values())} "
        f"completion tokens, at most {max(behind, 0)} tokens less than a client has, {pico} pico-units, drift 0"
    )


def check_released(serve: Serve, keys: list[str]) -> None:
    """The counters have no reservation, and a sum for every limit but that of sessions, which has none."""

    def reserved(key: str) -> set[int | None]:
        headers = {"authorization": f"Bearer {key}"}
        response = httpx.get(f"{serve.url}/tenant/v1/quotas", headers=headers, timeout=60)
        if response.status_code != httpx.codes.OK:
            return set()
        subjects = [each["limits"] for each in response.json()["data"]]
        return {
            limit["reserved"] for limits in subjects for name, limit in limits.items() if name != PER_SESSION
        }

    def released() -> bool:
        return all(reserved(key) == {0} for key in keys)

    until(released, 90, "no reservation is in the counters")


@pytest.mark.long
@pytest.mark.parametrize("with_stores", [False, True], ids=["alone", "with its stores"])
def test_a_gateway_of_external_stores_is_killed(
    tmp_path: Path,
    demo_model: Path,
    external: ServerPair,
    monkeypatch: pytest.MonkeyPatch,
    with_stores: bool,
) -> None:
    """Its stores live on, or are killed with it and started again."""
    facts = external.start(transient=False)
    settings = SETTINGS | settings_of(facts)
    with serving(tmp_path / "s", demo_model, SCRIPT, settings=settings) as serve:
        until(lambda: ready(serve), 120, "readyz answers 200")
        keys = make_callers(facts.database_url)
        load = loaded(serve, keys)
        stores = (
            {each for pid in external.pids for each in (pid, *descendants(pid))} if with_stores else set()
        )
        kill(serve, *stores)
        until(lambda: not any(map(lives, stores)), 60, "no store is left")
        answers = load.end()
        opened = open_in_journals(serve.folder / "data", tmp_path / "copy")
    if with_stores:
        assert external.start(transient=False) == facts
    with serving(tmp_path / "s", demo_model, SCRIPT, settings=settings) as serve:
        figures = check(facts.database_url, answers, opened)
        check_released(serve, keys)
        check_drift(facts, monkeypatch)
        print(f"\ngateway killed: {figures}")


def test_a_gateway_and_its_stores_are_killed_together(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "s", demo_model, SCRIPT, settings=SETTINGS) as serve:
        until(lambda: ready(serve), 120, "readyz answers 200")
        keys = make_callers(facts_of(serve).database_url)
        load = loaded(serve, keys)
        kill(serve, *descendants(serve.process.pid))
        answers = load.end()
        opened = open_in_journals(serve.folder / "data", tmp_path / "copy")
    with serving(tmp_path / "s", demo_model, SCRIPT, settings=SETTINGS) as serve:
        facts = facts_of(serve)
        figures = check(facts.database_url, answers, opened)
        check_released(serve, keys)
        check_drift(facts, monkeypatch)
        print(f"\nall killed: {figures}")
