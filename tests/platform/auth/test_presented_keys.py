"""Which key counts where a request has `Authorization`, `x-api-key` or both."""

import pytest
from starlette.datastructures import Headers

from loraplex.platform.auth.authenticator import bearer_token
from loraplex.platform.auth.presented_keys import authorizations
from loraplex.tenants.errors import MalformedKey

OURS, OTHER, FOREIGN = "lpx_live_a", "lpx_live_b", "sk-ant-api03-c"


def token_of(*headers: tuple[str, str]) -> str:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    return bearer_token(authorizations(Headers(raw=raw)))


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", f"Bearer {OURS}")],
        [("x-api-key", OURS)],
        [("authorization", f"bearer  {OURS} "), ("x-api-key", OURS)],
        [("authorization", f"Bearer {FOREIGN}"), ("x-api-key", OURS)],
        [("authorization", "Basic YTpi"), ("x-api-key", OURS)],
        [("x-api-key", FOREIGN), ("authorization", f"Bearer {OURS}")],
        [("x-api-key", ""), ("authorization", f"Bearer {OURS}")],
    ],
)
def test_one_key_of_ours_counts(headers: list[tuple[str, str]]) -> None:
    assert token_of(*headers) == OURS


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", f"Bearer {OURS}"), ("x-api-key", OTHER)],
        [("x-api-key", OURS), ("x-api-key", OURS)],
        [("x-api-key", OURS), ("x-api-key", FOREIGN)],
        [("authorization", f"Bearer {OURS}")] * 2,
        [*[("authorization", f"Bearer {OURS}")] * 2, ("x-api-key", OURS)],
        [("x-api-key", FOREIGN)],
        [("x-api-key", f"Bearer{OURS}")],
    ],
)
def test_otherwise_there_is_no_key(headers: list[tuple[str, str]]) -> None:
    with pytest.raises(MalformedKey):
        token_of(*headers)


def test_two_foreign_keys_stay_what_they_are() -> None:
    """The key is refused by its format."""
    assert token_of(("authorization", f"Bearer {FOREIGN}"), ("x-api-key", "sk-d")) == FOREIGN
