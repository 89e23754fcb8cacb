"""What loads cost and how many may be in progress: by bytes and by measured rates."""

import pytest

from loraplex.engine.lora.load_budget import LOADS_AT_FIRST, LoadBudget, Throughput


def key(name: str, tenant: bytes = b"t") -> tuple[bytes, str]:
    return (tenant, name)


def test_a_rate_follows_what_is_measured_in_proportion_to_bytes() -> None:
    rate = Throughput(1e9)
    assert rate.seconds(2e9) == 2.0
    rate.note(1000, 0.1)
    assert rate.bytes_per_second == pytest.approx(1e4), "the first measurement takes the place of the guess"
    rate.note(1, 0.05)
    assert 8e3 < rate.bytes_per_second < 1e4, (
        "a load of 20 bytes per second says little of a rate when it is small"
    )
    for _ in range(50):
        rate.note(1000, 0.05)
    assert rate.bytes_per_second == pytest.approx(2e4, rel=0.01)
    rate.note(0, 1.0)
    assert rate.bytes_per_second == pytest.approx(2e4, rel=0.01)


def test_a_load_costs_in_proportion_to_its_bytes_and_more_from_the_source() -> None:
    budget = LoadBudget(1000)
    budget.source.note(100, 1.0)
    budget.device.note(100, 0.1)
    budget.learn(key("small"), 50)
    budget.learn(key("large"), 400)
    assert budget.seconds(key("small"), reads=True) == pytest.approx(0.55)
    assert budget.seconds(key("large"), reads=True) == pytest.approx(4.4)
    assert budget.seconds(key("large"), reads=False) == pytest.approx(0.4)
    unknown = budget.seconds(key("unknown"), reads=False)
    assert 0.05 < unknown < 0.4, "the mean of those seen"


def test_bytes_under_way_are_those_of_loads_that_have_not_ended() -> None:
    budget = LoadBudget(1000)
    tenants = [b"t", b"u"] * (LOADS_AT_FIRST // 2)
    for number, tenant in enumerate(tenants):
        assert budget.has_room(tenant)
        budget.begin(key(str(number), tenant))
    assert not budget.has_room(b"t") and not budget.has_room(b"u")
    budget.learn(key("0"), 100)
    assert budget.has_room(b"t"), "850 of 1,000 bytes, and 100 more are expected"
    assert not budget.has_room(b"u"), "half of them are its own"
    budget.begin(key("4"))
    assert not budget.has_room(b"t")
    for number, tenant in enumerate([*tenants, b"t"]):
        budget.end(key(str(number), tenant))
        budget.end(key(str(number), tenant))
    budget.learn(key("9"), 5000)
    assert budget.has_room(b"t"), "one may always begin"


def test_a_tenant_without_a_load_may_begin_one_beside_those_of_others() -> None:
    budget = LoadBudget(1000)
    for number in range(LOADS_AT_FIRST):
        budget.begin(key(str(number)))
    assert budget.has_room(b"u")
    budget.begin(key("a", b"u"))
    assert not budget.has_room(b"v"), "all together take more than the bound"
    budget.end(key("0"))
    assert budget.has_room(b"v")
