"""Specs to masks: each mask is fresh, refusals are told, threads share one compiler."""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.backends.compiler import CompilerConfig, MaskCompiler
from loraplex.grammar.backends.llguidance_mask import LlguidanceLimits
from loraplex.grammar.backends.vocabulary import Vocabulary, byte_vocabulary
from loraplex.grammar.errors import GrammarInvalid, MatcherFailed
from loraplex.grammar.spec import Backend, GrammarSpec, encode_spec
from loraplex.grammar.tree import JsonValue, Literal

if TYPE_CHECKING:
    from tests.grammar.conftest import Backends

BOTH = pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@BOTH
def test_masks_of_one_grammar_are_independent(backends: "Backends", backend: Backend) -> None:
    first = backends.mask(backend, JsonValue(SCHEMA))
    assert first.accept(backends.tokens("{")[0])
    second = backends.mask(backend, JsonValue(SCHEMA))
    assert backends.allowed(first) != backends.allowed(second)
    assert backends.accepts(second, '{"a": 1}')


@pytest.mark.parametrize("data", [b"", b"\x80", b"not a spec"])
def test_bytes_that_are_no_spec(compiler: MaskCompiler, data: bytes) -> None:
    with pytest.raises(GrammarInvalid, match="not a grammar spec"):
        compiler.compile(b"tenant", data)


@pytest.mark.parametrize(
    ("backend", "source"),
    [
        ("llguidance", "start: /a/"),
        ("llguidance", emit_llguidance.lark_source("start: other")),
        ("llguidance", emit_llguidance.emit(JsonValue({"type": "nothing"}))),
        ("xgrammar", "not JSON"),
        ("xgrammar", "[]"),
        ("xgrammar", '{"type": "structural_tag", "format": {"type": "unknown"}}'),
        ("xgrammar", '{"type": "structural_tag", "format": {"type": "dispatch", "rules": [1]}}'),
        ("xgrammar", '{"type": "structural_tag", "format": {"type": "token"}}'),
        ("xgrammar", emit_xgrammar.ebnf_source("root ::= other")),
        ("xgrammar", emit_xgrammar.emit(JsonValue({"type": "nothing"}))),
        ("xgrammar", '{"type": "structural_tag", "format": {"type": "open_json_schema"}}'),
    ],
)
def test_a_source_that_is_no_grammar(compiler: MaskCompiler, backend: Backend, source: str) -> None:
    with pytest.raises(GrammarInvalid) as raised:
        compiler.compile(b"tenant", encode_spec(GrammarSpec(backend=backend, source=source)))
    assert str(raised.value) and "Check failed" not in str(raised.value)


@BOTH
def test_threads_share_a_compiler(vocabulary: Vocabulary, backend: Backend) -> None:
    emit = (emit_llguidance if backend == "llguidance" else emit_xgrammar).emit
    compiler = MaskCompiler(vocabulary)
    specs = [encode_spec(GrammarSpec(backend=backend, source=emit(Literal(f"x{n}")))) for n in range(8)]

    def compile_and_walk(number: int) -> bool:
        mask = compiler.compile(bytes([number % 3]), specs[number % 8])
        tokens = vocabulary.tokenizer.encode(f"x{number % 8}").ids
        return all(map(mask.accept, tokens)) and mask.is_final()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(compile_and_walk, range(64)))


def test_work_is_limited() -> None:
    few = LlguidanceLimits(max_grammar_size=50)
    compiler = MaskCompiler(byte_vocabulary(), CompilerConfig(llguidance=few))
    large = JsonValue({"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(100)}})
    spec = encode_spec(GrammarSpec(backend="llguidance", source=emit_llguidance.emit(large)))
    with pytest.raises(GrammarInvalid):
        compiler.compile(b"tenant", spec)


def test_a_matcher_that_runs_out_of_fuel_fails_alone() -> None:
    few = LlguidanceLimits(max_items_in_row=100)
    compiler = MaskCompiler(byte_vocabulary(), CompilerConfig(llguidance=few))
    many = JsonValue({"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(200)}})
    spec = encode_spec(GrammarSpec(backend="llguidance", source=emit_llguidance.emit(many)))
    mask = compiler.compile(b"tenant", spec)
    tokens = byte_vocabulary().tokenizer.encode('{"p1":1').ids
    with pytest.raises(MatcherFailed, match="items"):
        for token_id in tokens:
            mask.accept(token_id)
            mask.forced_tokens()
            mask.closing_tokens(5)
    other = encode_spec(GrammarSpec(backend="llguidance", source=emit_llguidance.emit(JsonValue(SCHEMA))))
    assert compiler.compile(b"tenant", other).accept(tokens[0])


def test_many_optional_properties_are_no_hostile_grammar(backends: "Backends") -> None:
    schema = {"type": "object", "properties": {f"property_{n}": {"type": "string"} for n in range(1000)}}
    mask = backends.mask("llguidance", JsonValue(schema))
    for token_id in backends.tokens('{"property_900":"a","property_999":"b"}'):
        assert token_id in backends.allowed(mask)
        assert mask.accept(token_id)
    assert mask.is_final()
