"""Every hostile grammar straight to both libraries, past all bounds that come before: each ends in time, and memory is back."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.grammar.hostile_grammars import HOSTILE_GRAMMARS, HostileGrammar
from tests.platform.inference.structured_output.compile_checks import ByteChecks, write_tokenizer
from tests.platform.process_table import children, own_bytes

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.errors import GrammarInvalid, GrammarTooCostly
from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.tree import Alternation, JsonValue, Literal, Node, Pattern
from loraplex.platform.inference.structured_output.compile_cache import CompileLimits

MIB = 1 << 20
LIMITS = CompileLimits(
    deadline_s=6.0, cpu_s=1, memory_bytes=256 * MIB, queued=1024, queued_per_tenant=1024, queue_timeout_s=280
)
SLACK_S = 10.0


def node_of(body: dict[str, Any]) -> Node | None:
    """What is asked for as a tree; None for a language of a library's own."""
    match body:
        case {"response_format": {"json_schema": {"schema": schema}}}:
            return JsonValue(schema)
        case {"tools": [{"function": function}, *_]}:
            return JsonValue(function.get("parameters", {}))
        case {"structured_outputs": {"regex": pattern}}:
            return Pattern(pattern)
        case {"structured_outputs": {"choice": options}}:
            return Alternation(tuple(map(Literal, options)))
        case _:
            return None


def sources(body: dict[str, Any]) -> Iterator[tuple[Any, Callable[[], str]]]:
    """(library, what makes its source) for all that could read this request."""
    if (node := node_of(body)) is not None:
        yield "llguidance", lambda: emit_llguidance.emit(node)
        yield "xgrammar", lambda: emit_xgrammar.emit(node)
        return
    match body["structured_outputs"]:
        case {"grammar": text}:
            yield "llguidance", lambda: emit_llguidance.lark_source(text)
            yield "xgrammar", lambda: emit_xgrammar.ebnf_source(text)
        case {"structural_tag": tag}:
            yield "xgrammar", lambda: emit_xgrammar.structural_tag_source(tag)


def specs(case: HostileGrammar) -> Iterator[GrammarSpec]:
    """Those that can be written down at all."""
    for library, source in sources(case.body()):
        try:
            yield GrammarSpec(backend=library, source=source())
        except (GrammarInvalid, RecursionError, ValueError, TypeError, AttributeError):
            continue


async def outcome(cache: ByteChecks, namespace: bytes, spec: GrammarSpec) -> str:
    try:
        await cache.check(namespace, spec)
    except (GrammarInvalid, GrammarTooCostly) as refused:
        assert str(refused).isprintable() and len(str(refused)) < 500
        return str(refused)
    return "accepted"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)


async def test_every_hostile_grammar_ends_in_time(tokenizer: Path) -> None:
    cache = ByteChecks(tokenizer, LIMITS)
    await outcome(cache, b"warm", next(specs(HOSTILE_GRAMMARS[0])))
    before = own_bytes(cache.pid)
    outcomes: dict[tuple[str, str], str] = {}
    late: dict[str, float] = {}

    async def check_cases(slot: int, cases: Iterator[HostileGrammar]) -> None:
        for case in cases:
            for spec in specs(case):
                started = time.monotonic()
                outcomes[case.name, spec.backend] = await outcome(cache, bytes([slot]), spec)
                if (waited := time.monotonic() - started) > LIMITS.deadline_s + SLACK_S:
                    late[case.name] = waited

    cases = iter(HOSTILE_GRAMMARS)
    await asyncio.gather(*(check_cases(slot, cases) for slot in range(LIMITS.concurrent)))
    assert late == {}
    assert len({name for name, _ in outcomes}) > len(HOSTILE_GRAMMARS) * 0.8
    await asyncio.sleep(0.5)
    assert children(cache.pid) == []
    assert own_bytes(cache.pid) - before < 16 * MIB
    assert cache.work.restarts == 0
    for key, value in outcomes.items():
        print(*key, value[:150])
    await cache.close()
