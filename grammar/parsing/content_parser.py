"""The reader of answers without calls. Invariant: content is the text as it came, and costs nothing unless it is judged."""

from collections.abc import Callable
from typing import TypeAlias

from loraplex.grammar.parsing.deltas import AnswerReason, ContentDelta, EngineReason, OutputDelta
from loraplex.grammar.parsing.json_scanner import whole_value

ValidateValue: TypeAlias = Callable[[str, str], None]
"""(schema, finished value), both JSON texts. Raises `SchemaNotSatisfied`, or only notes what is to be judged."""


class ContentParser:
    """Every text is content. With `schema`, a JSON text, the whole of it is one JSON value, judged when the answer ended
    by itself.
    """

    def __init__(self, schema: str | None, validate: ValidateValue) -> None:
        self._schema = schema
        self._validate = validate
        self._texts: list[str] = []

    def feed(self, text: str) -> list[OutputDelta]:
        """The text as it is."""
        if self._schema is not None:
            self._texts.append(text)
        return [ContentDelta(text)] if text else []

    def finish(self, reason: EngineReason) -> tuple[list[OutputDelta], AnswerReason]:
        """Raises `SchemaNotSatisfied`. A value that a stop string of the user cut off is not judged."""
        if self._schema is not None and reason == "stop":
            value = whole_value("".join(self._texts))
            if value is not None:
                self._validate(self._schema, value)
        return [], reason
