"""Parses output text into content and tool calls by the `CallSyntax` that built its grammar.

Invariant: a deterministic machine over characters, each of which is read a bounded number of times.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from loraplex.grammar.errors import SchemaNotSatisfied
from loraplex.grammar.parsing.content_parser import ContentParser, ValidateValue
from loraplex.grammar.parsing.deltas import (
    AnswerReason,
    ArgumentsDelta,
    EngineReason,
    OutputDelta,
    ToolCallStart,
)
from loraplex.grammar.parsing.json_scanner import BLANKS, ValueScanner
from loraplex.grammar.parsing.literal_matcher import LiteralMatcher, MarkerFinder
from loraplex.grammar.tools.call_syntax import CallSyntax
from loraplex.grammar.tools.tool_list import MAX_NAME


def new_call_id() -> str:
    """`call_` and 24 characters of 144 random bits."""
    return f"call_{secrets.token_urlsafe(18)}"


class ToolCallPlacement(Enum):
    """Where an output may contain calls."""

    FOLLOW_TEXT = "text without the marker, then calls, or none"
    REPLACE_TEXT = "the whole answer is calls, or it begins differently and has none"
    BE_ALL = "the whole answer is calls"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """What the parser knows of the grammar. `tools`: each name, with the schema that validates its arguments, if any.

    `content`: the schema that validates content, if any. Schemas are JSON texts.
    """

    syntax: CallSyntax
    placement: ToolCallPlacement
    tools: Mapping[str, str | None]
    content: str | None = None


@dataclass(slots=True)
class _Call:
    name: str
    schema: str | None
    arguments: list[str]
    whole: bool = False

    def validate_arguments(self, validate: ValidateValue) -> None:
        if self.schema is None:
            return
        try:
            validate(self.schema, "".join(self.arguments))
        except SchemaNotSatisfied as error:
            raise SchemaNotSatisfied(f"the arguments of {self.name}: {error}") from error


class ToolCallParser:
    """Parses content, then calls. A state is the method that reads from a position and returns the position it
    reached.
    """

    def __init__(
        self, call_format: ToolCallFormat, validate: ValidateValue, call_id: Callable[[], str] = new_call_id
    ) -> None:
        self._call_format = call_format
        self._validate = validate
        self._syntax = call_format.syntax
        self._call_id = call_id
        self._content = ContentParser(call_format.content, validate)
        self._calls: list[_Call] = []
        self._deltas: list[OutputDelta] = []
        self._name = ""
        self._scanner = ValueScanner()
        self._literal = LiteralMatcher(self._syntax.beginning)
        self._marker = MarkerFinder(self._syntax.marker or "")
        follows = call_format.placement is ToolCallPlacement.FOLLOW_TEXT
        self._read: Callable[[str, int], int] = self._read_text if follows else self._read_beginning

    def feed(self, text: str) -> list[OutputDelta]:
        """Return the deltas that `text` completes."""
        position = 0
        while position < len(text):
            position = self._read(text, position)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, reason: EngineReason) -> tuple[list[OutputDelta], AnswerReason]:
        """End the choice: `tool_calls` if generation stopped by itself after whole calls. Raises
        `SchemaNotSatisfied`.

        A call cut off by the token limit ends with `length`, by a stop string of the user with `stop`. Its deltas
        stay and nothing is validated.
        """
        self._flush()
        deltas, self._deltas = self._deltas, []
        if reason == "length":
            return deltas, "length"
        if self._read == self._read_nothing:
            raise SchemaNotSatisfied("the answer is not a well-formed tool call")
        if not self._calls:
            return deltas, self._content.finish(reason)[1]
        if not self._calls[-1].whole:
            return deltas, "stop"
        for call in self._calls:
            call.validate_arguments(self._validate)
        return deltas, "tool_calls"

    def _flush(self) -> None:
        if self._read == self._read_text:
            self._add_content(self._marker.flush())
        elif self._read == self._read_beginning and self._may_be_content:
            self._add_content(self._literal.matched_text)

    @property
    def _may_be_content(self) -> bool:
        return self._call_format.placement is ToolCallPlacement.REPLACE_TEXT and not self._calls

    def _add_content(self, text: str) -> None:
        self._deltas += self._content.feed(text)

    def _read_text(self, text: str, start: int) -> int:
        content, position = self._marker.find(text, start)
        self._add_content(content)
        if self._marker.found:
            self._expect(self._syntax.beginning.removeprefix(self._syntax.marker or ""), self._read_beginning)
        return position

    def _read_content(self, text: str, start: int) -> int:
        self._add_content(text[start:])
        return len(text)

    def _read_nothing(self, text: str, start: int) -> int:
        """Ignore text outside the language: no grammar allows it, and the parser does not guess."""
        return len(text)

    def _read_beginning(self, text: str, start: int) -> int:
        """Read the text before a name."""
        position = self._match_literal(text, start)
        if self._literal.complete:
            self._name = ""
            self._read = self._read_name
        return position

    def _read_name(self, text: str, start: int) -> int:
        quote = text.find('"', start, start + MAX_NAME + 1)
        end = min(len(text), start + MAX_NAME + 1) if quote < 0 else quote
        self._name += text[start:end]
        if quote >= 0 and self._name in self._call_format.tools:
            self._start_call()
        elif quote >= 0 or len(self._name) > MAX_NAME:
            self._reject_call(self._syntax.beginning + self._name)
        return end

    def _start_call(self) -> None:
        self._deltas.append(ToolCallStart(len(self._calls), self._call_id(), self._name))
        self._calls.append(_Call(self._name, self._call_format.tools[self._name], []))
        self._expect(self._syntax.before_arguments, self._read_before_arguments)

    def _read_before_arguments(self, text: str, start: int) -> int:
        position = self._match_literal(text, start)
        if self._literal.complete:
            self._scanner = ValueScanner()
            self._read = self._read_blanks_before_arguments
        return position

    def _read_blanks_before_arguments(self, text: str, start: int) -> int:
        position = _skip_blanks(text, start)
        if position < len(text):
            self._read = self._read_arguments if text[position] == "{" else self._read_nothing
        return position

    def _read_arguments(self, text: str, start: int) -> int:
        position = self._scanner.scan(text, start)
        call = self._calls[-1]
        self._deltas.append(ArgumentsDelta(len(self._calls) - 1, text[start:position]))
        if call.schema is not None:
            call.arguments.append(text[start:position])
        if self._scanner.closed:
            self._read = self._read_blanks_after_arguments
        return position

    def _read_blanks_after_arguments(self, text: str, start: int) -> int:
        position = _skip_blanks(text, start)
        if position < len(text):
            self._expect(self._syntax.after_arguments, self._read_after_arguments)
        return position

    def _read_after_arguments(self, text: str, start: int) -> int:
        """Read the text after the arguments. Its first character closes the object around them, which makes the call
        whole.
        """
        position = self._match_literal(text, start)
        self._calls[-1].whole = self._literal.matched > 0
        if self._literal.complete:
            self._read = self._read_after_call
        return position

    def _read_after_call(self, text: str, start: int) -> int:
        if text[start] == self._syntax.separator[0]:
            self._expect(self._syntax.separator + self._syntax.before_name, self._read_beginning)
        else:
            self._expect(self._syntax.closing, self._read_closing)
        return self._read(text, start)

    def _read_closing(self, text: str, start: int) -> int:
        """Read the end of all calls.

        At most the stop string that ended the output may follow, if the user wants to see it; it is no content.
        """
        position = self._match_literal(text, start)
        return len(text) if self._literal.complete else position

    def _expect(self, literal: str, then: Callable[[str, int], int]) -> None:
        self._literal = LiteralMatcher(literal)
        self._read = then

    def _match_literal(self, text: str, start: int) -> int:
        position = self._literal.match(text, start)
        if position < len(text) and not self._literal.complete:
            self._reject_call(self._literal.matched_text)
        return position

    def _reject_call(self, matched_text: str) -> None:
        """Treat the text as content where that is allowed, since it is not a call."""
        if self._may_be_content:
            self._add_content(matched_text)
            self._read = self._read_content
        else:
            self._read = self._read_nothing


def _skip_blanks(text: str, start: int) -> int:
    position = start
    while position < len(text) and text[position] in BLANKS:
        position += 1
    return position
