"""Content as it came, and judged only where the grammar did not hold it."""

import pytest

from loraplex.grammar.errors import AnswerNotSatisfied
from loraplex.grammar.parsing.content_parser import ContentReader
from loraplex.grammar.parsing.deltas import ContentPiece, EngineReason


def refuse(schema: str, value: str) -> None:
    raise AnswerNotSatisfied(f"{schema}: {value}")


def test_text_passes_as_it_is() -> None:
    reader = ContentReader(None, refuse)
    assert reader.feed("") == []
    assert reader.feed("<tool_call> ") == [ContentPiece("<tool_call> ")]
    assert reader.finish("stop") == ([], "stop")
    assert ContentReader(None, refuse).finish("length") == ([], "length")


@pytest.mark.parametrize("text", ['{"a": 1}', '{"a": 1}<|end|>', "12", '"}"'])
def test_a_finished_value_is_judged(text: str) -> None:
    reader = ContentReader("false", refuse)
    for character in text:
        assert reader.feed(character) == [ContentPiece(character)]
    with pytest.raises(AnswerNotSatisfied) as refused:
        reader.finish("stop")
    assert str(refused.value) == "false: " + text.removesuffix("<|end|>")


def test_a_cut_value_is_not_judged() -> None:
    cases: tuple[tuple[str, EngineReason], ...] = (('{"a": 1', "stop"), ('{"a": 1}', "length"), ("", "stop"))
    for text, reason in cases:
        reader = ContentReader("false", refuse)
        reader.feed(text)
        assert reader.finish(reason)[1] == reason
