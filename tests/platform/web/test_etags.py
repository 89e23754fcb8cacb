"""A change names the revision its author has seen."""

import pytest
from tests.platform.web.hand_made_requests import request

from loraplex.platform.errors import InvalidParameter, PreconditionRequired
from loraplex.platform.web.etags import ABSENT, if_match, if_match_or_new


def test_the_revision_of_if_match() -> None:
    assert if_match(request(headers={"if-match": '"12"'})) == 12
    assert if_match_or_new(request(headers={"if-match": '"12"'})) == 12
    assert if_match_or_new(request(headers={"if-none-match": "*"})) == ABSENT


def test_it_is_required() -> None:
    for read in (if_match, if_match_or_new):
        with pytest.raises(PreconditionRequired, match="If-Match"):
            read(request())


@pytest.mark.parametrize(
    "value", ["3", "*", 'W/"3"', '"3", "4"', '"0"', '"03"', '"-1"', '"a"', "", '"' + "9" * 19 + '"']
)
def test_other_forms_of_if_match(value: str) -> None:
    for read in (if_match, if_match_or_new):
        with pytest.raises(InvalidParameter, match="If-Match"):
            read(request(headers={"if-match": value}))


@pytest.mark.parametrize("headers", [{"if-none-match": '"3"'}, {"if-none-match": "*", "if-match": '"3"'}])
def test_other_forms_of_if_none_match(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidParameter, match="If-None-Match"):
        if_match_or_new(request(headers=headers))
