"""Two gateways on one engine: what it delivered through both is what the ledger holds, also where one of them is killed under load."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.end_to_end.billed_load import SETTINGS, Answers, BilledLoad, all_shipped, ledger_rows, make_callers
from tests.end_to_end.live_server import engine_stats, until
from tests.end_to_end.lost_stores import MODEL, check_drift, external, ready, scripted, settings_of
from tests.end_to_end.test_killed_gateway import check, check_released, kill, open_in_journals
from tests.platform.server.serve_process import Serve, serving

from loraplex.engine.messages import EngineStats
from loraplex.platform.datastores.embedded.servers import ServerPair

__all__ = ["external"]

SCRIPT = scripted(token_interval_s=0.02)
LONGEST = 200
ENOUGH = 15


def merged(*all_answers: Answers) -> Answers:
    found = Answers()
    for each in all_answers:
        found.finished |= each.finished
        found.left |= each.left
        found.broken |= each.broken
        found.errors += each.errors
    return found


def loaded(gateways: tuple[Serve, Serve], keys: list[str]) -> list[BilledLoad]:
    """Streams, whole answers and clients that leave, at both gateways: each tenant uses both."""
    loads = [BilledLoad(each.url, MODEL, keys, workers=8, longest=LONGEST) for each in gateways]
    until(lambda: all(len(load.answers.finished) > ENOUGH for load in loads), 120, "both gateways answer")
    return loads


@pytest.mark.long
def test_what_one_engine_delivers_through_two_gateways_is_what_the_ledger_holds(
    tmp_path: Path, demo_model: Path, external: ServerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, address = external.start(transient=False), f"ipc://{tmp_path}/run/shared.sock"
    settings = SETTINGS | settings_of(facts) | {"secret": "of both gateways".ljust(32, "0")}

    def delivered() -> EngineStats:
        return asyncio.run(engine_stats(address))

    def gateway(name: str, stack: ExitStack) -> Serve:
        arguments = ("--role", "gateway", "--engine", address, "--served-model-name", MODEL)
        entered = serving(tmp_path / name, None, SCRIPT, *arguments, settings=settings)
        return stack.enter_context(entered)

    with ExitStack() as stack:
        engine = ("--role", "engine", "--engine", address)
        stack.enter_context(serving(tmp_path / "engine", demo_model, SCRIPT, *engine, wait=False))
        one, two = gateway("one", stack), gateway("two", stack)
        until(lambda: ready(one) and ready(two), 120, "readyz answers 200")
        keys = make_callers(facts.database_url)

        before = merged(*(load.end() for load in loaded((one, two), keys)))
        assert before.left and not before.broken
        until(lambda: all_shipped(facts.database_url), 120, "the ledger has all")
        rows, engine_counts = ledger_rows(facts.database_url), delivered()
        assert sum(row.usage.completion for row in rows.values()) == engine_counts.generation_tokens
        assert sum(row.usage.prompt for row in rows.values()) == engine_counts.prompt_tokens
        assert sum(row.usage.cached for row in rows.values()) == engine_counts.cached_prompt_tokens

        loads = loaded((one, two), keys)
        kill(two)
        opened = open_in_journals(two.folder / "data", tmp_path / "copy")
        at_the_end = len(loads[0].answers.finished) + ENOUGH
        until(lambda: len(loads[0].answers.finished) > at_the_end, 120, "the other one goes on")
        after = [load.end() for load in loads]
        assert not after[0].broken, "a request at the living gateway broke off"
        until(lambda: delivered().running == 0, 60, "the rows of the killed gateway are aborted")
        two = gateway("two", stack)
        until(lambda: ready(two), 120, "readyz answers 200")
        figures = check(facts.database_url, merged(before, *after), opened)
        charged = sum(row.usage.completion for row in ledger_rows(facts.database_url).values())
        uncharged = delivered().generation_tokens - charged
        assert 0 <= uncharged <= len(opened) * 2 * LONGEST, (
            "more than what was in flight at the killed gateway"
        )
        check_released(one, keys)
        check_drift(facts, monkeypatch)
        print(f"\ntwo gateways, one killed: {figures}; {uncharged} tokens computed for it are nobody's")
