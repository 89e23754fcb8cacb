"""Both masks against the contract that the engine has with them."""

import time
from typing import TYPE_CHECKING

import pytest
import torch

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.backends.bitmask import bits_of
from loraplex.grammar.backends.compiler import CompilerConfig, MaskCompiler
from loraplex.grammar.backends.llguidance_mask import LlguidanceLimits
from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.errors import GrammarInvalid, MatcherFailed, MatcherTooCostly
from loraplex.grammar.spec import Backend, GrammarSpec, encode_spec
from loraplex.grammar.tree import (
    Alternation,
    Concatenation,
    FreeText,
    JsonValue,
    Literal,
    Pattern,
    SpecialToken,
)

if TYPE_CHECKING:
    from tests.grammar.conftest import Backends

BOTH = pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
CLOSED = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@BOTH
def test_each_token_of_a_document_is_allowed_and_the_end_only_behind_it(
    backends: "Backends", backend: Backend
) -> None:
    mask = backends.mask(backend, JsonValue(CLOSED))
    ends = backends.vocabulary.end_token_ids
    for token_id in backends.tokens('{"city": "Paris \\" é", "days": 3}'):
        allowed = backends.allowed(mask)
        assert token_id in allowed
        assert not allowed & ends and not mask.is_complete() and not mask.is_final()
        assert mask.accept(token_id)
    assert backends.allowed(mask) == ends
    assert mask.is_complete() and mask.is_final()


@BOTH
def test_whole_but_not_final(backends: "Backends", backend: Backend) -> None:
    mask = backends.mask(backend, Pattern("[0-9]+"))
    assert mask.accept(backends.tokens("7")[0])
    assert mask.is_complete() and not mask.is_final()
    assert backends.allowed(mask) > backends.vocabulary.end_token_ids


@BOTH
def test_mask_and_accept_agree_on_every_token(backends: "Backends", backend: Backend) -> None:
    for text in ("", '{"ci', '{"city": "Pa', '{"city": "", "days": -'):
        mask = backends.mask(backend, JsonValue(CLOSED))
        for token_id in backends.tokens(text):
            assert mask.accept(token_id)
        allowed = backends.allowed(mask)
        accepted = {token for token in range(backends.vocabulary.vocab_size) if mask.fork().accept(token)}
        assert allowed == accepted


@BOTH
def test_control_tokens_and_padding_are_never_allowed_in_texts(
    backends: "Backends", backend: Backend
) -> None:
    vocabulary = backends.vocabulary
    never = set(vocabulary.special_tokens.values()) - vocabulary.end_token_ids
    never |= set(range(len(vocabulary.encoded_tokens), vocabulary.vocab_size))
    inside = backends.mask(backend, JsonValue({"type": "string"}))
    assert inside.accept(backends.tokens('"')[0])
    for mask in (inside, backends.mask(backend, FreeText())):
        allowed = backends.allowed(mask)
        assert not allowed & never and max(allowed) < vocabulary.vocab_size
        assert not any(mask.accept(token_id) for token_id in never)
        assert vocabulary.token_id("<tool_call>") in allowed


@BOTH
def test_a_named_control_token_is_allowed_where_it_stands(backends: "Backends", backend: Backend) -> None:
    calls = backends.vocabulary.special_tokens["[TOOL_CALLS]"]
    mask = backends.mask(backend, Concatenation((SpecialToken("[TOOL_CALLS]"), Literal("[x]"))))
    assert backends.allowed(mask) == {calls}
    assert mask.accept(calls)
    assert calls not in backends.allowed(mask)
    assert backends.accepts(mask, "[x]")


@BOTH
@pytest.mark.parametrize("name", ["<|end|>", "[NO_SUCH]"])
def test_end_tokens_and_unknown_tokens_cannot_be_named(
    backends: "Backends", backend: Backend, name: str
) -> None:
    with pytest.raises(GrammarInvalid, match="token"):
        backends.mask(backend, Concatenation((SpecialToken(name), Literal("x"))))


@BOTH
def test_rollback_and_fork(backends: "Backends", backend: Backend) -> None:
    mask = backends.mask(backend, JsonValue(CLOSED))
    tokens = backends.tokens('{"city": "a", "days": 1}')
    before = []
    for token_id in tokens:
        before.append(backends.allowed(mask))
        assert mask.accept(token_id)
    copy = mask.fork()
    for allowed in reversed(before[-3:]):
        mask.rollback(1)
        assert backends.allowed(mask) == allowed
    mask.rollback(len(tokens) - 3)
    assert backends.allowed(mask) == before[0]
    assert copy.is_final()
    assert backends.accepts(mask, '{"city":"b","days":22}')


@BOTH
def test_a_refused_token_changes_nothing(backends: "Backends", backend: Backend) -> None:
    mask = backends.mask(backend, JsonValue(CLOSED))
    allowed = backends.allowed(mask)
    for token_id in (
        backends.tokens("x")[0],
        backends.vocabulary.vocab_size - 1,
        min(backends.vocabulary.end_token_ids),
    ):
        assert not mask.accept(token_id)
    assert backends.allowed(mask) == allowed


