"""A minute of an engine. Invariant: sums are of the minute alone; what goes up and down is the most of the minute."""

from collections.abc import Iterable
from datetime import datetime
from typing import Self
from uuid import UUID

from loraplex.tenants.ledger.histograms import EMPTY, GAP_BOUNDS_MS, TTFT_BOUNDS_MS, added, quantile
from loraplex.tenants.records import Record


class EngineMinute(Record):
    """One minute of one engine, as one gateway saw it, or as all gateways of one host did.

    `number`: the engine's in that gateway; `address`: its socket, which with `host` tells it from others. Tokens are those that the
    engine counted. `running` and `waiting`: sequences. Buckets count the requests and gaps between tokens of requests that ended in
    the minute, by the bounds of `ledger/histograms.py`.
    """

    minute: datetime
    gateway: UUID
    number: int
    host: str
    address: str
    prompt_tokens: int
    generation_tokens: int
    running: int
    waiting: int
    referenced_blocks: int
    total_blocks: int
    device_adapters: int
    host_adapters: int
    ttft_buckets: tuple[int, ...] = EMPTY
    gap_buckets: tuple[int, ...] = EMPTY

    def joined(self, other: Self) -> Self:
        """The same minute as two gateways saw it, each with its own requests."""
        most = {
            name: max(getattr(self, name), getattr(other, name))
            for name in type(self).model_fields
            if isinstance(getattr(self, name), int) and name != "number"
        }
        buckets = {
            name: tuple(added((getattr(self, name), getattr(other, name))))
            for name in ("ttft_buckets", "gap_buckets")
        }
        return self.model_copy(update=most | buckets)


def ttft_ms(minutes: Iterable[EngineMinute], percent: int) -> int | None:
    """The time to the first token that so many per cent of the requests did not exceed; None without any."""
    return quantile(TTFT_BOUNDS_MS, added(each.ttft_buckets for each in minutes), percent)


def gap_ms(minutes: Iterable[EngineMinute], percent: int) -> int | None:
    """The time between tokens that so many per cent of them did not exceed; None without any."""
    return quantile(GAP_BOUNDS_MS, added(each.gap_buckets for each in minutes), percent)
