"""Random walks through the compiled grammar of every style: whatever it allows, the parser parses."""

import json
import random
from collections.abc import Iterator
from functools import cache

import jsonschema_rs
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.replayed_mask import AnswerMask
from loraplex.grammar.backends.vocabulary import Vocabulary, byte_vocabulary
from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.parsing.deltas import ArgumentsDelta, ContentDelta, OutputDelta, ToolCallStart
from loraplex.grammar.parsing.tool_call_parser import ToolCallFormat, ToolCallParser, ToolCallPlacement
from loraplex.grammar.spec import Backend, GrammarSpec, encode_spec
from loraplex.grammar.tools.call_syntax import ToolStyle, syntax_of
from loraplex.grammar.tools.call_tree import calls_tree, text_or_calls_tree
from loraplex.grammar.tree import Alternation, JsonValue, Node

CONTROL_TOKENS = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<|python_tag|>")
SCHEMAS: dict[str, JsonSchemaValue] = {
    "get": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    "get_weather": {
        "type": "object",
        "properties": {"b": {"type": "array", "items": {"type": "integer"}}},
        "additionalProperties": False,
    },
}
ANSWER: JsonSchemaValue = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
MODES = ("auto", "required", "beside an answer")
FAVOURITES = '"{}[]<>\\,: \nabtool_c/'


@cache
def vocabulary(with_control_tokens: bool) -> Vocabulary:
    plain = byte_vocabulary()
    if not with_control_tokens:
        return plain
    tokenizer = Tokenizer.from_str(plain.tokenizer_json)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL_TOKENS])
    return Vocabulary(
        tokenizer.to_str(), tokenizer.get_vocab_size(with_added_tokens=True), plain.end_token_ids
    )


@cache
def compiler(with_control_tokens: bool) -> MaskCompiler:
    return MaskCompiler(vocabulary(with_control_tokens))


def tree_of(style: ToolStyle, mode: str, parallel: bool, control_tokens: tuple[str, ...]) -> Node:
    syntax = syntax_of(style, beside_json=mode == "beside an answer")
    calls = calls_tree(syntax, SCHEMAS, parallel=parallel, control_tokens=control_tokens)
    match mode:
        case "auto":
            return text_or_calls_tree(syntax, calls)
        case "required":
            return calls
    return Alternation((calls, JsonValue(ANSWER)))


def format_of(style: ToolStyle, mode: str) -> ToolCallFormat:
    syntax = syntax_of(style, beside_json=mode == "beside an answer")
    if mode == "auto" and syntax.marker is not None:
        placement = ToolCallPlacement.FOLLOW_TEXT
    else:
        placement = ToolCallPlacement.BE_ALL if mode == "required" else ToolCallPlacement.REPLACE_TEXT
    return ToolCallFormat(syntax, placement, dict.fromkeys(SCHEMAS))


def mask_of(tree: Node, backend: Backend, with_control_tokens: bool) -> AnswerMask:
    emit = emit_llguidance.emit if backend == "llguidance" else emit_xgrammar.emit
    spec = GrammarSpec(backend=backend, source=emit(tree), close=True)
    return compiler(with_control_tokens).compile(b"tenant", encode_spec(spec))


def allowed_tokens(mask: AnswerMask, words: int) -> list[int]:
    bitmask = torch.zeros((1, words), dtype=torch.int32)
    mask.fill(bitmask, 0)
    bits = bitmask[0].tolist()
    return [word * 32 + bit for word in range(words) for bit in range(32) if bits[word] >> bit & 1]


def walk(mask: AnswerMask, of: Vocabulary, chance: random.Random, begins: str, steps: int) -> Iterator[int]:
    """Token ids of a whole answer, at first along `begins` if the grammar lets it, random for some steps, then closed."""
    favourites = {token for letter in FAVOURITES for token in of.tokenizer.encode(letter).ids}
    towards = of.tokenizer.encode(begins, add_special_tokens=False).ids
    for step in range(steps):
        if mask.is_final():
            return
        allowed = allowed_tokens(mask, of.bitmask_words)
        likely = [token for token in allowed if token in favourites]
        if step < len(towards) and towards[step] in allowed:
            token = towards[step]
        else:
            token = chance.choice(likely if likely and chance.random() < 0.7 else allowed)
        if token in of.end_token_ids:
            return
        assert mask.accept(token)
        yield token
    closing = mask.closing_tokens(2_000)
    assert closing is not None
    yield from closing


