"""The parser of outputs without tool calls.

Invariant: content is the text unchanged; it is kept only if it will be validated.
"""

from collections.abc import Callable
from typing import TypeAlias

from loraplex.grammar.parsing.deltas import AnswerReason, ContentDelta, EngineReason, OutputDelta
from loraplex.grammar.parsing.json_scanner import whole_value

ValidateValue: TypeAlias = Callable[[str, str], None]
"""(schema, finished value), both JSON texts. Raises `SchemaNotSatisfied`, or only records the value for later validation."""


class ContentParser:
    """Every text is content. With `schema`, a JSON text, all of it is one JSON value, validated if generation stopped
    by itself.
    """

    def __init__(self, schema: str | None, validate: ValidateValue) -> None:
        self._schema = schema
        self._validate = validate
        self._texts: list[str] = []

    def feed(self, text: str) -> list[OutputDelta]:
        """Return the text unchanged as a delta."""
        if self._schema is not None:
            self._texts.append(text)
        return [ContentDelta(text)] if text else []

    def finish(self, reason: EngineReason) -> tuple[list[OutputDelta], AnswerReason]:
        """Validate the value, unless a stop string of the user cut it off. Raises `SchemaNotSatisfied`."""
        if self._schema is not None and reason == "stop":
            value = whole_value("".join(self._texts))
            if value is not None:
                self._validate(self._schema, value)
        return [], reason
