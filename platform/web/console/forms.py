"""Forms of the console: read from a request, checked against a model, shown again with what was typed.

Invariant: a form is read only if this server's own page, of the same session, has sent it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, TypeVar, get_origin
from urllib.parse import parse_qsl

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from loraplex.platform.errors import BodyTooLarge, InvalidBody, describe
from loraplex.platform.web.console.formatting import sentence

CSRF_FIELD: Final = "csrf"
CSRF_HEADER: Final = "x-csrf-token"
IDEMPOTENCY_FIELD: Final = "idempotency_key"
MAX_FORM_BYTES: Final = 64 << 10
MAX_FIELDS: Final = 200
_RESERVED: Final = {CSRF_FIELD, IDEMPOTENCY_FIELD}
_ENCODING: Final = "application/x-www-form-urlencoded"
_QUOTED_LENGTH: Final = 80

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Entered:
    """What a form shows: values that were typed or preset, and an error for each field that is wrong. The error of no field
    in particular has the name "".
    """

    values: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    def value(self, name: str) -> str:
        """Return the text of a field, empty where nothing was typed."""
        return self.values.get(name, "")

    def has(self, name: str, value: str) -> bool:
        """Return whether `value` is among the chosen ones of `name`."""
        return value in self.lists.get(name, ())

    def error(self, name: str) -> str | None:
        """Return what is wrong with a field."""
        return self.errors.get(name)


class FormInvalid(Exception):
    """Values of a form are not allowed: it is shown again with status 422. `errors`: field -> message."""

    def __init__(self, errors: Mapping[str, str], values: Mapping[str, str] | None = None) -> None:
        super().__init__("; ".join(errors.values()))
        self.errors = dict(errors)
        self.values = dict(values or {})


@dataclass(frozen=True)
class Form:
    """The fields of a form that was sent. `fields`: the last value of each; `lists`: all values of each, in order."""

    fields: Mapping[str, str]
    lists: Mapping[str, tuple[str, ...]]

    def text(self, name: str) -> str:
        """Return the trimmed text of a field, empty where it is absent."""
        return self.fields.get(name, "").strip()

    @property
    def idempotency_key(self) -> str | None:
        """The key that was made when the form was rendered."""
        return self.fields.get(IDEMPOTENCY_FIELD) or None

    @cached_property
    def sha256(self) -> bytes:
        """The digest of what was sent, without CSRF token and idempotency key."""
        sent = sorted((name, values) for name, values in self.lists.items() if name not in _RESERVED)
        return hashlib.sha256(msgspec.json.encode(sent)).digest()

    def entered(self, errors: Mapping[str, str] = MappingProxyType({})) -> Entered:
        """Return what the form shows again, with `errors`."""
        return Entered(self.fields, self.lists, errors)


async def read_form(request: Request) -> Form:
    """Read the form of a request of this session. Raises `FormRefused`, `BodyTooLarge`, `InvalidBody`, `SignInNeeded`.

    For scripts the token may come in the header `x-csrf-token`.
    """
    request.app.state.origin.require(request)
    form = await _read(request)
    await request.app.state.endpoint.check_token(request, form.fields.get(CSRF_FIELD))
    return form


async def read_open_form(request: Request) -> Form:
    """Read a form that is sent without a session, as for signing in, and count it for the client's network.

    Raises `SignInSlowed`, and as `read_form` but `SignInNeeded`.
    """
    request.app.state.origin.require(request)
    request.app.state.endpoint.count_try(request)
    return await _read(request)


async def _read(request: Request) -> Form:
    body = await _read_body(request)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and content_type != _ENCODING:
        raise InvalidBody(f"A form of the console is sent as {_ENCODING}.")
    lists: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict")
    except ValueError as error:
        raise InvalidBody(f"The form is not UTF-8, or has more than {MAX_FIELDS} fields.") from error
    for name, value in pairs:
        if "\0" in name or "\0" in value:
            raise InvalidBody("The form has a null character.")
        lists.setdefault(name, []).append(value.replace("\r\n", "\n"))
    return Form(
        {name: values[-1] for name, values in lists.items()},
        {name: tuple(values) for name, values in lists.items()},
    )


def parse(form: Form, model: type[ModelT]) -> ModelT:
    """Check a form against `model`; a field that was left empty counts as absent. A strict model reads texts, too.

    Raises `FormInvalid`.
    """
    values: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if get_origin(info.annotation) in (list, tuple, set, frozenset):
            values[name] = [value for value in form.lists.get(name, ()) if value]
        elif form.text(name):
            values[name] = form.text(name)
    try:
        return model.model_validate(values, strict=False)
    except ValidationError as error:
        raise FormInvalid(_messages(error, form), form.fields) from error


@contextmanager
def field_errors() -> Iterator[None]:
    """Raise `FormInvalid` for an error that the author of a form can correct, at the field that the error names.

    These are the errors with status 400, 403, 409, 412 and 422; all others pass.
    """
    try:
        yield
    except Exception as error:
        described = describe(error)
        if described.row.status not in (400, 403, 409, 412, 422):
            raise
        raise FormInvalid({described.param or "": sentence(described.message)}) from error


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise BodyTooLarge(f"A form has at most {MAX_FORM_BYTES} bytes.")
    return bytes(body)


def _messages(error: ValidationError, form: Form) -> dict[str, str]:
    messages: dict[str, str] = {}
    for details in error.errors():
        name = str(details["loc"][0]) if details["loc"] else ""
        messages.setdefault(name, _message(details, form.text(name)))
    return messages


def _message(details: ErrorDetails, typed: str) -> str:
    """Say what is wrong in the console's words: the value quoted, the rule named."""
    context: Mapping[str, Any] = details.get("ctx", {})
    quoted = f"“{typed[:_QUOTED_LENGTH]}{'…' if len(typed) > _QUOTED_LENGTH else ''}”"
    match details["type"]:
        case "missing":
            return "Enter a value."
        case "int_parsing" | "int_type" | "int_from_float":
            return f"{quoted} is no whole number."
        case "greater_than_equal":
            return f"{quoted} is too little: at least {context['ge']:,}."
        case "greater_than":
            return f"{quoted} is too little: more than {context['gt']:,}."
        case "less_than_equal":
            return f"{quoted} is too much: at most {context['le']:,}."
        case "less_than":
            return f"{quoted} is too much: less than {context['lt']:,}."
        case "string_too_long":
            return f"At most {context['max_length']:,} characters; these are {len(typed):,}."
        case "string_too_short":
            return f"At least {context['min_length']:,} characters."
        case "too_short":
            return "Choose at least one."
        case "literal_error" | "enum":
            return f"{quoted} is none of {context['expected']}."
        case "value_error":
            return str(context["error"])
    return f"{quoted}: {details['msg'][:1].lower()}{details['msg'][1:]}."
