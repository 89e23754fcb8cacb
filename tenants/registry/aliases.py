"""A tenant's aliases: movable names for one version or a split of versions. Invariant: a generation's targets never change;
a move creates the next generation, and only from the generation that its caller has read.
"""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from uuid import UUID

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import AliasMoved, AliasNotFound, InvalidField, NoPreviousVersion
from loraplex.tenants.models import Adapter, AdapterAlias, AliasTarget
from loraplex.tenants.names import ALIAS_NAME, check_alias_name, is_name
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.records import ABSENT, MAX_TARGETS, WHOLE, AliasDocument


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
        record = await self._existing(await self._adapters.get(name), alias)
        return await self._document(name, record)

    async def generation(self, name: str, alias: str) -> int:
        """The alias's generation, `ABSENT` for none; it stays until the transaction ends.

        Raises `AdapterNotFound`, `InvalidName`.
        """
        record = await self._find(await self._adapters.locked(name), check_alias_name(alias))
        return ABSENT if record is None else record.generation

    async def set(
        self, name: str, alias: str, targets: Mapping[int, int], expected: int | None = None
    ) -> AliasDocument:
        """Point `alias` to ready versions; the same targets again change nothing.

        `expected` is the generation that the caller has read, `ABSENT` for no alias; None for any.
        Raises `InvalidField`, `AdapterNotFound`, `VersionNotFound`, `VersionNotReady`, `AliasMoved`.
        """
        check_targets(targets)
        adapter = await self._adapters.locked(name)
        for version in targets:
            await self._adapters.check_ready(adapter, version)
        record = await self._find(adapter, check_alias_name(alias))
        self._check_expected(name, alias, record, expected)
        if record is None:
            keys = {"adapter_id": adapter.id, "tenant_id": self._tenant_id, "alias": alias}
            record = AdapterAlias(**keys, generation=1, updated_at=datetime.now(UTC))
            self._session.add(record)
            await self._session.flush()
            await self._write_targets(record, targets)
        elif await self._targets(record, record.generation) != targets:
            await self._move(record, targets)
        return await self._document(name, record)

    async def rollback(self, name: str, alias: str, expected: int | None = None) -> AliasDocument:
        """Point `alias` back to its previous targets; a second time in a row changes nothing.

        Raises `AdapterNotFound`, `AliasNotFound`, `AliasMoved`, `NoPreviousVersion` or `VersionNotReady`.
        """
        adapter = await self._adapters.locked(name)
        record = await self._existing(adapter, alias)
        self._check_expected(name, alias, record, expected)
        if record.previous_generation is None:
            raise NoPreviousVersion(f"{name}:{alias} has been where it is now from its beginning")
        targets = await self._targets(record, record.previous_generation)
        for version in targets:
            await self._adapters.check_ready(adapter, version)
        await self._move(record, targets)
        return await self._document(name, record)

    async def delete(self, name: str, alias: str, expected: int | None = None) -> AliasDocument:
        """Delete an alias and return its last state. Raises `AdapterNotFound`, `AliasNotFound` or `AliasMoved`."""
        adapter = await self._adapters.locked(name)
        record = await self._existing(adapter, alias)
        self._check_expected(name, alias, record, expected)
        last = await self._document(name, record)
        await self._session.delete(record)
        await self._session.flush()
        return last

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

    async def _move(self, record: AdapterAlias, targets: Mapping[int, int]) -> None:
        record.previous_generation, record.generation = record.generation, record.generation + 1
        record.updated_at = datetime.now(UTC)
        await self._session.flush()
        await self._write_targets(record, targets)

    async def _write_targets(self, record: AdapterAlias, targets: Mapping[int, int]) -> None:
        keys = {"adapter_id": record.adapter_id, "alias": record.alias, "tenant_id": self._tenant_id}
        for version, weight in targets.items():
            self._session.add(
                AliasTarget(**keys, generation=record.generation, version=version, weight=weight)
            )
        await self._session.flush()

    async def _document(self, name: str, record: AdapterAlias) -> AliasDocument:
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
        return [
            AliasDocument.of(
                name,
                record,
                found[record.alias, record.generation],
                found.get((record.alias, record.previous_generation)),
            )
            for record in records
        ]

    async def _targets(self, record: AdapterAlias, generation: int) -> dict[int, int]:
        query = select(AliasTarget.version, AliasTarget.weight).where(
            AliasTarget.adapter_id == record.adapter_id,
            AliasTarget.alias == record.alias,
            AliasTarget.generation == generation,
        )
        return {version: weight for version, weight in await self._session.execute(query)}

    async def _existing(self, adapter: Adapter, alias: str) -> AdapterAlias:
        record = await self._find(adapter, alias) if is_name(alias, ALIAS_NAME) else None
        if record is None:
            raise AliasNotFound(f"adapter {adapter.name} has no alias {alias[:80]!r}")
        return record

    async def _find(self, adapter: Adapter, alias: str) -> AdapterAlias | None:
        return await self._session.get(AdapterAlias, (adapter.id, alias))

    def _check_expected(
        self, name: str, alias: str, record: AdapterAlias | None, expected: int | None
    ) -> None:
        now = ABSENT if record is None else record.generation
        if expected is not None and expected != now:
            raise AliasMoved(f"{name}:{alias} has moved since it was read")


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
