"""The key cache: age, size, and the removal of a tenant's keys."""

from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from loraplex.platform.auth import key_cache
from loraplex.platform.auth.key_cache import KeyCache, Lookup
from loraplex.tenants.api_keys.keys import AuthenticatedKey

TENANT = uuid4()
FOUND = AuthenticatedKey(
    api_key_id=uuid4(),
    key_id="a",
    environment="live",
    secret_sha256=bytes(32),
    scopes=[],
    allowed_cidrs=[],
    expires_at=None,
    revoked_at=None,
    tenant_id=TENANT,
    tenant_name="acme",
    weight=1.0,
    tier="standard",
    suspended_at=None,
    policy_epoch=1,
)


class Cache(KeyCache):
    """With a clock of its own, at zero."""

    def __init__(self, seconds: float = 1.0, known_s: float = 0.0) -> None:
        self.now = 0.0
        super().__init__(seconds, lambda: self.now, known_s)

    def find(self, key_id: str, tenant_id: UUID | None = TENANT, *, until: float | None = None) -> None:
        found = replace(FOUND, key_id=key_id, tenant_id=tenant_id)
        self.put(key_id, Lookup(found, self.deadline() if until is None else until))

    def miss(self, key_id: str) -> None:
        self.put(key_id, Lookup(None, self.deadline()))

    def knows(self, key_id: str) -> bool:
        return self.get(key_id) is not None


def test_an_entry_is_as_old_as_its_query() -> None:
    cache = Cache()
    deadline = cache.deadline()
    cache.now = 0.9
    cache.find("a", until=deadline)
    assert cache.knows("a")
    cache.now = 1.0
    assert not cache.knows("a")


def test_an_older_query_does_not_win() -> None:
    cache = Cache()
    cache.find("a", tenant_id=None)
    cache.find("a", until=0.5)
    known = cache.get("a")
    assert known is not None and known.found is not None and known.found.tenant_id is None


def test_a_tenants_keys_are_forgotten_together() -> None:
    cache, other = Cache(), uuid4()
    for key_id in ("a", "b"):
        cache.find(key_id)
    cache.find("c", other)
    cache.find("d", None)
    cache.miss("e")
    cache.forget(TENANT)
    cache.forget(uuid4())
    assert [cache.knows(key_id) for key_id in "abcde"] == [False, False, True, True, True]


def test_keys_that_were_found_under_a_newer_policy_are_kept() -> None:
    cache = Cache()
    cache.find("a")
    cache.put("b", Lookup(replace(FOUND, key_id="b", policy_epoch=2), cache.deadline()))
    cache.forget(TENANT, 1)
    assert not cache.knows("a") and cache.knows("b")


def test_a_key_that_was_found_is_remembered_until_it_is_gone() -> None:
    cache = Cache()
    cache.find("a")
    cache.now = 100.0
    cache.forget(TENANT)
    found = cache.last_found("a")
    assert found is not None and found.key_id == "a" and not cache.knows("a")
    cache.find("a")
    assert cache.knows("a")
    cache.miss("a")
    assert cache.last_found("a") is None


def test_made_up_ids_push_out_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_cache, "MAX_KEYS", 3)
    monkeypatch.setattr(key_cache, "MAX_UNKNOWN", 2)
    cache = Cache()
    cache.find("a")
    for number in range(100):
        cache.miss(f"unknown-{number}")
    assert cache.knows("a") and len(cache) == 3
    for key_id in "bcd":
        cache.find(key_id)
    assert not cache.knows("a") and cache.knows("d") and len(cache) == 5
    assert cache.last_found("a") is None


def test_the_tenant_with_the_most_keys_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_cache, "MAX_KEYS", 4)
    cache, other = Cache(), uuid4()
    cache.find("other", other)
    for key_id in "abcdef":
        cache.find(key_id)
    assert cache.knows("other") and [each for each in "abcdef" if cache.knows(each)] == ["d", "e", "f"]
    cache.find("another", other)
    assert cache.knows("other") and cache.knows("another")
    assert [each for each in "def" if cache.knows(each)] == ["e", "f"] and len(cache) == 4


def test_an_id_that_is_known_now_is_unknown_no_more() -> None:
    cache = Cache()
    cache.miss("a")
    cache.find("a")
    known = cache.get("a")
    assert known is not None and known.found is not None and len(cache) == 1


def test_no_time_is_no_cache() -> None:
    cache = Cache(0.0)
    cache.find("a")
    assert not cache.knows("a")


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_key_is_known_by_the_age_of_its_query_until_it_is_forgotten(seconds: float) -> None:
    cache = Cache(seconds, known_s=300.0)
    deadline = cache.deadline()
    cache.now = 10.0
    cache.find("a", until=deadline)
    cache.find("b")
    cache.miss("c")
    cache.now = 299.9
    assert [cache.known(key_id) is not None for key_id in "abcd"] == [True, True, False, False]
    cache.now = 300.0
    assert [cache.known(key_id) is not None for key_id in "ab"] == [False, True]
    cache.forget(TENANT, 0)
    assert cache.known("b") is not None
    cache.forget(TENANT, 1)
    assert cache.known("b") is None
