"""Forms: one template as a page or as a dialog, shown by GET and sent by POST to the same path.

Invariant: a form that was refused is shown again with its errors and all that was typed; one that is sent twice runs once.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Signature, signature
from types import MappingProxyType
from typing import Annotated, Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.errors import InsufficientScope
from loraplex.platform.observability.request_id import request_id_of
from loraplex.platform.web.console.endpoint import LOOKING, ConsoleEndpoint, is_htmx
from loraplex.platform.web.console.forms import (
    Entered,
    Form,
    FormInvalid,
    field_errors,
    parse,
    read_form,
    read_open_form,
)
from loraplex.platform.web.console.page import OpenPage, PageRequest, SessionOf
from loraplex.tenants.actors import Actor
from loraplex.tenants.errors import StoredResponseUnreadable
from loraplex.tenants.idempotency import RepeatableRequest
from loraplex.tenants.stored_responses import StoredResponse
from loraplex.tenants.unit_of_work import UnitOfWork

P = ParamSpec("P")
T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=BaseModel)
MAX_NUMBER: Final = 2**31 - 1
"""The largest version or revision that is stored."""
MAX_DIGITS: Final = len(str(MAX_NUMBER))
VersionNumber: TypeAlias = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
"""The number of a version in an address; there is nothing at an address with another one."""
FormContext: TypeAlias = Callable[..., Awaitable[Mapping[str, object]]]
"""(page, ids of the path) -> what a form's template is given besides the form."""
Again: TypeAlias = Callable[..., Awaitable[Response]]
"""(submission, what was typed with its errors, ids of the path) -> the page that the form is on, with status 422."""
Send: TypeAlias = Callable[..., Awaitable[Response]]
"""(submission, ids of the path) -> the response. An error that the author can correct shows the form again."""


@dataclass(frozen=True, slots=True)
class OpenSubmission(OpenPage):
    """A form that was sent without a session, as for signing in."""

    form: Form