def unexpected(schema: str, value: str) -> None:
    raise AssertionError("the grammar holds every schema here")


def read(of: ToolCallFormat, deltas: list[str]) -> tuple[list[OutputDelta], str]:
    reader = ToolCallParser(of, unexpected, call_id=lambda: "id")
    deltas_read = [piece for delta in deltas for piece in reader.feed(delta)]
    rest, reason = reader.finish("stop")
    return deltas_read + rest, reason


def check(deltas_read: list[OutputDelta], reason: str, mode: str, parallel: bool, text: str) -> None:
    content = "".join(piece.text for piece in deltas_read if isinstance(piece, ContentDelta))
    names = [piece.name for piece in deltas_read if isinstance(piece, ToolCallStart)]
    assert reason == ("tool_calls" if names else "stop")
    assert parallel or len(names) <= 1
    assert names or mode != "required"
    assert not names or mode == "auto" or not content
    for index, name in enumerate(names):
        arguments = "".join(p.text for p in deltas_read if isinstance(p, ArgumentsDelta) and p.index == index)
        assert arguments in text
        assert jsonschema_rs.is_valid(SCHEMAS[name], json.loads(arguments))
    if not names and mode == "beside an answer":
        assert jsonschema_rs.is_valid(ANSWER, json.loads(content))
    if not names and mode == "auto":
        assert content == text


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("style", ToolStyle)
def test_what_the_grammar_allows_is_what_is_read(style: ToolStyle, mode: str, backend: Backend) -> None:
    with_calls = 0
    for seed in range(24):
        chance = random.Random(seed)
        parallel, as_tokens = chance.random() < 0.7, chance.random() < 0.5
        of = vocabulary(as_tokens)
        tree = tree_of(style, mode, parallel, CONTROL_TOKENS if as_tokens else ())
        syntax = format_of(style, mode).syntax
        begins = chance.choice(
            ["", syntax.beginning + "get", '{"name": "get', syntax.head("get_weather") + "{}"]
        )
        mask = mask_of(tree, backend, as_tokens)
        ids = list(walk(mask, of, chance, begins, chance.choice([20, 80, 150])))
        text = of.tokenizer.decode(ids, skip_special_tokens=False)
        whole = read(format_of(style, mode), [text])
        check(*whole, mode, parallel, text)
        with_calls += any(isinstance(piece, ToolCallStart) for piece in whole[0])
        joined = [read(format_of(style, mode), list(text))]
        check(*joined[0], mode, parallel, text)
    assert with_calls >= 4


def added_as_text(token: str) -> Vocabulary:
    """A tokenizer in which the marker is one token, yet no control token: so it is in Qwen's."""
    plain = byte_vocabulary()
    tokenizer = Tokenizer.from_str(plain.tokenizer_json)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return Vocabulary(
        tokenizer.to_str(), tokenizer.get_vocab_size(with_added_tokens=True), plain.end_token_ids
    )


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("mode", MODES)
def test_a_marker_that_is_one_text_token_may_be_written_as_one(mode: str, backend: Backend) -> None:
    of = added_as_text("<tool_call>")
    emit = emit_llguidance.emit if backend == "llguidance" else emit_xgrammar.emit
    spec = GrammarSpec(backend=backend, source=emit(tree_of(ToolStyle.HERMES, mode, True, ())))
    mask = MaskCompiler(of).compile(b"tenant", encode_spec(spec))
    ids = of.tokenizer.encode('<tool_call>\n{"name": "get", "arguments": {"a": ""}}\n</tool_call>').ids
    assert of.encoded_tokens[ids[0]] == "<tool_call>"
    for token in ids:
        assert token in allowed_tokens(mask, of.bitmask_words)
        assert mask.accept(token)
    assert mask.is_complete()
