"""Specs compile to fresh masks; the cache builds one grammar per key, and no tenant pays for another."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.backends.compiler import CompiledCache, CompilerConfig, MaskCompiler
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


@dataclass(frozen=True)
class Grammar:
    size_bytes: int


class Builds:
    """A `build` that counts."""

    def __init__(self, size: int = 10) -> None:
        self.count = 0
        self._size = size

    def __call__(self) -> Grammar:
        self.count += 1
        return Grammar(self._size)


def refuse() -> Grammar:
    raise AssertionError("built again")


def test_a_key_is_built_once_per_tenant() -> None:
    cache: CompiledCache[Grammar] = CompiledCache(100, 100)
    first, second = Builds(), Builds()
    assert cache.get(b"a", "key", first) is cache.get(b"a", "key", refuse)
    assert cache.get(b"b", "key", second) is not cache.get(b"a", "key", refuse)
    assert (first.count, second.count, cache.size_bytes) == (1, 1, 20)


def test_concurrent_threads_share_one_build() -> None:
    cache: CompiledCache[Grammar] = CompiledCache(100, 100)
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Grammar:
        begun.set()
        assert go_on.wait(60)
        return Grammar(1)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(cache.get, b"a", "key", slow)
        assert begun.wait(60)
        others = [pool.submit(cache.get, b"a", "key", refuse) for _ in range(3)]
        assert cache.get(b"b", "key", Builds(2)).size_bytes == 2
        go_on.set()
        assert len({id(each.result(10)) for each in (first, *others)}) == 1


def test_a_failed_build_raises_in_all_waiting_threads_and_is_not_cached() -> None:
    cache: CompiledCache[Grammar] = CompiledCache(100, 100)
    begun, go_on = threading.Event(), threading.Event()

    def failing() -> Grammar:
        begun.set()
        assert go_on.wait(60)
        raise ValueError("no grammar")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, b"a", "key", failing)
        assert begun.wait(60)
        other = pool.submit(cache.get, b"a", "key", failing)
        go_on.set()
        for each in (first, other):
            with pytest.raises(ValueError, match="no grammar"):
                each.result(10)
    assert cache.get(b"a", "key", Builds()).size_bytes == 10


def test_the_tenants_least_recently_used_entry_is_evicted() -> None:
    cache: CompiledCache[Grammar] = CompiledCache(1000, 30)
    for key in "abc":
        cache.get(b"t", key, Builds())
    cache.get(b"t", "a", refuse)
    cache.get(b"t", "d", Builds())
    for key in "acd":
        cache.get(b"t", key, refuse)
    again = Builds()
    cache.get(b"t", "b", again)
    assert again.count == 1


def test_a_tenant_that_fills_the_cache_evicts_its_own() -> None:
    cache: CompiledCache[Grammar] = CompiledCache(100, 90)
    for key in range(3):
        cache.get(b"modest", key, Builds())
    for key in range(100):
        cache.get(b"greedy", key, Builds())
    for key in range(3):
        cache.get(b"modest", key, refuse)
    assert cache.size_bytes <= 100


def test_what_is_too_large_is_not_kept() -> None:
    cache: CompiledCache[Grammar] = CompiledCache(100, 50)
    cache.get(b"a", "small", Builds(50))
    assert cache.get(b"a", "large", Builds(51)).size_bytes == 51
    cache.get(b"a", "small", refuse)
    assert cache.size_bytes == 50


requests = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 9), st.integers(1, 40)), max_size=60
)


@given(requests)
def test_no_tenant_within_its_fair_share_loses_to_another(requests: list[tuple[bytes, int, int]]) -> None:
    most = 100
    cache: CompiledCache[Grammar] = CompiledCache(most, most)
    held: dict[bytes, dict[int, int]] = {}
    for namespace, key, size in requests:
        sizes_before = {tenant: sum(keys.values()) for tenant, keys in held.items()}
        kept = cache.get(namespace, key, _remember(held, namespace, key, size)).size_bytes
        for tenant in [each for each in held if each != namespace]:
            if sizes_before[tenant] <= most / len({*held, namespace}):
                assert all(_has(cache, tenant, each) for each in held[tenant])
        held = {
            tenant: {each: bytes_ for each, bytes_ in keys.items() if _has(cache, tenant, each)}
            for tenant, keys in held.items()
        }
        held = {tenant: keys for tenant, keys in held.items() if keys}
        assert cache.size_bytes == sum(sum(keys.values()) for keys in held.values()) <= most
        assert kept == held.get(namespace, {}).get(key, kept)


def _remember(
    held: dict[bytes, dict[int, int]], namespace: bytes, key: int, size: int
) -> Callable[[], Grammar]:
    def build() -> Grammar:
        held.setdefault(namespace, {})[key] = size
        return Grammar(size)

    return build


class _Absent(Exception):
    pass


def _has(cache: CompiledCache[Grammar], namespace: bytes, key: int) -> bool:
    def absent() -> Grammar:
        raise _Absent

    try:
        cache.get(namespace, key, absent)
    except _Absent:
        return False
    return True
