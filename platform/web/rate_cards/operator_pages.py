"""Rate cards: their time lines, and the editor, whose draft is rated at last month's usage before it is published.

Invariant: a draft writes nothing. A published version is final: another version ends it, nothing changes it.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.billing import rate_cards as use_cases
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid, field_errors, parse, read_form
from loraplex.platform.web.rate_cards import queries as rate_cards
from loraplex.platform.web.rate_cards.queries import MAX_PRICE, CardKey, Price, Rating
from loraplex.tenants.unit_of_work import UnitOfWork

PATH: Final = "/operator/console/rate-cards"
PriceField = Annotated[int, Field(ge=0, le=MAX_PRICE)]


class RateCardForm(BaseModel):
    """A draft: what it applies to, its prices in micro-units per million tokens, and from when on; None: at once."""

    tier: str = ""
    tenant: str = ""
    adapter: str = ""
    currency: Annotated[str, Field(pattern="^[A-Z]{3}$")]
    prompt: PriceField
    cached_prompt: PriceField
    completion: PriceField
    effective_from: datetime | None = None

    @property
    def price(self) -> Price:
        """Raises `InvalidField`."""
        return Price(prompt=self.prompt, cached_prompt=self.cached_prompt, completion=self.completion)

    @property
    def begins(self) -> datetime | None:
        """The start; a time without a zone is UTC."""
        start = self.effective_from
        return start if start is None or start.tzinfo is not None else start.replace(tzinfo=UTC)

    async def key(self, session: AsyncSession) -> CardKey:
        """Raises `InvalidField`."""
        return await rate_cards.card_key(session, self.tier, self.tenant, self.adapter, self.currency)


def rate_cards_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of rate cards."""
    router = APIRouter()
    operator = Depends(endpoint.requires_operator())

    @router.get(PATH)
    async def show_cards(request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        now = datetime.now(UTC)
        cards = await endpoint.query(session, lambda found: rate_cards.cards(found, now))
        return endpoint.page(request, session, "rate_cards/rate_cards.html", cards=cards)

    @router.get(f"{PATH}/new")
    async def edit_card(request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        given = {name: request.query_params.get(name, "") for name in RateCardForm.model_fields}
        return _editor(endpoint, request, session, Entered(given))

    @router.post(f"{PATH}/preview")
    async def preview_card(
        request: Request,
        session: Annotated[ConsoleSession, operator],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        try:
            draft = parse(form, RateCardForm)
            with field_errors():
                rating = await endpoint.query(session, lambda found: _rate(found, draft))
        except FormInvalid as invalid:
            return _editor(endpoint, request, session, form.entered(invalid.errors), status=422)
        return _editor(endpoint, request, session, form.entered(), draft=draft, rating=rating)

    @router.post(PATH)
    async def publish_card(
        request: Request,
        session: Annotated[ConsoleSession, operator],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        async def publish(uow: UnitOfWork) -> datetime:
            made = await use_cases.create(uow, await draft.key(uow.session), draft.price, draft.begins)
            return made.effective_from

        try:
            draft = parse(form, RateCardForm)
            with field_errors():
                begins = await endpoint.perform(request, session, form, publish, datetime)
        except FormInvalid as invalid:
            return _editor(endpoint, request, session, form.entered(invalid.errors), status=422)
        return endpoint.back(
            request, session, PATH, f"Published: these prices begin {begins:%Y-%m-%d %H:%M:%S} UTC."
        )

    return router


async def _rate(session: AsyncSession, draft: RateCardForm) -> Rating:
    return await rate_cards.rating(session, await draft.key(session), draft.price)


def _editor(
    endpoint: ConsoleEndpoint,
    request: Request,
    session: ConsoleSession,
    form: Entered,
    *,
    status: int = 200,
    draft: RateCardForm | None = None,
    rating: Rating | None = None,
) -> Response:
    """Show the editor; `rating`: that of `draft`, which may then be published."""
    kept = [] if draft is None else _fields(draft)
    context = {"form": form, "draft": draft, "rating": rating, "kept": kept}
    return endpoint.page(request, session, "rate_cards/editor.html", status=status, **context)


def _fields(draft: RateCardForm) -> Sequence[tuple[str, str]]:
    """The fields of a draft that was rated, as its publication sends them again."""
    values = {name: getattr(draft, name) for name in RateCardForm.model_fields}
    values["effective_from"] = "" if draft.begins is None else draft.begins.isoformat()
    return [(name, str(value)) for name, value in values.items()]
