"""The base of every object in a request body, and how an error of pydantic becomes one of the gateway.

Invariant: the first error ends the reading of a list or an object of many keys, so a body has few errors however large it is.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self, TypeVar
from urllib.parse import quote

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError

from loraplex.platform.errors import (
    InvalidParameter,
    MissingParameter,
    UnknownParameter,
    UnsupportedParameter,
)
from loraplex.platform.parameters.value_errors import (
    REFUSED,
    REFUSED_KEY,
    UNSUPPORTED,
    Given,
    invalid_value,
    refused,
)
from loraplex.platform.parameters.value_types import (
    Kind,
)

MAX_NAME: Final = 64
MAX_REPORTED: Final = 16
_UNKNOWN: Final = "unknown"
_MISSING: Final = "missing"  # pydantic's own

_IGNORED: Final[ContextVar[dict[str, None] | None]] = ContextVar("ignored", default=None)
"""The unknown names of the body that is read now; None: one is an error."""

ObjectT = TypeVar("ObjectT", bound="RequestObject")


class RequestObject(BaseModel):
    """An object with a closed set of fields. Null counts as absent, whatever its name.

    `allowed` describes the object in error messages. `dropped`: names that are accepted with any value, and left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    allowed: ClassVar[str]
    dropped: ClassVar[frozenset[str]] = frozenset()
    _names: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls._names = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def check(cls, value: object) -> Self:
        """Check an object inside a body, from a validator of what contains it. Raises `ValidationError`."""
        checked: Self = cls.__pydantic_validator__.validate_python(value)
        return checked

    @model_validator(mode="before")
    @classmethod
    def _close(cls, value: object) -> object:
        # Not left to pydantic, which would build an error for every unknown name.
        if not isinstance(value, dict):
            raise refused(cls.allowed, value)
        if None in value.values():
            value = {name: each for name, each in value.items() if each is not None}
        if not value.keys() <= cls._names:
            known, ignored = cls._names | cls.dropped, _IGNORED.get()
            unknown = [name for name in value if name not in known]
            if unknown and ignored is None:
                raise PydanticCustomError(_UNKNOWN, cls.allowed, {"unknown": unknown[0][:MAX_NAME]})
            if unknown and ignored is not None:
                ignored |= dict.fromkeys(unknown)
            value = {name: each for name, each in value.items() if name in cls._names}
        return value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Document that a field that may be omitted may be null, and what each parameter must be."""
        reference = handler(schema)
        properties = handler.resolve_ref_schema(reference)["properties"]
        for name, field in cls.model_fields.items():
            name = field.alias or name
            properties[name] = _documented(field, properties[name])
        properties |= {name: {} for name in sorted(cls.dropped)}
        return reference


@dataclass(frozen=True)
class ObjectOf(Kind):
    """An object that its model describes."""

    model: type[RequestObject]

    @property
    def allowed(self) -> str:
        return self.model.allowed

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.model)


def kind_of(field: FieldInfo) -> Kind:
    """Return what describes the allowed values of a parameter."""
    return next(each for each in field.metadata if isinstance(each, Kind))


def default_of(field: FieldInfo) -> Any:
    """Return the default of a parameter; None for one that is required."""
    return None if field.is_required() else field.get_default(call_default_factory=True)


def default_text(default: object) -> str:
    """Write a default for people; none and empty ones have no text."""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, int | float) else ""


def read_object(model: type[ObjectT], value: object) -> ObjectT:
    """Check the object of a body. Raises `InvalidParameter`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        # Not chained: pydantic's text quotes the body.
        raise _error_of(model, error) from None


@dataclass(frozen=True, slots=True)
class UnknownNames:
    """Names that were left out, wherever they stood. `refusal`: the error that they would be."""

    names: tuple[str, ...]
    refusal: UnknownParameter

    def header(self) -> str:
        """Return the first `MAX_REPORTED` names as the value of a header, percent-encoded and cut, and `+N` for the others."""
        shown = [quote(name[:MAX_NAME].encode("ascii", "replace")) for name in self.names[:MAX_REPORTED]]
        more = len(self.names) - MAX_REPORTED
        return ", ".join([*shown, f"+{more}"] if more > 0 else shown)


def read_reporting(model: type[ObjectT], value: object) -> tuple[ObjectT, UnknownNames | None]:
    """Check an object as `read_object` does, and leave out what it does not know. Another error also names what is unknown."""
    try:
        return read_object(model, value), None
    except UnknownParameter as error:
        refusal = error
    ignored: dict[str, None] = {}
    token = _IGNORED.set(ignored)
    try:
        return read_object(model, value), UnknownNames(tuple(ignored), refusal)
    except InvalidParameter as error:
        raise UnknownParameter(f"{refusal} Besides: {error}", param=refusal.param) from None
    finally:
        _IGNORED.reset(token)


def _error_of(model: type[RequestObject], error: ValidationError) -> InvalidParameter:
    first = error.errors(include_url=False)[0]
    place, text, context = first["loc"], first["msg"], first.get("ctx", {})
    name = _name_of(place)
    kind = first["type"]
    if kind == _MISSING:
        allowed = f": {kind_of(model.model_fields[name]).allowed}" if name in model.model_fields else ""
        return MissingParameter(f"`{name}` is required{allowed}.", param=name)
    if kind == _UNKNOWN:
        path = _name_of((*place, context["unknown"]))
        where = f": `{name}` is {text}" if name else ""
        return UnknownParameter(f"Unknown parameter `{path}`{where}.", param=path)
    if kind == REFUSED_KEY:
        return invalid_value(_name_of(place[:-2]), first["input"], text)
    if kind == REFUSED:
        given = context.get("given")
        return invalid_value(name, given.value if isinstance(given, Given) else first["input"], text)
    refusal = UnsupportedParameter if kind == UNSUPPORTED else InvalidParameter
    return refusal(f"`{name}` {text}", param=name)


def _name_of(place: Iterable[str | int]) -> str:
    parts = (f"[{each}]" if isinstance(each, int) else f".{each[:MAX_NAME]}" for each in place)
    return "".join(parts).removeprefix(".")


def _documented(field: FieldInfo, schema: dict[str, Any]) -> dict[str, Any]:
    # As `default`, generated clients would send it, and so replace what an adapter's profile says.
    schema.pop("default", None)
    about: dict[str, Any] = {"title": schema.pop("title")} if "title" in schema else {}
    if field.description is not None:
        default = default_text(default_of(field))
        ending = f" Default: {default}." if default else ""
        about["description"] = f"{field.description}. Must be {kind_of(field).allowed}.{ending}"
        schema.pop("description")
    if field.is_required() or not schema or schema.get("type") == "null":
        return {**schema, **about}
    return {"anyOf": [*schema.pop("anyOf", [schema]), {"type": "null"}], **about}
