"""Content is unchanged, and validated only where the grammar does not enforce its schema."""

import pytest

from loraplex.grammar.errors import SchemaNotSatisfied
from loraplex.grammar.parsing.content_parser import ContentParser
from loraplex.grammar.parsing.deltas import ContentDelta, EngineReason


def refuse(schema: str, value: str) -> None:
    raise SchemaNotSatisfied(f"{schema}: {value}")


def test_text_passes_as_it_is() -> None:
    reader = ContentParser(None, refuse)
    assert reader.feed("") == []
    assert reader.feed("<tool_call> ") == [ContentDelta("<tool_call> ")]
    assert reader.finish("stop") == ([], "stop")
    assert ContentParser(None, refuse).finish("length") == ([], "length")


@pytest.mark.parametrize("text", ['{"a": 1}', '{"a": 1}<|end|>', "12", '"}"'])
def test_a_finished_value_is_validated(text: str) -> None:
    reader = ContentParser("false", refuse)
    for character in text:
        assert reader.feed(character) == [ContentDelta(character)]
    with pytest.raises(SchemaNotSatisfied) as refused:
        reader.finish("stop")
    assert str(refused.value) == "false: " + text.removesuffix("<|end|>")


def test_a_truncated_value_is_not_validated() -> None:
    cases: tuple[tuple[str, EngineReason], ...] = (('{"a": 1', "stop"), ('{"a": 1}', "length"), ("", "stop"))
    for text, reason in cases:
        reader = ContentParser("false", refuse)
        reader.feed(text)
        assert reader.finish(reason)[1] == reason
