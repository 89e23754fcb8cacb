"""What follows a trigger."""

import pytest

from loraplex.grammar.backends.prefix import NOTHING, after_prefix, begins_with_token
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.tree import (
    Alternation,
    Concatenation,
    JsonValue,
    Literal,
    Node,
    Separated,
    SpecialToken,
)

VALUE = JsonValue(True)


@pytest.mark.parametrize(
    ("node", "rest"),
    [
        (Literal("<t>a"), Literal("a")),
        (Literal("<t>"), NOTHING),
        (SpecialToken("<t>"), NOTHING),
        (Concatenation((Literal("<"), Literal("t>a"), VALUE)), Concatenation((Literal("a"), VALUE))),
        (Concatenation((Literal("<t>"), VALUE)), Concatenation((NOTHING, VALUE))),
        (Alternation((Literal("<t>a"), Literal("<t>b"))), Alternation((Literal("a"), Literal("b")))),
        (Separated(Literal("<t>a"), ",", 1, 1), Concatenation((Literal("a"), NOTHING))),
        (
            Separated(Literal("<t>a"), ",", 2, 5),
            Concatenation(
                (Literal("a"), Separated(Concatenation((Literal(","), Literal("<t>a"))), "", 1, 4))
            ),
        ),
        (
            Separated(Literal("<t>a"), "", 1, None),
            Concatenation((Literal("a"), Separated(Literal("<t>a"), "", 0, None))),
        ),
    ],
)
def test_the_prefix_is_taken_off(node: Node, rest: Node) -> None:
    assert after_prefix(node, "<t>") == rest


@pytest.mark.parametrize(
    "node",
    [
        Literal("<t"),
        Literal("x<t>"),
        VALUE,
        NOTHING,
        SpecialToken("<u>"),
        Alternation((Literal("<t>"), VALUE)),
    ],
)
def test_what_may_begin_otherwise_is_refused(node: Node) -> None:
    with pytest.raises(GrammarInvalid, match="must begin with it"):
        after_prefix(node, "<t>")


def test_control_tokens_at_the_beginning() -> None:
    token = SpecialToken("<t>")
    assert begins_with_token(Separated(Concatenation((Alternation((token, token)), VALUE)), ","))
    assert not begins_with_token(Alternation((token, Literal("<t>"))))
    assert not begins_with_token(NOTHING)
