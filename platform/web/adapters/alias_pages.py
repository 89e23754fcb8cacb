"""Aliases of an adapter: split, move, roll back, delete. Below `/console/adapters/{name}/aliases`.

Invariant: a form carries the generation that its author has read; an alias that moved meanwhile is not overwritten.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar
from uuid import UUID

from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.errors import describe
from loraplex.platform.services import aliases
from loraplex.platform.services.aliases import AliasState
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.adapters import adapter_queries as detail
from loraplex.platform.web.adapters.adapter_queries import AdapterDetail, Alias
from loraplex.platform.web.adapters.pages import ONE, find_adapter
from loraplex.platform.web.console.addresses import path_of, query_form
from loraplex.platform.web.console.cookies import Undo
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.form_routes import revision_of, whole_number
from loraplex.platform.web.console.forms import Form, FormInvalid, field_errors
from loraplex.platform.web.console.legacy_forms import Sent, add_form
from loraplex.tenants.unit_of_work import UnitOfWork

ALIAS: Final = f"{ONE}/aliases/{{alias}}"
NEW: Final = f"{ONE}/aliases/new"
WHOLE: Final = 100
ABSENT: Final = 0
MOVED: Final = "moved"
"""Where a form shows that the alias was moved meanwhile."""
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Moved:
    """Where an alias leads since a change. `generation`: what a rollback undoes; None where there is nothing to go back to."""

    targets: dict[str, int]
    generation: int | None

    @classmethod
    def of(cls, state: AliasState) -> "Moved":
        targets = {str(version): weight for version, weight in state.targets.items()}
        return cls(targets, None if state.previous is None else state.generation)


def aliases_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes that change aliases."""
    router = APIRouter()
    writer = Depends(endpoint.requires("adapters:write"))
    _add_split(router, endpoint, writer)
    _add_moves(router, endpoint, writer)
    _add_rollback(router, endpoint, writer)
    _add_deletion(router, endpoint, writer)
    return router


