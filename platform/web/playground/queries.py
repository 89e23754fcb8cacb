"""What the playground offers: the models that a tenant may call, with their prices, and parameters with their bounds.

Invariant: bounds come from the table that checks requests, and prices from the cards that charge them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.parameters.parameter_table import PARAMETERS, Parameter
from loraplex.platform.parameters.value_types import Integer, Number
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.billing.price_book import load_table
from loraplex.tenants.billing.price_table import PriceTable
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.errors import PriceMissing
from loraplex.tenants.registry.resolution import ModelResolver, ResolvedAdapter

MAX_ALIASES: Final = 100
MAX_VERSIONS: Final = 200
SAFE_INTEGER: Final = 2**53 - 1
"""The largest whole number up to which a script computes exactly."""
FIRST: Final = ("temperature", "top_p", "max_tokens", "seed")
FURTHER: Final = (
    *("top_k", "min_p", "min_tokens", "thinking_token_budget"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
STEPS: Final = 20
"""A number field goes from its least to its greatest value in at least as many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaygroundModel:
    """A model as a request names it. `digest` is None for the base model. `defaults`: parameters of the version's profile.

    `price`: micro-units per million tokens in `currency`; None where no rate card applies, and requests are refused.
    """

    name: str
    kind: Literal["alias", "version", "base"]
    digest: str | None = None
    tool_style: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    currency: str
    price: Price | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterField:
    """A number that a request may set. `default`: what applies without it, as text."""

    name: str
    whole: bool
    low: float
    high: float
    step: float
    default: str
    meaning: str


async def find_models(session: AsyncSession, tenant_id: UUID, base: str) -> Sequence[PlaygroundModel]:
    """Return the models of a tenant: its aliases by name, its ready versions, newest first, and `base`.

    Reads at most `MAX_ALIASES` targets of aliases and `MAX_VERSIONS` versions; others are called by their names all the same.
    """
    resolver = ModelResolver(session, tenant_id)
    aliases = await resolver.list(MAX_ALIASES)
    versions = await resolver.versions(MAX_VERSIONS)
    tenant = await TenantRepository(session).by_id(tenant_id)
    prices = _Prices(await load_table(session), tenant_id, tenant.tier, datetime.now(UTC))
    found = [_adapter_model(each, prices) for each in (*aliases, *versions)]
    return [*found, PlaygroundModel(name=base, kind="base", currency=prices.currency, price=prices.of(None))]


def parameter_fields(names: Sequence[str]) -> Sequence[ParameterField]:
    """Return the number fields of these parameters of chat completions, in the order of `names`."""
    rows = {row.name: row for row in PARAMETERS if "chat" in row.endpoints}
    return [_field(rows[name]) for name in names]


@dataclass(frozen=True, slots=True)
class _Prices:
    table: PriceTable
    tenant_id: UUID
    tier: str
    at: datetime

    def of(self, adapter_name: str | None) -> Price | None:
        try:
            return self.table.price(self.tenant_id, self.tier, adapter_name, self.at).price
        except PriceMissing:
            return None

    @property
    def currency(self) -> str:
        return self.table.currency(self.tenant_id, self.at)


def _adapter_model(found: ResolvedAdapter, prices: _Prices) -> PlaygroundModel:
    return PlaygroundModel(
        name=found.reference,
        kind="version" if found.alias is None else "alias",
        digest=found.digest,
        tool_style=found.tool_style,
        defaults=found.defaults,
        currency=prices.currency,
        price=prices.of(found.name),
    )


def _field(row: Parameter) -> ParameterField:
    kind = row.kind
    if not isinstance(kind, Integer | Number):
        raise TypeError(f"{row.name} is no number")
    whole = isinstance(kind, Integer)
    low, high = max(kind.low, -SAFE_INTEGER), min(kind.high, SAFE_INTEGER)
    return ParameterField(
        name=row.name,
        whole=whole,
        low=low,
        high=high,
        step=1 if whole else _step(low, high),
        default="" if row.default is None else f"{row.default:g}",
        meaning=row.meaning,
    )


def _step(low: float, high: float) -> float:
    """Return a step of a tenth or less."""
    return min(0.1, (high - low) / STEPS)
