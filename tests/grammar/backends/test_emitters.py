"""One tree, two backends, one language: each sample text is accepted by both or refused by both, at the same character."""

import json
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.spec import Backend, GrammarSpec, encode_spec
from loraplex.grammar.tree import (
    Alternation,
    Concatenation,
    FreeText,
    JsonValue,
    Literal,
    Node,
    Pattern,
    Separated,
    SpecialToken,
    Triggered,
)

if TYPE_CHECKING:
    from tests.grammar.conftest import Backends

BACKENDS: tuple[Backend, Backend] = ("llguidance", "xgrammar")
COMPILER = MaskCompiler(byte_vocabulary())
TOKENIZER = byte_vocabulary().tokenizer
TOKENIZER.encode_special_tokens = True

WITHOUT_CONTROL = {code: "_" for code in (*range(32), 127)}

OBJECT: dict[str, Any] = {"type": "object"}
INTEGER: dict[str, Any] = {"type": "integer"}
CLOSED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": INTEGER, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}


def call(*names: str) -> Node:
    """`<t>{"name": "f", "arguments": {}}</t>`"""
    named = tuple(
        Concatenation((Literal(name + '", "arguments": '), JsonValue(OBJECT, "compact"))) for name in names
    )
    return Concatenation((Literal('<t>{"name": "'), Alternation(named), Literal("}</t>")))


def token_call() -> Node:
    calls = Separated(JsonValue(OBJECT), ", ")
    return Concatenation((SpecialToken("[TOOL_CALLS]"), Literal("["), calls, Literal("]")))


F = '<t>{"name": "f", "arguments": {}}</t>'
G = '<t>{"name": "g h", "arguments": {"x":[1]}}</t>'

