"""What reading the bodies of `/v1` and encoding its responses costs, in this checkout and in an earlier commit of it.

Invariant: both commits are measured in turn, each in processes of its own, which import everything but this file from it.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import process_time_ns
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from tests.benchmarks.checkout import CHECKOUT
from tests.platform.parameters.request_parts import read_parameters

from loraplex.engine.messages import Delta, Finished, TokenLogprob, Usage
from loraplex.grammar.parsing.deltas import ArgumentsDelta
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.parameters.json_object import BodyLimits, parse_object
from loraplex.platform.web.inference_plane import json_response
from loraplex.platform.web.openai.chat_responses import chat_chunks, collect_chat
from loraplex.platform.web.openai.response_envelope import ResponseHead
from loraplex.platform.web.openai.response_models import encoded

MODULE: Final = "tests.benchmarks.bodies"
AT_MOST: Final = 1.05
HEAD: Final = ResponseHead("chatcmpl-0", 1_700_000_000, "demo/base")
USAGE: Final = Usage(prompt_tokens=5, cached_tokens=0, completion_tokens=1)
STATS: Final = SimpleNamespace(
    prompt_tokens=5, completion_tokens=1, cached_tokens=0, system_fingerprint="fp_0", thought_counter=None
)
UNSCORED: Final[Any] = {
    "prompt_output": SimpleNamespace(prompt_logprobs=None),
    "choice_probabilities": lambda choice: {},
}
TEXT_OF: Final[Any] = {
    1: (" text", b" text"),
    **{token: (f" t{token}", b" t") for token in range(2, 7)},
}.__getitem__
DELTAS: Final = 1000
"""Deltas of one stream or response."""


@dataclass(frozen=True, slots=True)
class BodiesShape:
    """Each case is run `repeats` times in each of `rounds` processes; the least time counts."""

    rounds: int = 3
    repeats: int = 15


def measure_bodies(shape: BodiesShape, against: str | None) -> Report:
    """Measure this checkout, and in turn with it the commit `against`. Raises `BenchFailed`."""
    report = Report("bodies", ("before_us", "after_us") if against else ("after_us",))
    after: list[dict[str, float]] = []
    before: list[dict[str, float]] = []
    with earlier_checkout(against) as earlier:
        for _ in range(shape.rounds):
            if earlier is not None:
                before.append(run_child(earlier, shape.repeats))
            after.append(run_child(CHECKOUT, shape.repeats))
    for name in after[0]:
        figure = {"after_us": min(times[name] for times in after)}
        if before:
            figure["before_us"] = min(times[name] for times in before)
            ratio = figure["after_us"] / figure["before_us"]
            report.ratios.append(Ratio(f"{name}: after / before", ratio, AT_MOST, "at most"))
        report.cases.append(Case(name, asdict(shape) | {"against": against}, figure))
    return report


@contextmanager
def earlier_checkout(commit: str | None) -> Iterator[Path | None]:
    """A worktree of a commit. Raises `BenchFailed` for one that does not exist."""
    if commit is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkout")
        git("worktree", "add", "--detach", str(path), commit)
        try:
            yield path
        finally:
            git("worktree", "remove", "--force", str(path))


def git(*arguments: str) -> None:
    run = subprocess.run(
        ("git", "-C", str(CHECKOUT), *arguments), capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise BenchFailed(run.stderr.strip())


def run_child(checkout: Path, repeats: int) -> dict[str, float]:
    """Measure a checkout in a process, by its own module of this name."""
    command, environment = (
        (sys.executable, "-m", MODULE, str(repeats)),
        {**os.environ, "PYTHONPATH": str(checkout / ".src")},
    )
    run = subprocess.run(command, capture_output=True, cwd=checkout, env=environment, check=False)
    if run.returncode:
        raise BenchFailed(run.stderr.decode(errors="replace").strip().splitlines()[-1])
    return msgspec.json.decode(run.stdout, type=dict[str, float])


def measure(repeats: int) -> dict[str, float]:
    """Return the microseconds of each case."""
    return {name: _time(work, repeats) for name, work in _cases().items()}


def _time(work: Callable[[], object], repeats: int) -> float:
    """Count CPU time, and of all repeats the least: other processes of the machine only add to it."""
    work()
    times = []
    for _ in range(repeats):
        start, calls = process_time_ns(), 0
        while process_time_ns() - start < 2_000_000:
            work()
            calls += 1
        times.append((process_time_ns() - start) / calls / 1000)
    return min(times)


def _cases() -> Mapping[str, Callable[[], object]]:
    cases: dict[str, Callable[[], object]] = {}
    for name, endpoint, body in _bodies():
        cases[f"JSON of {name}"] = partial(parse_object, msgspec.json.encode(body), BodyLimits())
        cases[f"parameters of {name}"] = partial(read_parameters, endpoint, body)
    for name, deltas, output in _streams():
        cases[f"stream of {DELTAS} {name}"] = partial(_stream, deltas, output)
        if output is None:
            cases[f"whole response of {DELTAS} {name}"] = partial(_whole, deltas)
    return cases


def _bodies() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for count, plural in ((1, ""), (4000, "s")):
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": "x" * 200} for index in range(count)]
        yield f"{count:,} message{plural}", "chat", {"model": "m", "messages": messages, "stream": True}
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": {**function, "name": f"f{index}"}} for index in range(16)]
    sampling = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 100, "seed": 1, "stop": ["x"], "user": "u"}
    yield "16 tools", "chat", {"model": "m", "messages": messages[:3], "tools": tools, **sampling}
    yield "100,000 token ids", "completions", {"model": "m", "prompt": list(range(100_000))}


def _streams() -> Iterator[tuple[str, list[Delta], Any]]:
    top = [(token, -1.0) for token in range(2, 7)]
    entry = [TokenLogprob(1, -0.5, top)]
    yield "deltas", [Delta("r", 0, [1], " text")] * DELTAS, None
    yield "deltas with log-probabilities", [Delta("r", 0, [1], " text", entry)] * DELTAS, None
    yield "deltas of arguments", [Delta("r", 0, [1], " text")] * DELTAS, SimpleNamespace(parser=_Parser)


class _Parser:
    """Makes every delta one of a call's arguments."""

    def feed(self, text: str) -> list[ArgumentsDelta]:
        return [ArgumentsDelta(0, text)]


def _stream(deltas: Sequence[Delta], output: Any) -> bytes:
    generation: Any = SimpleNamespace(choices=1, stats=STATS, output=output)
    chunks = chat_chunks(HEAD, generation, TEXT_OF, include_usage=True)
    events = [chunks.opening(), *(chunks.delta(0, delta) for delta in deltas), chunks.closing()]
    return b"".join(events)


def _whole(deltas: Sequence[Delta]) -> None:
    async def events() -> AsyncIterator[tuple[int, Delta | Finished]]:
        for delta in deltas:
            yield 0, delta
        yield 0, Finished("r", 0, "stop", USAGE)

    async def respond() -> None:
        # `asyncio.run` writes out what its task returns, so it returns nothing.
        generation: Any = SimpleNamespace(choices=1, stats=STATS, output=None, events=events, **UNSCORED)
        json_response(encoded(await collect_chat(HEAD, generation, TEXT_OF)))

    asyncio.run(respond())


def main() -> None:
    """Measure what is imported, and write it as one line."""
    sys.stdout.buffer.write(msgspec.json.encode(measure(int(sys.argv[1]))) + b"\n")


if __name__ == "__main__":
    main()
