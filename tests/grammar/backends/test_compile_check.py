"""Outcomes of a compile check, and what a tenant reads of a library's error."""

import mmap
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.grammar.backends.compile_check import MAX_TEXT, checker, clean, ran_out_of_memory
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.spec import GrammarSpec


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


MIB = 1 << 20
SPEC = GrammarSpec(backend="llguidance", source="")
kept: list[mmap.mmap] = []


class Panic(BaseException):
    """What a Rust library raises when it breaks down."""


def keep(spec: GrammarSpec) -> int:
    # Pages of its own: the heap of a large process may have as much to spare, resident already.
    pages = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.write(b"x" * len(pages))
    kept.append(pages)
    return 1


def failing(error: BaseException) -> Callable[[GrammarSpec], int]:
    def fail(spec: GrammarSpec) -> int:
        raise error

    return fail


@pytest.mark.parametrize(
    ("first_mask", "outcome", "text"),
    [
        (lambda spec: 3, "accepted", ""),
        (lambda spec: 0, "unsatisfiable", ""),
        (keep, "size", ""),
        (failing(GrammarInvalid("/src/grammar.cc:7: \x1b[2Jno such rule\n")), "invalid", "[2Jno such rule"),
        (failing(ValueError("NoExtension")), "unsatisfiable", "NoExtension"),
        (failing(RuntimeError("std::bad_alloc")), "memory", "std::bad_alloc"),
        (failing(MemoryError()), "memory", ""),
        (failing(Panic()), "invalid", ""),
    ],
)
def test_outcome(first_mask: Callable[[GrammarSpec], int], outcome: str, text: str) -> None:
    result = checker(first_mask, grammar_bytes=4 * MIB)(SPEC)
    assert (result.outcome, result.text) == (outcome, text)
    assert (result.bytes >= 8 * MIB) == (outcome == "size")