# tree, texts that are whole documents, texts that are not
CASES: list[tuple[Node, list[str], list[str]]] = [
    (Literal("ab"), ["ab"], ["", "a", "abc", "ba"]),
    (Alternation((Literal("ab"), Literal("abc"), Literal("x"))), ["ab", "abc", "x"], ["", "a", "abx"]),
    (Concatenation((Literal("a"), Literal("b"))), ["ab"], ["a", "b"]),
    (Pattern("[a-z]+"), ["a", "xyz"], ["", "A"]),
    (Pattern("a/b\\/c"), ["a/b/c"], ["a/b\\/c"]),
    (Pattern("^(a|b)$"), ["a", "b"], ["ab"]),
    (Pattern(""), [""], ["a"]),
    (Pattern("a\nb"), ["a\nb"], ["a b"]),
    (Concatenation((Pattern("[a-z]+"), Literal("x"))), ["ax", "xx", "axbx"], ["x", "ab"]),
    (
        JsonValue(OBJECT),
        ["{}", '{ "a" : [ 1 , {"b":null} ] }', '{\n  "a": 1\n}'],
        ["[]", " {}", "{} ", '{"a"'],
    ),
    (
        JsonValue(OBJECT, "compact"),
        ["{}", '{"a":[1,{"b":2,"c":"x y"}]}'],
        ["{ }", '{"a": 1}', '{"a":[1, 2]}'],
    ),
    (
        JsonValue(CLOSED),
        ['{"a":1}', '{"a": 1, "b": "x"}'],
        ["{}", '{"b": "x"}', '{"a": 1, "c": 1}', '{"a":1,}'],
    ),
    (
        JsonValue({"type": "object", "properties": {"a": INTEGER}}),
        ["{}", '{"a": 1, "z": []}', '{"z": 1}'],
        ['{"a": ""}'],
    ),
    (JsonValue(True), ["1", '"x"', "[true]", "null"], ["", "nul"]),
    (FreeText(), ["", "a\n€", "<t>"], []),
    (FreeText(("<t>", "q")), ["", "a<t", "<<"], ["a<t>", "q", "<t>b"]),
    (
        Concatenation((FreeText(("</s>",)), Literal("</s>"), JsonValue(INTEGER))),
        ["a</s>1", "</s>0"],
        ["1", "a</s>", "</s></s>1"],
    ),
    (Separated(Literal("a"), ", "), ["a", "a, a"], ["", "a,a", "a, "]),
    (Separated(Literal("a"), ", ", 0, 2), ["", "a", "a, a"], ["a, a, a", "a, "]),
    (Separated(Literal("a"), "", 2, 3), ["aa", "aaa"], ["a", "aaaa"]),
    (Separated(JsonValue(OBJECT), "; ", 0, 1), ["", "{}"], ["{}; {}"]),
    (Separated(JsonValue(OBJECT), "", 0, 2), ["", "{}", "{}{}"], ["{}{}{}"]),
    (Separated(call("f"), "\n", 1, None), [F, f"{F}\n{F}"], ["", F + "\n", F + F]),
    (Separated(call("f"), "\n", 2, 3), [f"{F}\n{F}", f"{F}\n{F}\n{F}"], [F, f"{F}\n{F}\n{F}\n{F}"]),
    (
        Triggered("<t>", call("f", "g h")),
        ["", "a<t", F, f"a{G}b{F}c<", f"{F}{F}"],
        ["<t>", "a<t>x", F[:-1], F + "<t>"],
    ),
    (Triggered("<t>", call("f"), most=1), ["", "<t", F, f"a{F}b<t"], [F + "<t>", F + F]),
    (Triggered("<t>", call("f"), most=2), ["", f"a{F}b{F}c"], [F + F + "<t>"]),
    (Triggered("<t>", call("f"), most=0), ["", "a"], ["<t>", F]),
    (Triggered("<t>", call("f"), most=1, ends=True), ["", "a<", F, "a" + F], [F + "b", F + F]),
    (
        Triggered("<t>", Separated(call("f"), "\n"), most=1, ends=True),
        ["a", F, f"a{F}\n{F}"],
        [F + "\n", F + F],
    ),
    (Triggered("<t>", Separated(call("f"), "\n", 1, 1), most=1, ends=True), ["a", F], [f"{F}\n{F}"]),
    (
        Triggered("[TOOL_CALLS]", token_call(), most=1, ends=True),
        ["", "a[", "[TOOL_CALLS][{}, {}]"],
        ["[TOOL_CALLS]", "[TOOL_CALLS][{}]b"],
    ),
    (Triggered("[TOOL_CALLS]", token_call()), ["a[TOOL_CALLS][{}]b[TOOL_CALLS][{}]", "x"], ["[TOOL_CALLS]x"]),
    (
        Triggered("[TOOL_CALLS]", token_call(), most=1),
        ["a[TOOL_CALLS][{}]b", "x"],
        ["[TOOL_CALLS][{}][TOOL_CALLS][{}]"],
    ),
    (
        Alternation((JsonValue(CLOSED), Separated(call("f"), "\n"))),
        ['{"a":1}', F, f"{F}\n{F}"],
        ["a", "<t>{}", ""],
    ),
    (
        Alternation(
            (
                JsonValue({"type": "array"}),
                Concatenation((Literal("[CALLS]["), JsonValue(OBJECT), Literal("]"))),
            )
        ),
        ['["a"]', "[ 1]", "[CALLS][{}]", "[]"],
        ["[CALLS]", "[CALLS][1]"],
    ),
]


@pytest.mark.parametrize(("tree", "whole", "others"), CASES)
def test_both_backends_accept_the_same_language(
    backends: "Backends", tree: Node, whole: list[str], others: list[str]
) -> None:
    masks = {backend: backends.mask(backend, tree) for backend in BACKENDS}
    for text in whole + others:
        verdicts = {backend: backends.accepts(mask, text) for backend, mask in masks.items()}
        assert verdicts == dict.fromkeys(BACKENDS, text in whole), text


@pytest.mark.parametrize(("tree", "whole", "others"), CASES)
def test_both_backends_stop_at_the_same_byte(tree: Node, whole: list[str], others: list[str]) -> None:
    if isinstance(tree, Triggered) and tree.trigger == "[TOOL_CALLS]":
        pytest.skip("the byte vocabulary has no control tokens")
    sources = {"llguidance": emit_llguidance.emit(tree), "xgrammar": emit_xgrammar.emit(tree)}
    for text in whole + others:
        assert len({_accepted_bytes(backend, sources[backend], text) for backend in BACKENDS}) == 1, text


