"""A digest changes with each of its parts, and cannot be reached by moving bytes from one part to the next."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.digest import adapter_digest

PARTS = st.tuples(st.binary(max_size=8), st.binary(max_size=8), st.text(max_size=8))


@given(PARTS, PARTS)
def test_digests_are_equal_only_for_equal_parts(
    first: tuple[bytes, bytes, str], second: tuple[bytes, bytes, str]
) -> None:
    assert (adapter_digest(*first) == adapter_digest(*second)) == (first == second)


def test_borders_between_parts_count() -> None:
    assert (
        len(
            {
                adapter_digest(b"ab", b"c", "d"),
                adapter_digest(b"a", b"bc", "d"),
                adapter_digest(b"a", b"b", "cd"),
            }
        )
        == 3
    )


def test_the_form_is_fixed() -> None:
    digest = adapter_digest(b"{}", bytes(32), "0" * 64)
    assert digest == "cf11080334dee01c249a7a78b559cd89fb33c59bf79278fae14a726fe8097d57"
