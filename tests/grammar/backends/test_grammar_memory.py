"""The memory of compiled grammars: what grows while it decodes stays within its tenant's share, and no mask changes by it."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from tests.grammar.growing_grammars import (
    TENANT_BYTES,
    allowed_by,
    compiler_of,
    growing_grammar,
    walk,
    wordy_vocabulary,
)

from loraplex.grammar.backends import emit_llguidance, llguidance_mask
from loraplex.grammar.backends.grammar_memory import GrammarMemory
from loraplex.grammar.backends.llguidance_mask import CompiledLlguidance
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.errors import MatcherTooCostly
from loraplex.grammar.spec import GrammarSpec, encode_spec
from loraplex.grammar.tree import Literal, Pattern

TOKENS = 25
UNBOUNDED = 1 << 40


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return wordy_vocabulary()


def test_growing_grammars_of_one_tenant_stay_within_its_share() -> None:
    """Unbounded, each takes 9 MB by its 25th token."""
    command = [sys.executable, "-m", "tests.grammar.growing_grammars", "12", str(TOKENS)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert grown < 2.5 * TENANT_BYTES


@pytest.mark.parametrize(("tenant_bytes", "states"), [(UNBOUNDED, 4_000), (1 << 18, 50_000)])
def test_masks_are_the_same_on_a_new_build(vocabulary: Vocabulary, tenant_bytes: int, states: int) -> None:
    """Its lexer is full, or its tenant is above its share."""
    bounded = compiler_of(vocabulary, tenant_bytes, states).compile(b"tenant", growing_grammar(1))
    unbounded = compiler_of(vocabulary, UNBOUNDED, 50_000).compile(b"tenant", growing_grammar(1))
    families = {id(bounded.family): bounded.family}
    for step in range(TOKENS):
        allowed = allowed_by(bounded, vocabulary)
        assert allowed == allowed_by(unbounded, vocabulary)
        token_id = allowed[step * 7919 % len(allowed)]
        assert bounded.accept(token_id) and unbounded.accept(token_id)
        families[id(bounded.family)] = bounded.family
    assert len(families) > 1


def test_rows_of_one_grammar_continue_on_one_new_build(vocabulary: Vocabulary) -> None:
    compiler = compiler_of(vocabulary, UNBOUNDED, 4_000)
    rows = [compiler.compile(b"tenant", growing_grammar(1)) for _ in range(3)]
    first = rows[0].family
    for step in range(TOKENS):
        allowed = [allowed_by(row, vocabulary) for row in rows]
        assert allowed[0] == allowed[1] == allowed[2]
        for row in rows:
            assert row.accept(allowed[0][step * 7919 % len(allowed[0])])
    (family,) = {row.family for row in rows}
    assert family is not first
    assert compiler.compile(b"tenant", growing_grammar(1)).family is family


def test_a_mask_that_needs_too_many_states_fails_alone(vocabulary: Vocabulary) -> None:
    compiler = compiler_of(vocabulary, UNBOUNDED, 600)
    hostile, same, other = (
        compiler.compile(b"tenant", grammar)
        for grammar in (growing_grammar(1), growing_grammar(1), growing_grammar(2))
    )
    with pytest.raises(MatcherTooCostly, match="too many states"):
        walk(hostile, vocabulary, TOKENS, seed=0)
    for row in (same, other, compiler.compile(b"tenant", growing_grammar(1))):
        assert row.accept(allowed_by(row, vocabulary)[0])


def test_an_ordinary_grammar_is_built_once(vocabulary: Vocabulary) -> None:
    compiler = compiler_of(vocabulary)
    spec = encode_spec(GrammarSpec(backend="llguidance", source=emit_llguidance.emit(Literal("abc"))))
    masks = [compiler.compile(b"tenant", spec) for _ in range(3)]
    for mask in masks:
        while not mask.is_final():
            assert mask.accept(allowed_by(mask, vocabulary)[0])
    assert len({mask.family for mask in masks}) == 1


def pattern_spec(pattern: str) -> bytes:
    return encode_spec(GrammarSpec(backend="llguidance", source=emit_llguidance.emit(Pattern(pattern))))


def test_slow_masks_without_new_states_rebuild_nothing(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All masks count as slow. The first pass adds the few states there are."""
    monkeypatch.setattr(llguidance_mask, "WARM_S", 0.0)
    mask = compiler_of(vocabulary, 1 << 18).compile(b"tenant", pattern_spec("[a-z]{30}: [a-z]{20}"))
    families = {id(mask.family): mask.family}
    for _ in range(40):
        walk(mask, vocabulary, 4, seed=0)
        families[id(mask.family)] = mask.family
        mask.rollback(4)
    assert len(families) <= 8


def test_growth_by_quick_masks_counts(vocabulary: Vocabulary) -> None:
    mask = compiler_of(vocabulary).compile(b"tenant", pattern_spec("[aeiou]*a[aeiou]{22}"))
    family = mask.family
    assert isinstance(family, CompiledLlguidance)
    before = family.size_bytes
    walk(mask, vocabulary, 40, seed=0)
    assert family.size_bytes - before >= 40 * 7_000


def test_a_search_for_the_end_of_a_document_builds_nothing(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoding step waits for it."""
    source = emit_llguidance.emit(Pattern("[a-z]+;"))
    spec = encode_spec(GrammarSpec(backend="llguidance", source=source, close=True))
    mask = compiler_of(vocabulary).compile(b"tenant", spec)
    monkeypatch.setattr(mask.family, "is_outgrown", True)
    monkeypatch.setattr(CompiledLlguidance, "rebuilt", refuse)
    assert mask.closing_tokens(8)
    with pytest.raises(AssertionError, match="built again"):
        allowed_by(mask, vocabulary)


def refuse(compiled: CompiledLlguidance) -> CompiledLlguidance:
    raise AssertionError("built again")


@dataclass(eq=False)
class Grammar:
    size_bytes: int
    is_quickly_built: bool = True


def grown(memory: GrammarMemory, namespace: bytes, grammar: Grammar) -> bool:
    return memory.exceeds_share(namespace, grammar, 0)


def counted(memory: GrammarMemory, namespace: bytes, *sizes: int) -> list[Grammar]:
    grammars = [Grammar(size) for size in sizes]
    for grammar in grammars:
        memory.add(namespace, grammar)
    return grammars


def test_only_the_large_grammars_of_a_tenant_above_its_share_are_rebuilt() -> None:
    memory = GrammarMemory(1000, 100)
    large, small = counted(memory, b"a", 90, 20)
    (other,) = counted(memory, b"b", 90)
    assert grown(memory, b"a", large)
    assert not grown(memory, b"a", small)
    assert not grown(memory, b"b", other)


def test_a_tenant_within_its_share_is_left_alone_when_all_is_full() -> None:
    memory = GrammarMemory(100, 90)
    greedy = counted(memory, b"greedy", 40, 40)
    (modest,) = counted(memory, b"modest", 30)
    assert grown(memory, b"greedy", greedy[0])
    assert not grown(memory, b"modest", modest)


def test_a_grammar_that_takes_long_to_build_is_not_rebuilt() -> None:
    memory = GrammarMemory(1000, 100)
    (slow,) = counted(memory, b"a", 200)
    slow.is_quickly_built = False
    assert not grown(memory, b"a", slow)


def test_freed_grammars_no_longer_count() -> None:
    memory = GrammarMemory(1000, 100)
    (kept,) = counted(memory, b"a", 60)
    counted(memory, b"a", 60)
    assert memory.size_bytes(b"a") == 60
    assert not grown(memory, b"a", kept)