nasty = st.text(
    st.one_of(
        st.sampled_from("\"\\\n\r\t/%@#<>[]{}()|&~*+?.:;=$^-`' \x00\x7f\x85\u2028€😀ab"),
        st.characters(exclude_categories=["Cs"]),
    ),
    min_size=1,
    max_size=12,
)
SYNTAX = [
    '"',
    '" | "b',
    "a\nstart: /.*/",
    "%json {}",
    "<|end|>",
    "<[0]>",
    "${x}",
    "@other",
    "\\",
    "\\u0041",
    '{"type": "any_text"}',
    "/.*/",
    "// control tokens: []",
    "\x7f",
    "rule_0",
]


@settings(max_examples=60, deadline=None)
@given(st.lists(nasty, min_size=1, max_size=4, unique=True), nasty)
def test_a_choice_of_any_texts_is_exactly_these_texts(options: list[str], other: str) -> None:
    _check_choice(options, other)


@pytest.mark.parametrize("text", SYNTAX)
def test_syntax_of_either_backend_is_only_text(text: str) -> None:
    _check_choice([text, text + text], text + "a")


@settings(max_examples=30, deadline=None)
@given(nasty, nasty)
def test_any_text_can_be_a_trigger_and_what_free_text_lacks(trigger: str, text: str) -> None:
    tree = Triggered(
        trigger, Concatenation((Literal(trigger), JsonValue(INTEGER, "compact"))), most=1, ends=True
    )
    for backend, emit in zip(BACKENDS, (emit_llguidance.emit, emit_xgrammar.emit), strict=True):
        assert _is_whole(backend, emit(tree), trigger + "17")
        assert _is_whole(backend, emit(FreeText((trigger,))), text) is (trigger not in text)


@settings(max_examples=20, deadline=None)
@given(st.lists(nasty, min_size=1, max_size=3, unique=True))
def test_any_text_can_be_a_name_in_a_schema(names: list[str]) -> None:
    names = [name.translate(WITHOUT_CONTROL) or "a" for name in names]
    schema = {"type": "object", "properties": {name: {"const": name} for name in names}}
    document = json.dumps({name: name for name in names}, ensure_ascii=False)
    source = emit_llguidance.emit(
        JsonValue({**schema, "required": list(dict.fromkeys(names)), "x-guidance": {"lenient": True}})
    )
    assert _is_whole("llguidance", source, document)


def test_where_nothing_can_follow_the_mask_is_empty() -> None:
    bitmask = torch.ones((1, byte_vocabulary().bitmask_words), dtype=torch.int32)
    for backend, source in (
        ("llguidance", emit_llguidance.emit(JsonValue({"$ref": "#"}))),
        ("xgrammar", emit_xgrammar.emit(JsonValue({"$ref": "#"}))),
    ):
        spec = GrammarSpec(backend=cast(Backend, backend), source=source)
        try:
            COMPILER.compile(b"t", encode_spec(spec)).fill(bitmask, 0)
        except GrammarInvalid:
            continue
        assert not bitmask.any()


def test_options_of_a_tenant_are_replaced() -> None:
    schema = {"not": {"type": "object"}, "x-guidance": {"lenient": True}}
    with pytest.raises(GrammarInvalid, match="not"):
        COMPILER.compile(
            b"t",
            encode_spec(GrammarSpec(backend="llguidance", source=emit_llguidance.emit(JsonValue(schema)))),
        )


@pytest.mark.parametrize("emit", [emit_llguidance.emit, emit_xgrammar.emit])
def test_half_of_a_surrogate_pair_is_refused(emit: Any) -> None:
    with pytest.raises(GrammarInvalid, match="surrogate"):
        emit(Alternation((Literal("a\ud800"), Literal("b"))))


def test_a_regular_expression_cannot_leave_its_slashes() -> None:
    with pytest.raises(GrammarInvalid, match="backslash"):
        emit_llguidance.emit(Pattern("a\\"))


@pytest.mark.parametrize("emit", [emit_llguidance.emit, emit_xgrammar.emit])
def test_a_part_must_begin_with_its_trigger(emit: Any) -> None:
    for part in (Literal("x"), Concatenation(()), JsonValue(OBJECT), Separated(Literal("<t>"), "", 0)):
        with pytest.raises(GrammarInvalid, match="begin with it"):
            emit(Triggered("<t>", part))


