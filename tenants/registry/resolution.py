"""Resolves the `model` of a request within a tenant: `<adapter>`, `<adapter>:<alias>` or `<adapter>@<version>` to one version.

Invariant: names contain neither `:` nor `@`, so a reference has one meaning; only ready versions are served.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any
from uuid import UUID

from sqlalchemy import Row, ScalarSelect, Select, func, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import (
    Adapter,
    AdapterAlias,
    AdapterVersion,
    AliasTarget,
    DecisionCalibration,
)
from loraplex.tenants.names import ADAPTER_NAME, ALIAS_NAME
from loraplex.tenants.registry.aliases import choose_target
from loraplex.tenants.registry.records import WHOLE, ReasoningStyle, decision_read

PRODUCTION = "production"
REFERENCE = re.compile(rf"({ADAPTER_NAME.strip('^$')})(?::({ALIAS_NAME.strip('^$')})|@([1-9][0-9]{{0,8}}))?")


@dataclass(frozen=True)
class ModelReference:
    """A parsed model name; exactly one of `alias` and `version` is set."""

    name: str
    alias: str | None
    version: int | None


def parse_model_reference(model: str) -> ModelReference | None:
    """Parse a model name; None if it cannot name an adapter."""
    match = REFERENCE.fullmatch(model)
    if match is None:
        return None
    name, alias, version = match.groups()
    if version is not None:
        return ModelReference(name, None, int(version))
    return ModelReference(name, alias or PRODUCTION, None)


@dataclass(frozen=True)
class ResolvedAdapter:
    """The version that a model name refers to now, created at `created_at`. `alias` is None for a pinned version. `calibrations`:
    those of its decisions, as objects with some fields of a `CalibrationDocument`.
    """

    adapter_id: UUID
    name: str
    version: int
    digest: str
    tool_style: str | None
    reasoning_style: ReasoningStyle | None
    defaults: Mapping[str, Any]
    decision: Mapping[str, str] | None
    calibrations: Sequence[Mapping[str, Any]]
    created_at: datetime
    alias: str | None

    @property
    def reference(self) -> str:
        """The model name in a request."""
        if self.alias is None:
            return f"{self.name}@{self.version}"
        return self.name if self.alias == PRODUCTION else f"{self.name}:{self.alias}"


@dataclass(frozen=True, slots=True)
class ModelTargets:
    """The ready versions that a model name refers to, at least one: version -> adapter and its weight among them."""

    adapters: Mapping[int, ResolvedAdapter]
    weights: Mapping[int, int]

    def choose(self, sticky: str) -> ResolvedAdapter:
        """Choose the version of one request; the same `sticky` always gets the same one."""
        first = next(iter(self.adapters.values()))
        if first.alias is None:
            return first
        return self.adapters[choose_target(first.adapter_id, first.alias, self.weights, sticky)]


class ModelResolver:
    """The ready versions of `tenant_id`, seen by one session."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def resolve(self, model: str, sticky: str = "") -> ResolvedAdapter | None:
        """Resolve `<adapter>`, `<adapter>:<alias>` or `<adapter>@<version>`; None unless the version is ready.

        If an alias splits its requests, `sticky` always selects the same version.
        """
        targets = await self.find(model)
        return None if targets is None else targets.choose(sticky)

    async def find(self, model: str) -> ModelTargets | None:
        """Find all versions that `model` refers to; None if none of them is ready."""
        reference = parse_model_reference(model)
        if reference is None:
            return None
        if reference.alias is None:
            query = self._ready().add_columns(literal(WHOLE).label("weight"))
            query = query.where(Adapter.name == reference.name, AdapterVersion.version == reference.version)
        else:
            query = self._aliased().where(
                Adapter.name == reference.name, AdapterAlias.alias == reference.alias
            )
        rows = (await self._session.execute(query)).all()
        if not rows:
            return None
        return ModelTargets(
            {row.version: resolved(row, reference.alias) for row in rows},
            {row.version: row.weight for row in rows},
        )

    async def list(self, limit: int | None = None) -> list[ResolvedAdapter]:
        """The version with the largest share of each alias of each living adapter, by names; without a ready version, none.

        `limit`: reads at most that many targets, None for all.
        """
        query = self._aliased().order_by(
            Adapter.name, AdapterAlias.alias, AliasTarget.weight.desc(), AdapterVersion.version.desc()
        )
        first: dict[tuple[str, str | None], ResolvedAdapter] = {}
        for row in await self._session.execute(query.limit(limit)):
            found = resolved(row, row.alias)
            first.setdefault((found.name, found.alias), found)
        return [*first.values()]

    async def versions(self, limit: int) -> Sequence[ResolvedAdapter]:
        """At most `limit` versions of living adapters, newest first."""
        query = self._ready().order_by(AdapterVersion.created_at.desc(), AdapterVersion.version.desc())
        return [resolved(row, None) for row in await self._session.execute(query.limit(limit))]

    def _aliased(self) -> Select[Any]:
        return (
            self._ready()
            .add_columns(AdapterAlias.alias, AliasTarget.weight)
            .join(
                AliasTarget,
                (AliasTarget.adapter_id == AdapterVersion.adapter_id)
                & (AliasTarget.version == AdapterVersion.version),
            )
            .join(
                AdapterAlias,
                (AdapterAlias.adapter_id == AliasTarget.adapter_id)
                & (AdapterAlias.alias == AliasTarget.alias)
                & (AdapterAlias.generation == AliasTarget.generation),
            )
        )

    def _calibrations(self) -> ScalarSelect[Any]:
        each = DecisionCalibration
        columns = (each.system_fingerprint, each.format, each.temperatures, each.sha256)
        fields = chain.from_iterable((column.key, column) for column in columns)
        found = select(func.jsonb_agg(func.jsonb_build_object(*fields)))
        read = func.coalesce(AdapterVersion.decision["read"].astext, decision_read(None))
        found = found.where(
            each.tenant_id == self._tenant_id, each.digest == AdapterVersion.digest, each.read == read
        )
        return found.correlate(AdapterVersion).scalar_subquery()

    def _ready(self) -> Select[Any]:
        version = AdapterVersion
        return (
            select(
                *(Adapter.id, Adapter.name, version.version, version.digest),
                *(version.tool_style, version.reasoning_style, version.defaults, version.created_at),
                *(version.decision, self._calibrations().label("calibrations")),
            )
            .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
            .where(Adapter.tenant_id == self._tenant_id, Adapter.deleted_at.is_(None))
            .where(AdapterVersion.tenant_id == self._tenant_id, AdapterVersion.state == "ready")
        )


def resolved(row: "Row[Any]", alias: str | None) -> ResolvedAdapter:
    return ResolvedAdapter(
        adapter_id=row.id,
        name=row.name,
        version=row.version,
        digest=row.digest,
        tool_style=row.tool_style,
        reasoning_style=row.reasoning_style,
        defaults=row.defaults,
        decision=row.decision,
        calibrations=row.calibrations or (),
        created_at=row.created_at,
        alias=alias,
    )
