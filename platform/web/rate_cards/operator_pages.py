"""Rate cards: their time lines, and the editor, whose draft is rated at last month's usage before it is published.

Invariant: a draft writes nothing. A published version is final: another version ends it, nothing changes it.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.web.console.amounts import Micro, between, decimal
from loraplex.platform.web.console.form_routes import FormSubmission, form_post, submits_operator
from loraplex.platform.web.console.forms import Entered
from loraplex.platform.web.console.page import PageRequest, opens_operator
from loraplex.platform.web.rate_cards import queries
from loraplex.tenants.billing import use_cases
from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import MAX_PRICE, Price
from loraplex.tenants.unit_of_work import UnitOfWork

Operator = Annotated[PageRequest, opens_operator()]
Submission = Annotated[FormSubmission, submits_operator()]
PATH: Final = "/operator/console/rate-cards"
PriceField = Annotated[Micro, between(0, MAX_PRICE)]
PRICES: Final = ("prompt", "cached_prompt", "completion", "reasoning")

router = APIRouter()


class RateCardForm(BaseModel):
    """A draft: what it applies to, its prices, typed as money per million tokens, and from when on; None: at once."""

    tier: str = ""
    tenant: str = ""
    adapter: str = ""
    currency: Annotated[str, Field(pattern="^[A-Z]{3}$")]
    prompt: PriceField
    cached_prompt: PriceField
    completion: PriceField
    reasoning: PriceField | None = None
    effective_from: datetime | None = None

    @property
    def price(self) -> Price:
        """Raises `InvalidField`."""
        return Price.of(self)

    @property
    def begins(self) -> datetime | None:
        """The start; a time without a zone is UTC."""
        start = self.effective_from
        return start if start is None or start.tzinfo is not None else start.replace(tzinfo=UTC)

    async def key(self, session: AsyncSession) -> CardKey:
        """Raises `InvalidField`."""
        return await queries.card_key(session, self.tier, self.tenant, self.adapter, self.currency)

    async def rating(self, session: AsyncSession) -> use_cases.Preview:
        """Return last month's usage under the draft. Raises `InvalidField`."""
        return await queries.rating(session, await self.key(session), self.price)

    async def publish(self, uow: UnitOfWork) -> datetime:
        """Return when the prices begin. Raises what `rate_cards.create` raises."""
        made = await use_cases.create(uow, await self.key(uow.session), self.price, self.begins)
        return made.effective_from

    def sent_again(self) -> Sequence[tuple[str, str]]:
        """Return the fields of a draft that was rated, as its publication sends them."""
        prices = {name: decimal(getattr(self, name)) for name in PRICES}
        begins = "" if self.begins is None else self.begins.isoformat()
        return [*{**dict(self), **prices, "effective_from": begins}.items()]


@router.get(PATH)
async def show_cards(page: Operator) -> Response:
    cards = await page.query(queries.cards, datetime.now(UTC))
    return page.show("rate_cards/rate_cards.html", cards=cards)


@router.get(f"{PATH}/new")
async def edit_card(page: Operator) -> Response:
    given = {name: page.http.query_params.get(name, "") for name in RateCardForm.model_fields}
    return _editor(page, Entered(given))


async def _again(submission: Submission, form: Entered) -> Response:
    return _editor(submission, form)


@form_post(router, f"{PATH}/preview", _again)
async def preview_card(submission: Submission) -> Response:
    draft = submission.parse(RateCardForm)
    rating = await submission.query(draft.rating)
    return _editor(submission, submission.form.entered(), draft=draft, rating=rating)


@form_post(router, PATH, _again)
async def publish_card(submission: Submission) -> Response:
    begins = await submission.result(submission.parse(RateCardForm).publish)
    return submission.back(PATH, f"Published: these prices begin {begins:%Y-%m-%d %H:%M:%S} UTC.")


def _editor(
    page: PageRequest,
    form: Entered,
    *,
    draft: RateCardForm | None = None,
    rating: use_cases.Preview | None = None,
) -> Response:
    """Show the editor; `rating`: that of `draft`, which may then be published."""
    kept = [] if draft is None else draft.sent_again()
    return page.show("rate_cards/editor.html", form=form, draft=draft, rating=rating, kept=kept)