def test_blanks_are_bounded() -> None:
    for backend, emit in zip(BACKENDS, (emit_llguidance.emit, emit_xgrammar.emit), strict=True):
        source = emit(JsonValue(OBJECT))
        assert _is_whole(backend, source, "{\n" + " " * 31 + "}")
        assert not _is_whole(backend, source, "{\n" + " " * 33 + "}")


def test_blank_lines_do_not_fill_an_answer() -> None:
    source = emit_llguidance.emit(JsonValue(OBJECT))
    assert _is_whole("llguidance", source, "{ }")
    assert not _is_whole("llguidance", source, "{\n\n}")
    assert not _is_whole("llguidance", source, "{  }")


@pytest.mark.parametrize(
    ("whitespace", "whole", "other"),
    [
        ("spaced", '{"a": [1, {"b": 2}], "c": 3}', '{"a":[1,{"b":2}],"c":3}'),
        ("compact", '{"a":[1,{"b":2}],"c":3}', '{"a": [1, {"b": 2}], "c": 3}'),
    ],
)
def test_blanks_that_are_fixed(whitespace: Any, whole: str, other: str) -> None:
    for backend, emit in zip(BACKENDS, (emit_llguidance.emit, emit_xgrammar.emit), strict=True):
        source = emit(JsonValue({"type": "object"}, whitespace))
        assert _is_whole(backend, source, whole), backend
        assert not _is_whole(backend, source, other), backend
        assert not _is_whole(backend, source, '{\n"a": 1}'), backend


@pytest.mark.parametrize(
    ("backend", "source", "whole", "other"),
    [
        ("llguidance", emit_llguidance.lark_source('start: "a" B\nB: /[0-9]/'), "a1", "ab"),
        ("xgrammar", emit_xgrammar.ebnf_source('root ::= "a" b\nb ::= [0-9]'), "a1", "ab"),
        (
            "xgrammar",
            emit_xgrammar.structural_tag_source(
                {"type": "structural_tag", "format": {"type": "regex", "pattern": "a[0-9]"}}
            ),
            "a1",
            "ab",
        ),
    ],
)
def test_sources_of_a_tenant(backend: Backend, source: str, whole: str, other: str) -> None:
    assert _is_whole(backend, source, whole) and not _is_whole(backend, source, other)


@pytest.mark.parametrize(
    "text", ["start: <|end|>", "start: <[0-300]>", "start: <[*]>", "start: <[256]>", "start: <none>"]
)
def test_lark_of_a_tenant_names_no_end_token(text: str) -> None:
    with pytest.raises(GrammarInvalid, match="cannot name the token"):
        COMPILER.compile(
            b"t", encode_spec(GrammarSpec(backend="llguidance", source=emit_llguidance.lark_source(text)))
        )


@pytest.mark.parametrize("text", ['start: "<|end|>"', "start: /<x>/ // <|end|>", "# <[1]>\nstart: /\\/<y>/"])
def test_lark_of_a_tenant_may_spell_them(text: str) -> None:
    COMPILER.compile(
        b"t", encode_spec(GrammarSpec(backend="llguidance", source=emit_llguidance.lark_source(text)))
    )


@pytest.mark.parametrize(
    "tag",
    [
        {},
        {"type": "structural_tag"},
        {"type": "other", "format": {}},
        {"type": "structural_tag", "format": []},
    ],
)
def test_a_structural_tag_has_a_format(tag: dict[str, Any]) -> None:
    with pytest.raises(GrammarInvalid, match="structural tag"):
        emit_xgrammar.structural_tag_source(tag)


def _check_choice(options: list[str], other: str) -> None:
    tree = Alternation(tuple(map(Literal, options)))
    for backend, emit in zip(BACKENDS, (emit_llguidance.emit, emit_xgrammar.emit), strict=True):
        source = emit(tree)
        assert all(_is_whole(backend, source, option) for option in options)
        assert _is_whole(backend, source, other) is (other in options)


def _accepted_bytes(backend: Backend, source: str, text: str) -> tuple[int, bool]:
    mask = COMPILER.compile(b"tenant", encode_spec(GrammarSpec(backend=backend, source=source)))
    count = 0
    for token_id in TOKENIZER.encode(text).ids:
        if not mask.accept(token_id):
            break
        count += 1
    return count, mask.is_complete()


def _is_whole(backend: Backend, source: str, text: str) -> bool:
    return _accepted_bytes(backend, source, text) == (len(text.encode()), True)
