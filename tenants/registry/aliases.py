"""A tenant's aliases: movable names for one version or a split of versions. Invariant: a generation's targets never change;
a move creates the next generation, and only from the generation that its caller has read.
"""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from uuid import UUID

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.canaries.guards import GuardedAlias, GuardRepository
from loraplex.tenants.canaries.records import GuardBounds
from loraplex.tenants.errors import AliasNotFound, InvalidField
from loraplex.tenants.models import Adapter, AdapterAlias, AliasTarget
from loraplex.tenants.names import ALIAS_NAME, is_name
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.records import MAX_TARGETS, WHOLE, AliasDocument


class AliasRepository:
    """The aliases of a tenant's adapters, seen by one session."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id
        self._adapters = AdapterRepository(session, tenant_id)

    async def list(self, name: str) -> list[AliasDocument]:
        """Every alias of the adapter, in alphabetical order. Raises `AdapterNotFound`."""
        return [*await self.page(name, None, None)]

    async def page(self, name: str, after: str | None, limit: int | None) -> Sequence[AliasDocument]:
        """At most `limit` (None: all) aliases of the adapter, after the alias `after`. Raises `AdapterNotFound`."""
        return await self.page_of(await self._adapters.get(name), after, limit)

    async def page_of(
        self, adapter: Adapter, after: str | None, limit: int | None
    ) -> Sequence[AliasDocument]:
        """The same of an adapter that was read already."""
        query = select(AdapterAlias).where(AdapterAlias.adapter_id == adapter.id)
        if after is not None:
            query = query.where(AdapterAlias.alias > after)
        records = (await self._session.scalars(query.order_by(AdapterAlias.alias).limit(limit))).all()
        return await self._documents(adapter.name, records)

    async def get(self, name: str, alias: str) -> AliasDocument:
        """Raises `AdapterNotFound` or `AliasNotFound`."""
        record = await self.existing(await self._adapters.get(name), alias)
        return await self.document(name, record)

    async def pointing_to(self, adapter: Adapter, version: int) -> Sequence[str]:
        """The aliases that point to `version` now."""
        query = (
            select(AdapterAlias.alias)
            .join(
                AliasTarget,
                (AliasTarget.adapter_id == AdapterAlias.adapter_id)
                & (AliasTarget.alias == AdapterAlias.alias)
                & (AliasTarget.generation == AdapterAlias.generation),
            )
            .where(AdapterAlias.adapter_id == adapter.id, AliasTarget.version == version)
        )
        return (await self._session.scalars(query.order_by(AdapterAlias.alias))).all()

    async def lead(
        self,
        adapter: Adapter,
        alias: str,
        record: AdapterAlias | None,
        targets: Mapping[int, int],
        guard: GuardBounds | None = None,
        *,
        same: bool = False,
    ) -> AdapterAlias:
        """Begin the next generation of an alias, or for None its first. `same`: its targets stay, so a rollback's too."""
        now = datetime.now(UTC)
        keys = {"adapter_id": adapter.id, "alias": alias, "tenant_id": self._tenant_id}
        if record is None:
            record = AdapterAlias(**keys, generation=1, updated_at=now)
            self._session.add(record)
        else:
            if not same:
                record.previous_generation = record.generation
            record.generation += 1
            record.updated_at = now
        await self._session.flush()
        for version, weight in targets.items():
            self._session.add(
                AliasTarget(**keys, generation=record.generation, version=version, weight=weight)
            )
        await self._session.flush()
        if guard is not None:
            place = GuardedAlias(self._tenant_id, adapter.id, alias, record.generation)
            await GuardRepository(self._session).set(place, guard, targets)
        return record

    async def document(self, name: str, record: AdapterAlias) -> AliasDocument:
        """The alias of a row, of the adapter `name`."""
        return (await self._documents(name, [record]))[0]

    async def _documents(self, name: str, records: Sequence[AdapterAlias]) -> Sequence[AliasDocument]:
        """Aliases of the adapter `name` with their targets, in one query."""
        wanted = [
            (record.alias, generation)
            for record in records
            for generation in (record.generation, record.previous_generation)
            if generation is not None
        ]
        query = select(AliasTarget).where(
            AliasTarget.adapter_id.in_({record.adapter_id for record in records}),
            tuple_(AliasTarget.alias, AliasTarget.generation).in_(wanted),
        )
        found: dict[tuple[str, int | None], dict[int, int]] = {place: {} for place in wanted}
        for target in await self._session.scalars(query):
            found[target.alias, target.generation][target.version] = target.weight
        guards = await GuardRepository(self._session).of(records)
        return [
            AliasDocument.of(
                name,
                record,
                found[record.alias, record.generation],
                found.get((record.alias, record.previous_generation)),
                guards.get(record.alias),
            )
            for record in records
        ]

    async def existing(self, adapter: Adapter, alias: str) -> AdapterAlias:
        """Raises `AliasNotFound`."""
        record = await self.find(adapter, alias) if is_name(alias, ALIAS_NAME) else None
        if record is None:
            raise AliasNotFound(f"adapter {adapter.name} has no alias {alias[:80]!r}")
        return record

    async def find(self, adapter: Adapter, alias: str) -> AdapterAlias | None:
        """The alias; None if there is none."""
        return await self._session.get(AdapterAlias, (adapter.id, alias))


def check_targets(targets: Mapping[int, int]) -> None:
    """Raise `InvalidField` unless there are 1 to 10 versions whose weights are at least 1 and sum to 100."""
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise InvalidField("split", f"split must name 1 to {MAX_TARGETS} versions")
    if min(targets.values()) < 1 or sum(targets.values()) != WHOLE:
        raise InvalidField("split", f"the weights of split must be at least 1 and sum to {WHOLE}")


def choose_target(adapter_id: UUID, alias: str, targets: Mapping[int, int], sticky: str) -> int:
    """Choose the version for a request by `sticky` (its user, or its id): always the same for the same targets.

    Shares are laid out from the oldest version up, so a version whose share grows keeps its requests. Weights need not
    sum to 100: those of versions that are not ready are distributed.
    """
    text = b"\0".join((adapter_id.bytes, alias.encode(), sticky.encode("utf-8", "surrogatepass")))
    point = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64 * sum(targets.values())
    for version in sorted(targets):
        point -= targets[version]
        if point < 0:
            return version
    return max(targets)