def _add_split(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    @router.get(f"{ALIAS}/split")
    async def draft_split(
        name: str,
        alias: str,
        request: Request,
        session: Annotated[ConsoleSession, writer],
        generation: int = ABSENT,
    ) -> Response:
        """The box of an alias with several targets as it was changed: its button names the change."""
        adapter = await find_adapter(endpoint, session, name)
        present, draft = alias_in(adapter, alias), query_form(request)
        return endpoint.page(
            *(request, session, "adapters/split.html"),
            adapter=adapter,
            alias=present,
            shares={} if present is None else drafted(draft, present),
            generation=generation,
            can_write=True,
        )


def _add_moves(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def create_alias(sent: Sent) -> Response:
        alias = sent.form.text("alias")
        if not alias:
            raise FormInvalid({"alias": "Enter a value."})
        return await _move(sent, alias, ABSENT)

    async def move_alias(sent: Sent) -> Response:
        return await _move(sent, sent.named("alias"), revision_of(sent.form, "generation"))

    for path, send in ((NEW, create_alias), (f"{ALIAS}/move", move_alias)):
        add_form(
            *(router, path, endpoint),
            access=writer,
            template="adapters/move.html",
            find=asked_about,
            send=send,
            fields=("alias", MOVED),
        )


def _add_rollback(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def roll_back(sent: Sent) -> Response:
        name, alias = sent.named("name"), sent.named("alias")

        async def work(uow: UnitOfWork) -> Moved:
            seen = revision_of(sent.form, "generation")
            return Moved.of(await aliases.roll_back(uow, sent.tenant_id, name, alias, seen=seen))

        moved = await _changed(sent, alias, work, Moved)
        return _back(sent, alias, moved)

    add_form(
        *(router, f"{ALIAS}/rollback", endpoint),
        access=writer,
        template="adapters/rollback.html",
        find=asked_about,
        send=roll_back,
        fields=(MOVED,),
    )


def _add_deletion(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def delete_alias(sent: Sent) -> Response:
        name, alias = sent.named("name"), sent.named("alias")

        async def work(uow: UnitOfWork) -> str:
            seen = revision_of(sent.form, "generation")
            return (await aliases.delete(uow, sent.tenant_id, name, alias, seen=seen)).alias

        await _changed(sent, alias, work, str)
        toast = f"{name}:{alias} is deleted."
        return sent.back(path_of("adapters", name), toast)

    add_form(
        *(router, f"{ALIAS}/delete", endpoint),
        access=writer,
        template="adapters/delete_alias.html",
        find=asked_about,
        send=delete_alias,
        fields=(MOVED,),
    )


async def _move(sent: Sent, alias: str, seen: int | None) -> Response:
    """Move an alias to the shares of the form, and go back to the adapter's page."""
    name, targets = sent.named("name"), targets_of(sent.form)

    async def work(uow: UnitOfWork) -> Moved:
        state = await aliases.move(uow, sent.tenant_id, name, alias, targets, seen=seen)
        return Moved.of(state)

    return _back(sent, alias, await _changed(sent, alias, work, Moved))


async def _changed(
    sent: Sent,
    alias: str,
    work: Callable[[UnitOfWork], Awaitable[ResultT]],
    returns: type[ResultT],
) -> ResultT:
    """Run a change of an alias. Raises `FormInvalid`, which names who moved the alias to what if it moved meanwhile."""
    try:
        with field_errors():
            return await sent.perform(work, returns)
    except FormInvalid as error:
        cause = error.__cause__
        if not isinstance(cause, Exception) or describe(cause).row.status != 412:
            raise
        tenant_id, name = sent.tenant_id, sent.named("name")
        message = await sent.endpoint.query(
            sent.session, lambda found: _whereto(found, tenant_id, name, alias)
        )
        raise FormInvalid({MOVED: message}) from cause


async def _whereto(found: AsyncSession, tenant_id: UUID, name: str, alias: str) -> str:
    """Say who moved an alias last, and where it leads now."""
    present = alias_in(await detail.adapter(found, tenant_id, name), alias)
    author = await detail.alias_author(found, tenant_id, name, alias)
    now = f"{name}:{alias} does not exist now"
    if present is not None:
        now = leads(name, alias, present.weights).removesuffix(".")
    by = f" by {author}" if author else ""
    return f"The alias was moved{by} while you looked: {now}. Nothing was changed."


def _back(sent: Sent, alias: str, moved: Moved) -> Response:
    """Go back to the adapter's page, which says where the alias leads now and offers to undo it."""
    name = sent.named("name")
    undo = None if moved.generation is None else Undo(name, alias, moved.generation)
    toast = leads(name, alias, moved.targets)
    return sent.back(path_of("adapters", name), toast, undo)


async def asked_about(
    endpoint: ConsoleEndpoint, request: Request, session: ConsoleSession
) -> dict[str, object]:
    """Return what forms about an alias show; `alias` is None for a new one. Raises `AdapterNotFound`."""
    adapter = await find_adapter(endpoint, session, request.path_params["name"])
    alias = alias_in(adapter, request.path_params.get("alias", ""))
    version = query_form(request).text("version")
    return {"adapter": adapter, "alias": alias, "shares": _shares(adapter, alias, version)}


def targets_of(form: Form) -> dict[int, int]:
    """Return version -> weight. `share-N` is the weight of version N; `first` that of the version `older`, and `newer` has the
    rest. Raises `FormInvalid`.
    """
    if form.text("first"):
        older, newer, first = (_number(form, each) for each in ("older", "newer", "first"))
        shares = {older: first, newer: WHOLE - first}
    else:
        names = [name for name in form.fields if name.startswith("share-") and form.text(name)]
        shares = {_version(name): _number(form, name) for name in names}
    targets = {version: weight for version, weight in shares.items() if weight}
    if sum(targets.values()) != WHOLE or min(targets.values()) < 0:
        raise FormInvalid({"": f"The shares sum to {sum(targets.values())}, not to 100."})
    return targets


def drafted(form: Form, alias: Alias) -> dict[int, int]:
    """Return the share of each target of an alias as a form has it, from 0 to 100; as it is where the form has none."""
    if len(alias.targets) == 2:
        older, newer = sorted(alias.weights)
        first = _percent(form.text("first"), alias.weights[older])
        return {older: first, newer: WHOLE - first}
    weights = alias.weights.items()
    return {version: _percent(form.text(f"share-{version}"), weight) for version, weight in weights}


def leads(name: str, alias: str, targets: Mapping[Any, int]) -> str:
    """Say where an alias leads to now."""
    if len(targets) == 1:
        return f"{name}:{alias} leads to v{next(iter(targets))} for every request."
    parts = [f"v{version} for {weight} %" for version, weight in sorted(targets.items())]
    return f"{name}:{alias} leads to {', '.join(parts)} of its requests."


def alias_in(adapter: AdapterDetail, alias: str) -> Alias | None:
    """Return an alias of the adapter; None if it has none of that name."""
    return next((each for each in adapter.aliases if each.alias == alias), None)


def _shares(adapter: AdapterDetail, alias: Alias | None, version: str) -> list[tuple[int, int]]:
    """Return the versions that an alias may lead to, newest first, with their shares as the form begins: all requests at
    `version`, if that is one of them.
    """
    ready = [each.version for each in adapter.versions if each.state == "ready"]
    present = {} if alias is None else alias.weights
    asked = next((each for each in ready if str(each) == version), None)
    if asked is not None or (not present and ready):
        present = {ready[0] if asked is None else asked: WHOLE}
    return [(each, present.get(each, 0)) for each in ready]


def _percent(text: str, default: int) -> int:
    number = whole_number(text, beyond=WHOLE)
    return default if number is None else min(number, WHOLE)


def _number(form: Form, name: str) -> int:
    text = form.text(name)
    number = whole_number(text)
    if number is None:
        raise FormInvalid({"": f"“{text[:20]}” is no whole number."})
    return number


def _version(field: str) -> int:
    number = field.removeprefix("share-")
    version = whole_number(number)
    if version is None:
        raise FormInvalid({"": f"“{number[:20]}” is no version."})
    return version
