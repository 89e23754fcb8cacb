"""The closed table of request parameters, derived from the models of the request bodies: reading, and documentation.

An unknown name is refused. Tests check every row at its bounds.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from pydantic.fields import FieldInfo

from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.parameters.request_models import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ModelRequest,
    TokenizeRequest,
)
from loraplex.platform.parameters.request_object import default_of, default_text, kind_of, read_object
from loraplex.platform.parameters.value_types import Kind

Endpoint: TypeAlias = Literal["chat", "completions", "tokenize"]

MODELS: Final[Mapping[Endpoint, type[ModelRequest]]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "tokenize": TokenizeRequest,
}
_SAMPLING: Final = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationRequest.model_fields and name != "max_tokens"
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row: a parameter of the endpoints whose models have the field with the same type, default and meaning."""

    name: str
    kind: Kind
    endpoints: frozenset[Endpoint]
    meaning: str
    default: Any
    required: frozenset[Endpoint]


class Values(dict[str, Any]):
    """The checked value or default of every parameter. `given`: the names to which the request gave a value."""

    def __init__(self, values: Mapping[str, Any], given: frozenset[str]) -> None:
        super().__init__(values)
        self.given = given

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Values":
        """Apply other defaults to parameters that the request omits; names that are no parameters here are ignored."""
        if not defaults:
            return self
        silent = {name: each for name, each in defaults.items() if name in self and name not in self.given}
        return Values({**self, **silent}, self.given)


def read_parameters(endpoint: Endpoint, body: Mapping[str, object]) -> Values:
    """Return every parameter of the endpoint with its checked value or default. Raises `InvalidParameter`."""
    request = read_object(MODELS[endpoint], body)
    return Values(request.__dict__, frozenset(request.model_fields_set))


def sampling_fields(endpoint: Endpoint, values: Values) -> dict[str, Any]:
    """Return the values of all `SamplingParams` fields except `max_tokens`."""
    fields = {name: values[name] for name in _SAMPLING}
    fields["top_k"] = max(fields["top_k"], 0)
    fields["logprobs"] = values["logprobs"]
    if endpoint == "chat":
        fields["logprobs"] = (values["top_logprobs"] or 0) if values["logprobs"] else None
    return fields


def _rows() -> tuple[Parameter, ...]:
    """Merge the fields of the models: those of one name, type and meaning are one row. Required ones come first."""
    fields: defaultdict[tuple[str, Kind, str], dict[Endpoint, FieldInfo]] = defaultdict(dict)
    for endpoint, model in MODELS.items():
        for name, field in model.model_fields.items():
            fields[name, kind_of(field), field.description or ""][endpoint] = field
    rows = [
        Parameter(
            name=name,
            kind=kind,
            endpoints=frozenset(models),
            meaning=meaning,
            default=default_of(next(iter(models.values()))),
            required=frozenset(endpoint for endpoint, field in models.items() if field.is_required()),
        )
        for (name, kind, meaning), models in fields.items()
    ]
    return tuple(sorted(rows, key=lambda row: not row.required))


PARAMETERS: Final = _rows()


def render_markdown() -> str:
    """Render the table as Markdown, one line per row."""
    lines = ["| Parameter | Endpoints | Must be | Default | Meaning |", "|---|---|---|---|---|"]
    for row in PARAMETERS:
        endpoints = ", ".join(sorted(row.endpoints))
        default = "required" if row.required == row.endpoints else default_text(row.default)
        cells = (f"`{row.name}`", endpoints, row.kind.allowed, default, row.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