@dataclass(frozen=True, slots=True)
class FormSubmission(PageRequest):
    """A form that was sent by the person of `session`."""

    form: Form

    @property
    def revision(self) -> int | None:
        """The revision that the form was rendered with; None if the form has none, for any."""
        return revision_of(self.form)

    @property
    def is_repeated(self) -> bool:
        """Whether the change had run before, for the same form: then nothing that follows it, such as a mail, is done again."""
        return bool(self.http.state.form_is_repeated)

    def parse(self, model: type[ModelT]) -> ModelT:
        """Check the form against `model`. Raises `FormInvalid`."""
        return parse(self.form, model)

    async def run(
        self,
        use_case: Callable[Concatenate[UnitOfWork, P], Awaitable[object]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Run `use_case` in one unit of work of the person, once for a form that is sent twice.

        Raises `InsufficientScope` where an operator looks into a tenant.
        """
        await self._perform(lambda uow: use_case(uow, *args, **kwargs))

    async def result(
        self,
        use_case: Callable[Concatenate[UnitOfWork, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run `use_case` as `run` does, and return its result: that of the first time for a form that is sent twice. pydantic
        writes its annotated return type as JSON.
        """
        returns = signature(use_case).return_annotation
        if returns is Signature.empty:
            raise TypeError(f"{use_case} says not what it returns")
        result: T = await self._perform(lambda uow: use_case(uow, *args, **kwargs), result_type(returns))
        return result

    async def run_own(
        self,
        use_case: Callable[Concatenate[UnitOfWork, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run `use_case`, which changes nothing of a tenant but the person's own sessions, in one unit of work of the person.

        Its result is never stored: it may be the token of a session. So a form that is sent twice runs twice.
        """
        async with self.endpoint.runner.unit_of_work(self._actor, self.session.tenant_id) as uow:
            return await use_case(uow, *args, **kwargs)

    async def _perform(
        self, work: Callable[[UnitOfWork], Awaitable[Any]], result: TypeAdapter[Any] | None = None
    ) -> Any:
        """Run `work` once for the form; the result, if `result` is given, is that of the first time."""
        if getattr(self.http.state, "form_ran", False):
            # A second change with the form's key would be taken for a repetition of the first one.
            raise RuntimeError("a form runs one use case")
        self.http.state.form_ran = True
        if self.session.viewing_as_operator:
            raise InsufficientScope(LOOKING)
        fresh: list[Any] = []

        async def stored(uow: UnitOfWork) -> StoredResponse:
            fresh.append(await work(uow))
            return StoredResponse(200, [], b"null" if result is None else result.dump_json(fresh[0]))

        tenant_id = self.session.tenant_id
        done = await self.endpoint.runner.change(self._actor, tenant_id, self._repeatable, stored)
        self.http.state.form_is_repeated = not fresh
        if result is None:
            return None
        if fresh:
            return fresh[0]
        try:
            return result.validate_json(done.body)
        except ValidationError:
            # Not chained: another release may have stored a secret in it.
            raise StoredResponseUnreadable(
                "the result of this form was stored by another release: open its page again"
            ) from None

    @property
    def _actor(self) -> Actor:
        return self.session.actor(self.client_address, request_id_of(self.http.scope))

    @property
    def _repeatable(self) -> RepeatableRequest | None:
        """The identity of the form: its author, the key it was rendered with, and what was sent; None without a key."""
        if self.form.idempotency_key is None:
            return None
        return RepeatableRequest(
            caller=f"user:{self.session.user_id}",
            key=self.form.idempotency_key,
            route=f"{self.http.method} {self.http.url.path}",
            body_sha256=self.form.sha256,
            tenant_id=self.session.tenant_id,
        )


@cache
def result_type(returns: Any) -> TypeAdapter[Any]:
    """Return what writes the result of a form as JSON, and reads it for a form that is sent again."""
    return TypeAdapter(returns)


async def submission_of(request: Request, scope: str | None) -> FormSubmission:
    """Read a form of the tenant area. Raises as `opens` and `read_form`."""
    return await _read(request, lambda endpoint, _: endpoint.signed_in(request, scope))


async def _read(request: Request, session_of: SessionOf) -> FormSubmission:
    endpoint: ConsoleEndpoint = request.app.state.endpoint
    session = await session_of(endpoint, request)
    return FormSubmission(endpoint, request, session, await read_form(request))


def submits(scope: str | None) -> Any:
    """Return a dependency that gives a form of the tenant area its `FormSubmission`. It raises as `submission_of`."""
    return _submits(lambda endpoint, request: endpoint.signed_in(request, scope))


def submits_operator() -> Any:
    """Return a dependency that gives a form of the operator area its `FormSubmission`. It raises as `submits`."""
    return _submits(ConsoleEndpoint.signed_in_operator)


def submits_in_both_areas() -> Any:
    """Return a dependency that gives a form of either area its `FormSubmission`. It raises `SignInNeeded`, and as `read_form`."""
    return _submits(ConsoleEndpoint.signed_in_anywhere)


def _submits(session_of: SessionOf) -> Any:
    async def submitted(request: Request) -> FormSubmission:
        return await _read(request, session_of)

    return Depends(submitted)


def submits_as_anybody() -> Any:
    """Return a dependency that gives a form without a session its `OpenSubmission`. It raises as `read_open_form`."""

    async def submitted(request: Request) -> OpenSubmission:
        return OpenSubmission(request.app.state.endpoint, request, None, await read_open_form(request))

    return Depends(submitted)


def form_page(
    router: APIRouter,
    path: str,
    template: str,
    context: FormContext,
    *,
    fields: Collection[str] = (),
    renamed: Mapping[str, str] = MappingProxyType({}),
    is_page: bool = False,
    shown_at: str = "",
) -> Callable[[Send], Send]:
    """Add a form at `path`, as a page or as a dialog: GET shows it with its `context`, and POST calls the decorated function.
    `shown_at`: another path of the GET.

    The first parameter of `context` is a `PageRequest`, that of the function a `FormSubmission`; the others of `context` are
    ids of the path, which the function has, too. An error that the author can correct is shown in the form, with status 422 and
    all that was typed: at a field of `fields`, else above the form. `renamed` as in `entered_again`. `is_page`: the form is
    never a dialog, though a script may send it for one.
    """

    page_name, *ids = signature(context).parameters

    async def show(page: PageRequest, entered: Entered, **given: Any) -> Response:
        return page.dialog(template, form=entered, **await context(page, **given))

    async def ask(**given: Any) -> Response:
        return await show(given.pop(page_name), Entered(), **given)

    async def again(submission: FormSubmission, refused: Entered, **given: Any) -> Response:
        page = await show(submission, refused, **given)
        return refused_form(submission.http, page) if is_page else page

    def add(send: Send) -> Send:
        ask.__signature__ = _parameters_of(context)  # type: ignore[attr-defined]
        router.get(shown_at or path)(ask)
        return _add_post(router, path, send, again, ids, fields, renamed)

    return add


def form_post(
    router: APIRouter,
    path: str,
    again: Again,
    *,
    fields: Collection[str] | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Send], Send]:
    """Add a form that stands on a page of another address: POST at `path` calls the decorated function.

    Where the author can correct an error, `again` shows that page. `fields` and `renamed` as in `entered_again`; without `fields`
    the page shows the error of each field itself.
    """

    _, _, *ids = signature(again).parameters
    return lambda send: _add_post(router, path, send, again, ids, fields, renamed)


def _add_post(
    router: APIRouter,
    path: str,
    send: Send,
    again: Again,
    ids: Collection[str],
    fields: Collection[str] | None,
    renamed: Mapping[str, str],
) -> Send:
    """Add `send` at `path`. `ids`: those of the path that `again` is given."""
    submission_name, *given_ids = signature(send).parameters
    if not set(ids) <= set(given_ids):
        raise TypeError(f"{path}: {send.__name__} lacks an id of the page it is on: {ids}")

    async def answer(**given: Any) -> Response:
        submission: FormSubmission | OpenSubmission = given[submission_name]
        try:
            with field_errors():
                return await send(**given)
        except FormInvalid as error:
            shown = error.errors if fields is None else fields
            entered = entered_again(submission.form, error, shown, renamed)
            return await again(submission, entered, **{name: given[name] for name in ids})

    answer.__signature__ = _parameters_of(send)  # type: ignore[attr-defined]
    router.post(path)(answer)
    return send


def _parameters_of(function: Callable[..., Any]) -> Signature:
    """Return what FastAPI reads to know what a route is given."""
    return Signature([*signature(function).parameters.values()])


def refused_form(request: Request, response: Response) -> Response:
    """Let htmx put a form with errors in the place of the page, also if it asked for something else."""
    if is_htmx(request):
        response.headers.update({"hx-retarget": "#main", "hx-reselect": "#main", "hx-reswap": "outerHTML"})
    return response


def entered_again(
    form: Form, error: FormInvalid, shown: Collection[str], renamed: Mapping[str, str] = MappingProxyType({})
) -> Entered:
    """Return what was typed, with the errors. `shown`: the fields of the form; the error of another one stands above it.
    `renamed`: what a use case calls a field -> its name in the form.
    """
    named = {renamed.get(name, name): message for name, message in error.errors.items()}
    others = [message for name, message in named.items() if name not in shown]
    errors = {name: message for name, message in named.items() if name in shown}
    return form.entered(errors | ({"": " ".join(others)} if others else {}))


def revision_of(form: Form, name: str = "revision") -> int | None:
    """Return the revision that the form was rendered with; None if the form has none, for any."""
    return whole_number(form.text(name), beyond=MAX_NUMBER)


def whole_number(text: str, beyond: int | None = None) -> int | None:
    """Return the number that a text is; None if it is none, and `beyond` if it is larger than any that is stored."""
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text) if len(text) <= MAX_DIGITS and int(text) <= MAX_NUMBER else beyond
