"""Texts that a template could complete to a control token are marked; all others stay unchanged."""

import pytest

from loraplex.platform.inference.prompting.control_tokens import TokenFragments

FRAGMENTS = TokenFragments(["<|im_end|>", "[INST]", "<type>"])


@pytest.mark.parametrize(
    ("text", "edged"),
    [
        ("|im_end|", "~|im_end|~"),
        ("im", "~im~"),
        ("a <", "a <~"),
        ("a [INS", "a [INS~"),
        ("|> a", "~|> a"),
        ("] <", "~] <~"),
        ("hello", "hello"),
        ("", ""),
        ("> a [ b", "~> a [ b"),
        ("a > b < c", "a > b < c"),
        ("type", "type"),
    ],
)
def test_only_parts_of_control_tokens_are_marked(text: str, edged: str) -> None:
    assert FRAGMENTS.edged(text, "~") == edged


@pytest.mark.parametrize("tokens", [[], ["x"]])
def test_without_a_token_of_two_characters_nothing_is(tokens: list[str]) -> None:
    assert TokenFragments(tokens).edged("x", "~") == "x"