@BOTH
def test_an_end_token_is_accepted_and_undone(backends: "Backends", backend: Backend) -> None:
    for end in sorted(backends.vocabulary.end_token_ids):
        mask = backends.mask(backend, Literal("ab"))
        for token_id in [*backends.tokens("ab"), end]:
            assert mask.accept(token_id)
        assert mask.is_complete()
        assert backends.allowed(mask) == backends.vocabulary.end_token_ids
        assert mask.forced_tokens() in ([], ())
        mask.rollback(1)
        assert mask.is_complete() and backends.allowed(mask) == backends.vocabulary.end_token_ids


@BOTH
def test_undoing_too_much_fails_this_matcher(backends: "Backends", backend: Backend) -> None:
    mask = backends.mask(backend, Literal("ab"))
    with pytest.raises(MatcherFailed):
        mask.rollback(5)


def test_a_grammar_whose_work_is_spent_says_so() -> None:
    vocabulary = byte_vocabulary()
    limits = CompilerConfig(llguidance=LlguidanceLimits(step_lexer_fuel=100))
    source = emit_llguidance.emit(Pattern("(a|b)*a(a|b){12}"))
    spec = encode_spec(GrammarSpec(backend="llguidance", source=source))
    mask = MaskCompiler(vocabulary, limits).compile(b"n", spec)
    bitmask = torch.zeros((1, vocabulary.bitmask_words), dtype=torch.int32)
    with pytest.raises(MatcherTooCostly) as spent:
        for token_id in vocabulary.text_tokenizer.encode("ab" * 9, add_special_tokens=False).ids:
            mask.fill(bitmask, 0)
            mask.accept(token_id)
    assert isinstance(spent.value, TimeoutError)


@BOTH
def test_forced_tokens_are_those_of_the_tokenizer(backends: "Backends", backend: Backend) -> None:
    text = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    mask = backends.mask(backend, Literal(text))
    forced = list(mask.forced_tokens())
    expected = backends.tokens(text)
    assert len(forced) >= len(expected) - 2
    assert forced == expected[: len(forced)]
    assert all(mask.accept(token_id) for token_id in forced)


@BOTH
@pytest.mark.parametrize("options", [("a€😀x", "b"), ("é", "è"), ("😀😀", "😀😂")])
def test_letters_of_several_bytes_force_nothing_wrong(
    backends: "Backends", backend: Backend, options: tuple[str, str]
) -> None:
    for option in options:
        mask = backends.mask(backend, Alternation(tuple(map(Literal, options))), close=True)
        for token_id in backends.tokens(option):
            forced, walker = mask.forced_tokens(), mask.fork()
            assert all(map(walker.accept, forced))
            assert mask.closing_tokens(20)
            assert mask.accept(token_id)
        assert mask.is_complete()


@BOTH
def test_no_forced_tokens_where_the_request_wants_none(backends: "Backends", backend: Backend) -> None:
    mask = backends.mask(backend, Literal("ab"))
    emit = (emit_llguidance if backend == "llguidance" else emit_xgrammar).emit
    spec = GrammarSpec(backend=backend, source=emit(Literal("ab")), fast_forward=False)
    unhurried = backends.compiler.compile(b"tenant", encode_spec(spec))
    assert mask.forced_tokens() and not unhurried.forced_tokens() and not unhurried.fork().forced_tokens()


@BOTH
def test_only_a_request_that_asked_is_closed(backends: "Backends", backend: Backend) -> None:
    assert backends.mask(backend, Literal("ab")).closing_tokens(9) is None
    closing = backends.mask(backend, Literal("ab"), close=True)
    assert closing.closes and closing.fork().closes
    assert closing.closing_tokens(9) == backends.tokens("ab")


@BOTH
def test_a_bitmask_of_another_width_is_refused(backends: "Backends", backend: Backend) -> None:
    mask = backends.mask(backend, Literal("ab"))
    words = backends.vocabulary.bitmask_words
    for rows, columns, row in ((1, words - 1, 0), (1, words + 1, 0), (2, words, 2), (2, words, -1)):
        with pytest.raises(ValueError, match="bitmask"):
            mask.fill(torch.zeros((rows, columns), dtype=torch.int32), row)


@BOTH
@pytest.mark.parametrize("regex", ["(", "a(?=b)", "[z-a]"])
def test_a_message_names_no_file_and_quotes_no_source(
    backends: "Backends", backend: Backend, regex: str
) -> None:
    with pytest.raises(GrammarInvalid) as raised:
        backends.mask(backend, Pattern(regex))
    message = str(raised.value)
    assert message and ".cc:" not in message and "/project" not in message and " | " not in message


def test_bits() -> None:
    assert bits_of({0, 31, 33}, 2).tolist() == [1 - 2**31, 2]


def test_whether_a_document_is_final_costs_no_second_slow_mask(backends: "Backends") -> None:
    """The decoding step of everybody waits for the answer, unlike for a mask."""
    ambiguous = emit_xgrammar.ebnf_source('root ::= s\ns ::= "" | [a-z ] s | s s')
    mask = backends.from_source("xgrammar", ambiguous)
    bitmask = torch.empty((1, backends.vocabulary.bitmask_words), dtype=torch.int32)
    filled = 0.0
    for token_id in backends.tokens("the quick brown fox jumps over the lazy dog " * 3):
        began = time.thread_time()
        mask.fill(bitmask, 0)
        filled = time.thread_time() - began
        assert mask.accept(token_id)
        if filled > 0.02:
            break
    began = time.thread_time()
    assert mask.is_complete() and not mask.is_final()
    assert time.thread_time() - began < filled / 2
