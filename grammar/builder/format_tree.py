"""The tree of an output format, without calls. Invariant: an accepted format is within its limits."""

from collections.abc import Sequence
from typing import Final, TypeAlias

from loraplex.grammar.builder.schema_set import RequestedSchema
from loraplex.grammar.constraints import Choice, JsonObject, JsonSchema, Regex, SchemaLimits
from loraplex.grammar.errors import GrammarInvalid, GrammarRefused, GrammarTooLarge
from loraplex.grammar.tools.call_syntax import CallSyntax
from loraplex.grammar.tree import Alternation, Literal, Node, Pattern

CHOICE: Final = "structured_outputs.choice"
REGEX: Final = "structured_outputs.regex"

TreeFormat: TypeAlias = JsonObject | JsonSchema | Regex | Choice
"""The formats that have a tree, and so can be combined with calls."""


def schemas_of(output_format: TreeFormat | None) -> tuple[RequestedSchema, ...]:
    """Return the schema of a JSON format, else nothing."""
    match output_format:
        case JsonObject():
            return (RequestedSchema({"type": "object"}, False, "response_format"),)
        case JsonSchema(schema, strict, param):
            return (RequestedSchema(schema, strict, param),)
    return ()


def text_tree(output_format: Regex | Choice, limits: SchemaLimits) -> Node:
    """Return the tree of a format that is not JSON. Raises `GrammarRefused`."""
    if isinstance(output_format, Regex):
        _check_bytes(output_format.pattern, limits.max_pattern_bytes, REGEX)
        return Pattern(output_format.pattern)
    _check_options(output_format.options, limits)
    options = tuple(Literal(option) for option in dict.fromkeys(output_format.options))
    return options[0] if len(options) == 1 else Alternation(options)


def check_beside_calls(output_format: TreeFormat, syntax: CallSyntax) -> None:
    """Raises `GrammarRefused` for a choice that would be parsed as a call."""
    if isinstance(output_format, Choice) and any(
        option.startswith(syntax.beginning) for option in output_format.options
    ):
        message = f"beside tools no choice can begin with {syntax.beginning!r}, as calls do"
        raise GrammarRefused(message, param=CHOICE)


def _check_options(options: Sequence[str], limits: SchemaLimits) -> None:
    if not options or "" in options:
        raise GrammarInvalid("a choice is a list of texts, at least one and none empty", param=CHOICE)
    if len(options) > limits.max_choices:
        message = f"{len(options)} choices are given, at most {limits.max_choices} are allowed"
        raise GrammarTooLarge(message, param=CHOICE)
    _check_bytes("".join(options), limits.max_text_bytes, CHOICE)


def _check_bytes(text: str, max_bytes: int, param: str) -> None:
    size = len(text.encode(errors="surrogatepass"))
    if size > max_bytes:
        raise GrammarTooLarge(f"{param} has {size} bytes, at most {max_bytes} are allowed", param=param)
