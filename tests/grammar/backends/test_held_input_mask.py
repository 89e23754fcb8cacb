"""Inputs of custom tools under their grammars, inside the JSON string of a call: each output is a call whose input the grammar reads."""

import json
import random
from functools import cache

import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.escaped_vocabulary import unescaped
from loraplex.grammar.backends.llguidance_tokenizer import llguidance_tokenizer
from loraplex.grammar.backends.replayed_mask import AnswerMask
from loraplex.grammar.backends.vocabulary import Vocabulary, byte_vocabulary
from loraplex.grammar.builder.output_plan import OutputPlan, plan_output
from loraplex.grammar.constraints import ContextFreeGrammar, OutputConstraints, Regex, SchemaLimits, Tool
from loraplex.grammar.errors import GrammarTooLarge
from loraplex.grammar.parsing.deltas import ArgumentsDelta, ContentDelta, ToolCallStart
from loraplex.grammar.spec import encode_spec
from loraplex.grammar.tools.call_syntax import ToolStyle

PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change_line*
filename: /(.{1,9})/
add_line: "+" /(.{0,9})/ LF -> line
change_line: ("+" | "-" | " ") /(.{0,9})/ LF
%import common.LF
"""
NESTED = 'start: pair\npair: "[" (pair | WORD)* "]"\nWORD: /["\\\\\\n\\tx\u00e9]{1,3}/'
FORMATS: dict[str, ContextFreeGrammar | Regex] = {
    "patch": ContextFreeGrammar(PATCH),
    "nested": ContextFreeGrammar(NESTED),
    "regex": Regex(r'(\d{2}"|\\\n){1,4}'),
}


def tools() -> tuple[Tool, ...]:
    held = [
        Tool(name, "", PARAMETERS, False, f"tools[{i}]", each)
        for i, (name, each) in enumerate(FORMATS.items())
    ]
    plain = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    return (*held, Tool("plain", "", plain, False, "tools[3]"))


@cache
def compiler_of(vocabulary: Vocabulary) -> MaskCompiler:
    return MaskCompiler(vocabulary)


@pytest.fixture(scope="module", params=["bytes", "words"])
def words(request: pytest.FixtureRequest, vocabulary: Vocabulary) -> Vocabulary:
    """Of single bytes, or with tokens such as `\\n` and `": "`."""
    if request.param == "bytes":
        return byte_vocabulary()
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
    tokenizer.add_tokens([r"\n", r"\"", r"\\", r"\n+", '"}', '": "', '"*** ', r"\u00e9"])
    return Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size() + 3, vocabulary.end_token_ids)


def plan_of(style: ToolStyle, choice: str = "required", only: str | None = None) -> OutputPlan:
    offered = tuple(tool for tool in tools() if only in (None, tool.name))
    constraints = OutputConstraints(tools=offered, tool_choice="required" if choice == "required" else "auto")
    return plan_output(constraints, style, limits=SchemaLimits())


def walk(
    mask: AnswerMask, vocabulary: Vocabulary, chance: random.Random, most: int = 900
) -> list[int] | None:
    tokens: list[int] = []
    while len(tokens) < most:
        bitmask = torch.zeros((1, vocabulary.bitmask_words), dtype=torch.int32)
        mask.fill(bitmask, 0)
        row = bitmask[0].tolist()
        here = [i for i in range(vocabulary.vocab_size) if row[i // 32] >> (i % 32) & 1]
        assert here
        usable = [i for i in here if i not in vocabulary.end_token_ids and vocabulary.token_bytes[i]]
        if mask.is_complete() and (not usable or chance.random() < 0.5):
            return tokens
        closing = [i for i in usable if vocabulary.token_bytes[i][:1] in (b'"', b"]", b"*")]
        token = chance.choice(closing if closing and chance.random() < 0.4 else usable)
        assert mask.accept(token)
        tokens.append(token)
    return None


@cache
def reader(text: str) -> LLMatcher:
    grammar = text if text.startswith(("start", "\n")) else LLMatcher.grammar_from_regex(text)
    return LLMatcher(llguidance_tokenizer(byte_vocabulary()), grammar, log_level=0)


def reads(given: ContextFreeGrammar | Regex, text: str) -> bool:
    """Whether the library itself, on bytes, reads the text to its end."""
    matcher = reader(given.text if isinstance(given, ContextFreeGrammar) else given.pattern).deep_copy()
    letters = byte_vocabulary().token_bytes
    ids = [letters.index(bytes([byte])) for byte in text.encode()]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("style", list(ToolStyle))
def test_random_calls(words: Vocabulary, style: ToolStyle) -> None:
    plan, chance = plan_of(style), random.Random(style)
    assert plan.spec is not None and len(plan.spec.inputs) == 3
    mask, inputs = compiler_of(words).compile(b"tenant", encode_spec(plan.spec)), 0
    for _ in range(25):
        tokens = walk(mask.fork(), words, chance)
        if tokens is None:
            continue
        text = b"".join(words.token_bytes[token] for token in tokens).decode()
        parser = plan.parser(lambda *_: None)
        deltas = [*parser.feed(text), *parser.finish("stop")[0]]
        assert not any(isinstance(delta, ContentDelta) for delta in deltas)
        names = [delta.name for delta in deltas if isinstance(delta, ToolCallStart)]
        for index, name in enumerate(names):
            arguments = "".join(d.text for d in deltas if isinstance(d, ArgumentsDelta) and d.index == index)
            if name != "plain":
                inputs += 1
                given = json.loads(arguments)["input"]
                assert reads(FORMATS[name], given), (name, given)
    assert inputs > 8


def test_a_patch_is_written_whole(words: Vocabulary) -> None:
    plan = plan_of(ToolStyle.HERMES, only="patch")
    assert plan.spec is not None
    mask = compiler_of(words).compile(b"tenant", encode_spec(plan.spec))
    patch = '*** Begin Patch\n*** Add File: a"b.py\n+x = "\\n"\n*** End Patch'
    call = f'<tool_call>\n{{"name": "patch", "arguments": {{"input": {json.dumps(patch)}}}}}\n</tool_call>'
    letters = {data: token for token, data in enumerate(words.token_bytes) if len(data) == 1}

    def spelled(text: str) -> list[int]:
        return [letters[bytes([byte])] for byte in text.encode()]

    whole = mask.fork()
    assert all(map(whole.accept, spelled(call))) and whole.is_complete()
    for wrong in (
        "*** Begin Patch\n*** End Patch",
        "x",
        "*** Begin Patch\n*** Add File: a\n-x\n*** End Patch",
    ):
        fork = mask.fork()
        assert not all(map(fork.accept, spelled(call.replace(json.dumps(patch), json.dumps(wrong)))))
    mask_back = mask.fork()
    tokens = spelled(call)
    assert all(map(mask_back.accept, tokens[:80]))
    mask_back.rollback(30)
    assert all(map(mask_back.accept, tokens[50:])) and mask_back.is_complete()


def test_a_format_that_is_too_large_names_its_place() -> None:
    tool = Tool("big", "", PARAMETERS, False, "tools[0].format.definition", Regex("a" * 5000))
    with pytest.raises(GrammarTooLarge) as refused:
        plan_output(
            OutputConstraints(tools=(tool,), tool_choice="auto"), ToolStyle.HERMES, limits=SchemaLimits()
        )
    assert refused.value.param == "tools[0].format.definition"


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (rb"a\nb", b"a\nb"),
        (rb"\"\\\/", b'"\\/'),
        (rb"\u00e9", "é".encode()),
        (b'a"', None),
        (b"a\n", None),
        (b"a\\", None),
        (rb"\ud800", None),
        (rb"\u00e", None),
        (rb"\x", None),
        (b"\xc3", b"\xc3"),
    ],
)
def test_the_meaning_of_a_part_of_a_string(text: bytes, meaning: bytes | None) -> None:
    assert unescaped(text) == meaning


def test_formats_are_bounded_together() -> None:
    tools = tuple(
        Tool(f"t{i}", "", PARAMETERS, False, f"tools[{i}]", ContextFreeGrammar("start: " + '"a" ' * 4000))
        for i in range(5)
    )
    with pytest.raises(GrammarTooLarge, match="all custom tools"):
        plan_output(
            OutputConstraints(tools=tools, tool_choice="auto"), ToolStyle.HERMES, limits=SchemaLimits()
        )
