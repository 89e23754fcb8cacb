"""Fields for one of many keys or adapters: what they offer as one types, and what was typed. Invariant: they find all, however many."""

from typing import Annotated

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.console.addresses import query_form
from loraplex.platform.web.console.forms import Form, FormInvalid
from loraplex.platform.web.console.page import PageRequest, opens
from loraplex.platform.web.usage import queries
from loraplex.tenants.api_keys.key_format import is_key_id
from loraplex.tenants.ids import canonical_uuid
from loraplex.tenants.scopes import USAGE_READ

Reader = Annotated[PageRequest, opens(USAGE_READ)]

router = APIRouter()


@router.get("/console/choices")
async def offer(page: Reader) -> Response:
    """Return the options for what was typed into the field `adapter`, `key` or `subject`, which is either."""
    form = query_form(page.http)
    name = next((each for each in ("adapter", "key") if each in form.fields), "subject")
    search = form.text(name).removeprefix("adapter:").removeprefix("key:")
    found = await page.query(queries.filter_choices, page.tenant_id, queries.key_id_of(search))
    return page.fragment("usage/options.html", "options", name=name, choices=found)


async def with_choices(page: PageRequest, form: Form) -> Form:
    """Return the form with its `key` as the field offers it; an id that is none of an application's key stays as it is: usage outlives keys.

    Raises `FormInvalid` for an adapter that does not exist, and a name that is not that of one key.
    """
    adapter, typed = form.text("adapter"), form.text("key")
    is_other = adapter and adapter != page.dependencies.served_model_name
    if is_other and not await page.query(queries.adapter_existed, page.tenant_id, adapter):
        raise FormInvalid({"adapter": f"There is no adapter “{adapter[:80]}”."})
    keys = await page.query(queries.keys_called, page.tenant_id, typed) if typed else [""]
    key_id = queries.key_id_of(typed)
    if not keys and (is_key_id(key_id) or canonical_uuid(key_id)):
        return form
    if len(keys) != 1:
        reason = (
            f"There is no key “{typed[:80]}”." if not keys else "Several keys have this name: enter the id."
        )
        raise FormInvalid({"key": reason})
    return Form({**form.fields, "key": keys[0]}, form.lists)
