"""Aliases and versions of an adapter: split, move, roll back, deprecate, delete. Below `/console/adapters/{name}`.

Invariant: a form carries what its author has read (generation, revision); what moved meanwhile is not overwritten.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.console.addresses import path_of
from loraplex.platform.console.endpoint import ConsoleEndpoint
from loraplex.platform.console.forms import Entered, Form, FormInvalid, field_errors, read_form
from loraplex.platform.console.pages.adapters import ONE, find_adapter
from loraplex.platform.console.pages.writing import (
    VersionNumber,
    entered_again,
    layout_of,
    revision_of,
    tenant_of,
    whole_number,
)
from loraplex.platform.errors import describe
from loraplex.platform.services import aliases, versions
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.services.queries import adapter as detail
from loraplex.platform.services.queries.adapter import AdapterDetail, Alias
from loraplex.platform.services.unit_of_work import UnitOfWork

ALIAS: Final = f"{ONE}/aliases/{{alias}}"
VERSION: Final = f"{ONE}/versions/{{version}}"
WHOLE: Final = 100
ABSENT: Final = 0


def aliases_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes that change aliases and versions."""
    router = APIRouter()
    writer = Depends(endpoint.requires("adapters:write"))
    _add_split(router, endpoint, writer)
    _add_moves(router, endpoint, writer)
    _add_rollback(router, endpoint, writer)
    _add_alias_deletion(router, endpoint, writer)
    _add_service(router, endpoint, writer)
    _add_version_deletion(router, endpoint, writer)
    return router


