"""S8 and S10: a megabyte that is made to hurt costs every parser of text from tenants, models and networks linear work.

The bound is processor time, a hundred times what a quiet machine needs; a quadratic parser would need hours. No parser raises
anything but its own refusal.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import pytest

from loraplex.adapters.errors import AdaptersError
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.validation.peft_config import parse_manifest
from loraplex.engine.output.stop_strings import StopMatcher, StopStrings
from loraplex.grammar.errors import GrammarError, SchemaNotSatisfied
from loraplex.grammar.json_schema.validator import Validator
from loraplex.grammar.parsing.content_parser import ContentParser
from loraplex.grammar.parsing.tool_call_parser import ToolCallFormat, ToolCallParser, ToolCallPlacement
from loraplex.grammar.tools.call_syntax import ToolStyle, syntax_of
from loraplex.platform.auth.client_address import forwarded, hop_address
from loraplex.platform.errors import GatewayError
from loraplex.platform.inference.prompting.chat_template import PromptRenderer
from loraplex.platform.parameters.chat_messages import ChatMessage
from loraplex.platform.parameters.json_object import BodyLimits, parse_object
from loraplex.platform.processes.redaction import redact
from loraplex.tenants.api_keys.key_format import parse_key
from loraplex.tenants.errors import TenantsError

SIZE: Final = 1 << 20
BOUND_S: Final = 60.0
REFUSALS: Final = (GatewayError, AdaptersError, GrammarError, TenantsError)
UNITS: Final = (
    "<tool_call>",
    "<tool_call",
    "</tool_call>",
    '<tool_call>{"name": "get", "arguments": {',
    '{"name": "get", "parameters": {"a": [',
    "[TOOL_CALLS]",
    '[TOOL_CALLS]get{"a": "\\\\',
    "<function=get><parameter=a>",
    "<|python_tag|>",
    "<|im_start|>",
    "<|im_",
    "|im_end|>",
    "<",
    "{",
    "[",
    '"',
    "\\",
    '\\"',
    " \n",
    "a",
    "0",
    "-",
    "\u2028\u0000😀",
    "{{ messages }}{% for x in y %}",
    "bearer  ",
    "a://b?token=",
)
"""Pieces that are repeated: beginnings without ends, ends without beginnings, and escapes."""
ENDLESS: Final = '{"name": "get", "arguments": {'


def texts() -> Iterator[str]:
    """A megabyte of every unit in turn, in long runs, and one of calls that begin and never end."""
    run = SIZE // len(UNITS)
    yield "".join(unit * (run // len(unit)) for unit in UNITS)
    yield ENDLESS * (SIZE // len(ENDLESS))


def refuse(schema: str, value: str) -> None:
    raise SchemaNotSatisfied(schema)


def read_answer(text: str, style: ToolStyle, placement: ToolCallPlacement) -> None:
    parser = ToolCallParser(ToolCallFormat(syntax_of(style), placement, {"get": "{}"}), refuse)
    for start in range(0, len(text), 64):
        parser.feed(text[start : start + 64])
    parser.finish("stop")


def read_content(text: str) -> None:
    parser = ContentParser("{}", refuse)
    for start in range(0, len(text), 8):
        parser.feed(text[start : start + 8])
    parser.finish("stop")


def match_stops(text: str) -> None:
    matcher = StopMatcher(StopStrings([text[:1000] + "\u0001", text[:999] + "\u0002", "\u0003"]))
    for start in range(0, len(text), 4):
        matcher.push(text[start : start + 4])


def read_body(text: str) -> None:
    parse_object(text.encode(), BodyLimits())


def read_quoted_body(text: str) -> None:
    parse_object(json.dumps({"messages": text}).encode(), BodyLimits())


def read_forwarded(text: str) -> None:
    for hop in forwarded([text, ", ".join(text[:10_000])]):
        hop_address(hop)


PARSERS: Final[dict[str, Callable[[str], Any]]] = {
    "content": read_content,
    "stop strings": match_stops,
    "body": read_body,
    "text in a body": read_quoted_body,
    "peft manifest": lambda text: parse_manifest(text.encode(), AdapterLimits()),
    "api key": lambda text: parse_key(f"lpx_live_{text}"),
    "forwarded addresses": read_forwarded,
    "log line": redact,
}


def within_bound(parse: Callable[[str], Any]) -> None:
    began = time.process_time()
    for text in texts():
        with suppress(*REFUSALS):
            parse(text)
    assert time.process_time() - began < BOUND_S


@pytest.mark.parametrize("name", PARSERS)
def test_s08_a_hostile_megabyte_is_linear_work(name: str) -> None:
    within_bound(PARSERS[name])


@pytest.mark.parametrize("style", ToolStyle)
def test_s10_answers_of_a_model_are_only_scanned(style: ToolStyle) -> None:
    placement = (
        ToolCallPlacement.REPLACE_TEXT if syntax_of(style).marker is None else ToolCallPlacement.FOLLOW_TEXT
    )
    within_bound(lambda text: read_answer(text, style, placement))


def test_s08_a_hostile_prompt_is_linear_work(chat_tokenizer: Any) -> None:
    renderer = PromptRenderer(chat_tokenizer)
    within_bound(lambda text: renderer.chat_ids([ChatMessage(role="user", content=text)]))


@pytest.mark.parametrize(
    "pattern", ["^(a+)+$", "(a|a)*b", "(.*)*x", "^(([a-z])+.)+[A-Z]([a-z])+$", "(?:a?){50}a{50}"]
)
def test_s08_patterns_of_a_schema_match_in_linear_work(pattern: str) -> None:
    began = time.process_time()
    validator = Validator({"type": "string", "pattern": pattern})
    with suppress(SchemaNotSatisfied):
        validator.validate(json.dumps("a" * 100_000 + "!"))
    assert time.process_time() - began < BOUND_S
