"""The statistics of several engines as one."""

from loraplex.engine.messages import EngineStats, TenantSteps
from loraplex.platform.ray.merged_stats import merged_stats

ONE, OTHER = (b"o" * 32, "a" * 64), (b"o" * 32, "b" * 64)


def test_numbers_are_added_and_ages_are_the_largest() -> None:
    merged = merged_stats(
        [
            EngineStats(running=1, steps=5, heartbeat_age_s=3.0, draining=True),
            EngineStats(running=2, steps=7, heartbeat_age_s=1.0),
        ]
    )
    assert (merged.running, merged.steps, merged.heartbeat_age_s, merged.draining) == (3, 12, 3.0, False)


def test_adapters_are_united_and_histograms_added() -> None:
    merged = merged_stats(
        [
            EngineStats(device_adapters=[ONE, OTHER], step_tokens_histogram=[1, 2]),
            EngineStats(device_adapters=[ONE], step_tokens_histogram=[1, 0, 4]),
        ]
    )
    assert merged.device_adapters == [ONE, OTHER]
    assert merged.step_tokens_histogram == [2, 2, 4]


def test_the_steps_of_a_tenant_are_added_the_largest_first() -> None:
    small, large = b"s" * 32, b"l" * 32
    merged = merged_stats(
        [
            EngineStats(tenant_steps=[TenantSteps(small, 1, 2, 0), TenantSteps(large, 5, 5, 1)]),
            EngineStats(tenant_steps=[TenantSteps(small, 1, 1, 1)]),
        ]
    )
    assert merged.tenant_steps == [TenantSteps(large, 5, 5, 1), TenantSteps(small, 2, 3, 1)]
