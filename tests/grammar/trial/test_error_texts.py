"""What a tenant reads of a library's error."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.grammar.trial.error_texts import MAX_TEXT, clean, ran_out_of_memory


def test_places_in_the_library_are_cut() -> None:
    text = (
        "[10:20:30] /project/cpp/json_schema_converter.cc:123: Check failed: (x) is false: Unsupported type\n"
    )
    assert clean(text) == "Unsupported type"
    assert clean("src/earley/lexer.rs:17:4: too many states") == "too many states"


def test_listings_are_cut() -> None:
    text = 'at 3(8): unknown name: "foo"\n1 | start: b\n2 | start: a\n3 | a: foo\n         ^\n'
    assert clean(text) == 'line 3, column 8: unknown name: "foo"'


@given(st.text(max_size=2_000))
def test_a_text_is_one_bounded_printable_line(text: str) -> None:
    cleaned = clean(text)
    assert len(cleaned) <= MAX_TEXT
    assert cleaned.isprintable()


def test_exhaustion_is_recognised() -> None:
    assert ran_out_of_memory(MemoryError())
    assert ran_out_of_memory(RuntimeError("std::bad_alloc"))
    assert not ran_out_of_memory(RuntimeError("schema too large"))