def _add_split(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    @router.get(f"{ALIAS}/split")
    async def draft_split(
        name: str,
        alias: str,
        request: Request,
        session: Annotated[ConsoleSession, writer],
        first: int = WHOLE,
        generation: int = ABSENT,
    ) -> Response:
        """The box of an alias with two targets as the range stands: its button names the change."""
        adapter = await find_adapter(endpoint, session, name)
        return endpoint.page(
            *(request, session, "adapters/split.html"),
            adapter=adapter,
            alias=alias_in(adapter, alias),
            first=min(max(first, 0), WHOLE),
            generation=generation,
            can_write=True,
        )


def _add_moves(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    @router.get(f"{ONE}/aliases/new")
    async def new_alias(name: str, request: Request, session: Annotated[ConsoleSession, writer]) -> Response:
        return await _show_move(endpoint, request, session, name, None, Entered())

    @router.post(f"{ONE}/aliases/new")
    async def create_alias(
        name: str,
        request: Request,
        session: Annotated[ConsoleSession, writer],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        alias = form.text("alias")
        try:
            if not alias:
                raise FormInvalid({"alias": "Enter a value."})
            with field_errors():
                return await _move(endpoint, request, session, form, name, alias, ABSENT)
        except FormInvalid as error:
            entered = entered_again(form, error, ("alias",))
            return await _show_move(endpoint, request, session, name, None, entered, 422)

    @router.get(f"{ALIAS}/move")
    async def ask_to_move(
        name: str,
        alias: str,
        request: Request,
        session: Annotated[ConsoleSession, writer],
        version: VersionNumber | None = None,
    ) -> Response:
        return await _show_move(endpoint, request, session, name, alias, Entered(), version=version)

    @router.post(f"{ALIAS}/move")
    async def move_alias(
        name: str,
        alias: str,
        request: Request,
        session: Annotated[ConsoleSession, writer],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        try:
            with field_errors():
                seen = revision_of(form, "generation")
                return await _move(endpoint, request, session, form, name, alias, seen)
        except FormInvalid as error:
            moved = await _moved_meanwhile(endpoint, session, name, alias, error)
            entered = entered_again(form, moved, ())
            return await _show_move(endpoint, request, session, name, alias, entered, 422)


async def _show_move(
    endpoint: ConsoleEndpoint,
    request: Request,
    session: ConsoleSession,
    name: str,
    alias: str | None,
    form: Entered,
    status: int = 200,
    version: int | None = None,
) -> Response:
    """Show the form of an alias's shares; `alias` None: of a new one. It begins with all requests at `version`, if given."""
    adapter = await find_adapter(endpoint, session, name)
    present = None if alias is None else alias_in(adapter, alias)
    return endpoint.page(
        *(request, session, "adapters/move.html"),
        status=status,
        layout=layout_of(request),
        adapter=adapter,
        alias=present,
        form=form,
        shares=_shares(adapter, present, version),
    )


def _add_rollback(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    @router.get(f"{ALIAS}/rollback")
    async def ask_to_roll_back(
        name: str, alias: str, request: Request, session: Annotated[ConsoleSession, writer]
    ) -> Response:
        return await _ask(endpoint, request, session, name, alias, "rollback", Entered())

    @router.post(f"{ALIAS}/rollback")
    async def roll_back(
        name: str,
        alias: str,
        request: Request,
        session: Annotated[ConsoleSession, writer],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> dict[str, int]:
            seen = revision_of(form, "generation")
            state = await aliases.roll_back(uow, tenant_of(session), name, alias, seen=seen)
            return {str(version): weight for version, weight in state.targets.items()}

        try:
            with field_errors():
                targets = await endpoint.perform(request, session, form, work, dict[str, int])
        except FormInvalid as error:
            moved = await _moved_meanwhile(endpoint, session, name, alias, error)
            entered = entered_again(form, moved, ())
            return await _ask(endpoint, request, session, name, alias, "rollback", entered, 422)
        return endpoint.back(request, session, path_of("adapters", name), leads(name, alias, targets))


def _add_alias_deletion(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    @router.get(f"{ALIAS}/delete")
    async def ask_to_delete_alias(
        name: str, alias: str, request: Request, session: Annotated[ConsoleSession, writer]
    ) -> Response:
        return await _ask(endpoint, request, session, name, alias, "delete_alias", Entered())

    @router.post(f"{ALIAS}/delete")
    async def delete_alias(
        name: str,
        alias: str,
        request: Request,
        session: Annotated[ConsoleSession, writer],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> None:
            seen = revision_of(form, "generation")
            await aliases.delete(uow, tenant_of(session), name, alias, seen=seen)

        try:
            with field_errors():
                await endpoint.perform(request, session, form, work)
        except FormInvalid as error:
            moved = await _moved_meanwhile(endpoint, session, name, alias, error)
            entered = entered_again(form, moved, ())
            return await _ask(endpoint, request, session, name, alias, "delete_alias", entered, 422)
        return endpoint.back(request, session, path_of("adapters", name), f"{name}:{alias} is deleted.")


async def _ask(
    endpoint: ConsoleEndpoint,
    request: Request,
    session: ConsoleSession,
    name: str,
    alias: str,
    question: str,
    form: Entered,
    status: int = 200,
) -> Response:
    """Show a question about an alias, from the template of that name."""
    adapter = await find_adapter(endpoint, session, name)
    return endpoint.page(
        *(request, session, f"adapters/{question}.html"),
        status=status,
        layout=layout_of(request),
        adapter=adapter,
        alias=alias_in(adapter, alias),
        form=form,
    )


def _add_service(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    @router.post(f"{VERSION}/deprecate")
    async def deprecate_version(
        name: str,
        version: VersionNumber,
        request: Request,
        session: Annotated[ConsoleSession, writer],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> None:
            await versions.deprecate(uow, tenant_of(session), name, version, seen=revision_of(form))

        await endpoint.perform(request, session, form, work)
        return endpoint.back(
            *(request, session, path_of("adapters", name)),
            f"{name}@{version} is deprecated: requests for it are refused.",
        )

    @router.post(f"{VERSION}/restore")
    async def restore_version(
        name: str,
        version: VersionNumber,
        request: Request,
        session: Annotated[ConsoleSession, writer],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> None:
            await versions.restore(uow, tenant_of(session), name, version, seen=revision_of(form))

        await endpoint.perform(request, session, form, work)
        return endpoint.back(request, session, path_of("adapters", name), f"{name}@{version} is ready again.")


def _add_version_deletion(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def show(
        request: Request,
        session: ConsoleSession,
        name: str,
        version: VersionNumber,
        form: Entered,
        status: int = 200,
    ) -> Response:
        adapter = await find_adapter(endpoint, session, name)
        chosen = await endpoint.query(
            session, lambda found: detail.version(found, tenant_of(session), name, version)
        )
        return endpoint.page(
            *(request, session, "adapters/delete_version.html"),
            status=status,
            layout=layout_of(request),
            adapter=adapter,
            chosen=chosen,
            row=next((each for each in adapter.versions if each.version == version), None),
            form=form,
        )

    @router.get(f"{VERSION}/delete")
    async def ask_to_delete_version(
        name: str, version: VersionNumber, request: Request, session: Annotated[ConsoleSession, writer]
    ) -> Response:
        return await show(request, session, name, version, Entered())

    @router.post(f"{VERSION}/delete")
    async def delete_version(
        name: str,
        version: VersionNumber,
        request: Request,
        session: Annotated[ConsoleSession, writer],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> None:
            await versions.delete(uow, tenant_of(session), name, version, seen=revision_of(form))

        try:
            with field_errors():
                await endpoint.perform(request, session, form, work)
        except FormInvalid as error:
            return await show(request, session, name, version, entered_again(form, error, ()), 422)
        return endpoint.back(
            *(request, session, path_of("adapters", name)), f"Version {version} is deleted; its files follow."
        )


async def _move(
    endpoint: ConsoleEndpoint,
    request: Request,
    session: ConsoleSession,
    form: Form,
    name: str,
    alias: str,
    seen: int | None,
) -> Response:
    """Move an alias to the shares of the form, and go back to the adapter's page."""
    targets = targets_of(form)

    async def work(uow: UnitOfWork) -> None:
        await aliases.move(uow, tenant_of(session), name, alias, targets, seen=seen)

    await endpoint.perform(request, session, form, work)
    return endpoint.back(request, session, path_of("adapters", name), leads(name, alias, targets))


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


def leads(name: str, alias: str, targets: Mapping[Any, int]) -> str:
    """Say where an alias leads to now."""
    if len(targets) == 1:
        return f"{name}:{alias} leads to v{next(iter(targets))} for every request."
    parts = [f"v{version} for {weight} %" for version, weight in sorted(targets.items())]
    return f"{name}:{alias} leads to {', '.join(parts)} of its requests."


def alias_in(adapter: AdapterDetail, alias: str) -> Alias | None:
    """Return an alias of the adapter; None if it has none of that name."""
    return next((each for each in adapter.aliases if each.alias == alias), None)


async def _moved_meanwhile(
    endpoint: ConsoleEndpoint, session: ConsoleSession, name: str, alias: str, error: FormInvalid
) -> FormInvalid:
    """Name who moved the alias to what, if that is why the form was refused."""
    cause = error.__cause__
    if not isinstance(cause, Exception) or describe(cause).row.status != 412:
        return error

    async def find(found: AsyncSession) -> str:
        present = alias_in(await detail.adapter(found, tenant_of(session), name), alias)
        author = await detail.alias_author(found, tenant_of(session), name, alias)
        now = f"{name}:{alias} does not exist now"
        if present is not None:
            targets = {target.version: target.weight for target in present.targets}
            now = leads(name, alias, targets).removesuffix(".")
        return f"The alias was moved{f' by {author}' if author else ''} while you looked: {now}. Nothing was changed."

    return FormInvalid({"": await endpoint.query(session, find)}, error.values)


def _shares(adapter: AdapterDetail, alias: Alias | None, version: int | None) -> list[tuple[int, int]]:
    """Return the versions that an alias may lead to, newest first, with their shares as the form begins."""
    ready = [each.version for each in adapter.versions if each.state == "ready"]
    present = {} if alias is None else {target.version: target.weight for target in alias.targets}
    if version in ready or (not present and ready):
        present = {version if version in ready and version is not None else ready[0]: WHOLE}
    return [(each, present.get(each, 0)) for each in ready]


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
