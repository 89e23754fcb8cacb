"""Two replicas of the fake engine under Ray Serve, in a network namespace of their own, behind the client of a gateway.

Invariant: all tests read the facts of one run of `serve_checks.py`, since Ray takes seconds to start.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tests.platform.ray.namespace import may_make_namespaces, namespaced, ray_environment

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 400.0
Facts: TypeAlias = dict[str, dict[str, Any]]

pytestmark = pytest.mark.skipif(not may_make_namespaces(), reason="this user may not make network namespaces")


@pytest.fixture(scope="module")
def facts() -> Facts:
    # Ray's sockets are below the folder, and a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="lr", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "data").mkdir(mode=0o700)
        ended = subprocess.run(
            namespaced("tests.platform.ray.serve_checks", name),
            cwd=ROOT,
            env=ray_environment(folder),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"check"')]
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = {line["check"]: line for line in lines}
    assert not [line for line in lines if "error" in line]
    return found


def test_the_events_of_a_stream_are_those_of_the_engine(facts: Facts) -> None:
    assert facts["streams"]["equal"]
    assert facts["streams"]["started"]


def test_the_first_token_is_sent_at_once_and_later_ones_together(facts: Facts) -> None:
    assert facts["streams"]["first_tokens"] == 1
    assert facts["streams"]["deltas"] < 40


def test_an_abort_ends_the_request_on_its_replica_with_its_usage(facts: Facts) -> None:
    assert facts["abort"]["reason"] == "abort"
    assert facts["abort"]["usage"] > 0
    # The other one is the request whose iterator was closed.
    assert facts["abort"]["aborts"] == 2


def test_forgetting_reaches_every_replica_and_no_other_tenant(facts: Facts) -> None:
    assert facts["forget"]["codes"] == ["namespace_forgotten"]
    assert facts["forget"]["other"] == "length"


def test_the_total_time_of_a_request_ends_it_with_its_usage(facts: Facts) -> None:
    assert facts["deadline"]["code"] == "timeout"
    assert facts["deadline"]["charged"]


def test_requests_find_their_adapter_in_memory_more_often_than_at_random(facts: Facts) -> None:
    assert facts["hits"]["codes"] == {"length": 240}
    assert facts["hits"]["rate"] >= facts["hits"]["random_rate"] + 0.05


def test_a_killed_engine_loses_its_request_and_is_restarted_in_its_replica(facts: Facts) -> None:
    lost = facts["engine_killed"]
    assert lost["poison"] == "engine_lost"
    assert lost["after"] == ["length"] * 8
    assert lost["same_places"]


def test_the_death_of_an_engine_is_reported_with_what_was_open(facts: Facts) -> None:
    assert facts["engine_killed"]["dead"] == ["poison"]
    assert facts["engine_killed"]["engine_deaths"] == 1


def test_a_killed_replica_loses_its_own_requests_alone_and_is_replaced(facts: Facts) -> None:
    killed = facts["replica_killed"]
    assert set(killed["codes"]) == {"engine_lost", "length"}
    assert killed["dead"] == killed["codes"]["engine_lost"]
    assert killed["after"] == ["length"] * 8
    assert killed["places"] == [0, 1]
    assert not killed["engine_alive"]


def test_a_rolling_update_fails_no_stream(facts: Facts) -> None:
    assert set(facts["rolling_update"]["codes"]) == {"length"}
    assert facts["rolling_update"]["deaths"] == 0


def test_forgetting_reaches_replicas_that_drain(facts: Facts) -> None:
    assert facts["rolling_update"]["open"] == 4
    assert facts["rolling_update"]["erased"] == {"namespace_forgotten": 4}


def test_a_request_waits_while_every_replica_is_full(facts: Facts) -> None:
    assert facts["full"]["waited"]
    assert facts["full"]["then"] == "length"
    assert facts["full"]["late"] == "overloaded"


def test_a_request_that_waits_for_a_replica_can_be_aborted(facts: Facts) -> None:
    assert facts["full"]["aborted"] == "abort"
    assert facts["full"]["taken"] == ["abort"]


def test_requests_that_wait_at_a_gateway_bring_a_replica_which_leaves_without_failing_one(
    facts: Facts,
) -> None:
    assert facts["autoscaling"]["codes"] == {"abort": 6, "length": 1}
