"""Each situation is brought about, and the page's own commands show the figure that its table names as the cause."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.end_to_end.live_server import RUN
from tests.runbooks.__main__ import CACHE
from tests.runbooks.page import commands, sections, shell
from tests.runbooks.situations import SITUATIONS

from loraplex.platform.demo.model import ensure_demo_model

WITHIN_S = 150.0


@dataclass(frozen=True)
class Answers:
    """What the commands of a section printed, in their order."""

    texts: list[str]

    def numbers(self, command: int, pattern: str) -> list[float]:
        """The numbers behind what matches, in the answer of a command, 0 for the first."""
        return [
            float(each)
            for each in re.findall(rf"{pattern}\D*? ([\d.e+]+)$", self.texts[command], re.MULTILINE)
        ]

    def count(self, command: int, value: str) -> int:
        """How many lines `counted` found with a value."""
        return sum(int(each) for each in re.findall(rf"^ *(\d+) {value}$", self.texts[command], re.MULTILINE))


def is_split(answers: Answers) -> bool:
    return (
        answers.texts[1].count("production 50 %") == 2
        and answers.count(2, '"version": 1') > 0
        and answers.count(2, '"version": 2') > 0
    )


def adapters_evict(answers: Answers) -> bool:
    (deferred,) = answers.numbers(0, 'reason="deferred"}')
    (waiting,) = answers.numbers(1, r"loraplex_adapters_waiting\{.*}")
    (evictions,) = answers.numbers(2, r"loraplex_adapter_evictions_total\{.*}")
    return deferred > 0 and waiting > 0 and evictions > 0 and "adapter_load" in answers.texts[3]


def rows_are_preempted(answers: Answers) -> bool:
    (used,) = answers.numbers(0, r"vllm:kv_cache_usage_perc\{.*}")
    (preemptions,) = answers.numbers(1, r"vllm:num_preemptions_total\{.*}")
    return used > 0.8 and preemptions > 0 and "give the KV cache" in answers.texts[3]


def prompts_differ_at_their_beginning(answers: Answers) -> bool:
    (queries,) = answers.numbers(1, r"vllm:prefix_cache_queries_total\{.*}")
    (hits,) = answers.numbers(1, r"vllm:prefix_cache_hits_total\{.*}")
    again = [int(each) for each in re.findall(r"\d+", answers.texts[3])]
    return queries > 100 and hits < queries / 5 and again[1] > 100


def prompt_is_long(answers: Answers) -> bool:
    found = re.search(r'"prefill".*?(\d+),.*"([\d,]+) tokens computed', answers.texts[1])
    return found is not None and int(found[2].replace(",", "")) > 500


def one_engine_is_slow(answers: Answers) -> bool:
    return max(answers.numbers(0, r"loraplex_engine_slowness\{.*}")) >= 2


def format_has_changed(answers: Answers) -> bool:
    kinds = set(re.findall(r'"format": "(\w+)"', answers.texts[2]))
    return answers.texts[0].count('"fp_') == 2 and kinds == {"bfloat16", "int8"}


def share_is_unequal(answers: Answers) -> bool:
    weights = re.findall(r'"name": "(\w+)",\s+"tier": "\w+",\s+"weight": ([\d.]+)', answers.texts[2])
    (waiting,) = answers.numbers(0, 'reason="capacity"}')
    return waiting > 0 and dict(weights)["ledger"] == "100.0"


def clients_give_up(answers: Answers) -> bool:
    differing = set(re.findall(r"│ (\d+) +│ \d+ +│$", answers.texts[0], re.MULTILINE))
    return (
        differing == {"0"}
        and answers.count(1, '"outcome": "aborted"') > 0
        and answers.count(2, '"code": "client_closed_request"') > 0
    )


def one_key_never_succeeds(answers: Answers) -> bool:
    (deaths,) = answers.numbers(0, r"loraplex_engine_deaths_total\{.*}")
    failing, succeeding = (set(re.findall(r'"key_id": "(\w+)"', answers.texts[each])) for each in (2, 3))
    return deaths > 2 and bool(succeeding) and len(failing - succeeding) == 1


CAUSES: dict[str, Callable[[Answers], bool]] = {
    "wrong-output": is_split,
    "queue-high-processor-idle": adapters_evict,
    "busy-but-slow": rows_are_preempted,
    "prefix-cache-without-gain": prompts_differ_at_their_beginning,
    "slow-first-token": prompt_is_long,
    "slow-stream": one_engine_is_slow,
    "an-upgrade-that-regressed": format_has_changed,
    "a-tenant-that-hurts-others": share_is_unequal,
    "bills-that-differ": clients_give_up,
    "an-engine-that-dies-again-and-again": one_key_never_succeeds,
}


@pytest.mark.long
@pytest.mark.parametrize("name", SITUATIONS)
def test_the_page_shows_the_cause(name: str, tmp_path: Path) -> None:
    with SITUATIONS[name](tmp_path, ensure_demo_model(CACHE)) as provoked:
        variables = provoked.variables()
        deadline = time.monotonic() + WITHIN_S
        while True:
            if "REQUEST_ID" not in variables:
                variables |= newest_request(variables)
            answers = Answers([run(line, variables) for line in commands(sections()[name])])
            if shows(name, answers):
                return
            assert time.monotonic() < deadline, "\n\n".join(answers.texts)


def shows(name: str, answers: Answers) -> bool:
    """Whether the cause is to be seen. Figures may be missing in the first seconds."""
    try:
        return CAUSES[name](answers)
    except (ValueError, IndexError, KeyError):
        return False


def newest_request(variables: dict[str, str]) -> dict[str, str]:
    """As a reader takes one from a list."""
    found = re.search(r'"id": "([^"]+)"', run('tenant "requests?limit=1"', variables))
    return {} if found is None else {"REQUEST_ID": found[1]}


def run(line: str, variables: dict[str, str]) -> str:
    """The standard output of a command of the page."""
    loraplex = f"loraplex() {{ '{sys.executable}' -c '{RUN}' \"$@\"; }}"
    text = f"{loraplex}\n{shell()}\n{line}"
    environment = {**os.environ, **variables, "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-c", text], env=environment, check=False, capture_output=True, text=True, timeout=120
    )
    return done.stdout
