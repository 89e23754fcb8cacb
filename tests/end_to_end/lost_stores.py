"""Stores that a gateway uses or starts itself, and the comparison of all that they sum up."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.end_to_end.billed_load import CACHED_TOKENS
from tests.platform.server.serve_process import Serve
from typer.testing import CliRunner

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript, Fault
from loraplex.platform.cli.billing import usage
from loraplex.platform.datastores.embedded.lock import ConnectionFacts, OwnerLock
from loraplex.platform.datastores.embedded.servers import SERVICES_FOLDER, ServerPair, make_private

MODEL = "smollm2-135m-instruct"


def scripted(token_interval_s: float, faults: tuple[Fault, ...] = ()) -> FakeScript:
    info = msgspec.structs.replace(DEFAULT_INFO, vocab_size=49_152, eos_token_ids=[2])
    return FakeScript(
        info=info, token_interval_s=token_interval_s, cached_tokens=CACHED_TOKENS, faults=faults
    )


@pytest.fixture
def external(tmp_path: Path) -> Iterator[ServerPair]:
    """PostgreSQL and Valkey that no gateway starts or repairs."""
    folder = tmp_path / "stores"
    make_private(folder)
    pair = ServerPair(folder, None, None)
    try:
        yield pair
    finally:
        pair.stop()


def settings_of(facts: ConnectionFacts) -> dict[str, str]:
    return {"database_url": facts.database_url, "redis_url": facts.redis_url}


def facts_of(serve: Serve) -> ConnectionFacts:
    """The addresses of the stores that it started."""
    facts = OwnerLock(serve.folder / "data" / SERVICES_FOLDER).facts()
    assert facts is not None
    return facts


def ready(serve: Serve) -> bool:
    return httpx.get(f"{serve.url}/readyz").status_code == 200


def check_drift(facts: ConnectionFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """`loraplex usage reconcile` finds no difference, counters included."""
    monkeypatch.setenv("DATABASE_URL", facts.database_url)
    monkeypatch.setenv("REDIS_URL", facts.redis_url)
    result = CliRunner().invoke(usage.app, ["reconcile", "--json"])
    assert result.exit_code == 0, result.output
    assert '"counters"' in result.output
