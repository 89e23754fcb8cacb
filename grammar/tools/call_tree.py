"""The tree of an output with calls, built from a `CallSyntax`.

Invariant: `ToolCallParser` can parse each text of the tree in one way only.
"""

from collections.abc import Collection, Mapping

from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.tools.call_syntax import CallSyntax
from loraplex.grammar.tree import (
    Alternation,
    Concatenation,
    JsonValue,
    Literal,
    Node,
    Pattern,
    Separated,
    SpecialToken,
    Triggered,
)

_TEXT_WITHOUT_BRACE = r"([^{](.|\n)*)?"


def calls_tree(
    syntax: CallSyntax,
    tools: Mapping[str, JsonSchemaValue],
    *,
    parallel: bool,
    control_tokens: Collection[str] = (),
) -> Node:
    """Build one call or, if `parallel`, several, and nothing else. `tools`: the arguments schema by name."""
    tokens = tuple(token for token in syntax.tokens if token in control_tokens)
    call = Concatenation(
        (
            *_spelled(syntax.before_name, tokens),
            _one_of([_named(syntax, name, schema) for name, schema in tools.items()]),
            *_spelled(syntax.after_arguments, tokens),
        )
    )
    calls = Separated(call, syntax.separator, 1, None if parallel else 1)
    around = (*_spelled(syntax.opening, tokens), calls, *_spelled(syntax.closing, tokens))
    return around[0] if len(around) == 1 else Concatenation(around)


def text_or_calls_tree(syntax: CallSyntax, calls: Node) -> Node:
    """Build free text, optionally followed by `calls`.

    Without a marker, calls replace the text, which then cannot begin with a brace.
    """
    if syntax.marker is None:
        return Alternation((calls, Pattern(_TEXT_WITHOUT_BRACE)))
    return Triggered(syntax.marker, calls, most=1, ends=True)


def _spelled(text: str, tokens: tuple[str, ...]) -> tuple[Node, ...]:
    """Return `text` with each of `tokens` in it as the control token."""
    for token in tokens:
        if token in text:
            before, _, after = text.partition(token)
            return (*_spelled(before, tokens), SpecialToken(token), *_spelled(after, tokens))
    return (Literal(text),) if text else ()


def _named(syntax: CallSyntax, name: str, schema: JsonSchemaValue) -> Node:
    return Concatenation((Literal(name + syntax.before_arguments), JsonValue(schema, "spaced")))


def _one_of(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else Alternation(tuple(nodes))
