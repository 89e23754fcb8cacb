"""The closed table of request parameters, derived from the models of the request bodies, for their documentation.

An unknown name is refused. Tests check every row at its bounds.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic.fields import FieldInfo

from loraplex.platform.parameters.decision_request import DecisionRequest
from loraplex.platform.parameters.messages_request import CountTokensRequest, MessagesRequest
from loraplex.platform.parameters.request_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    TokenizeRequest,
)
from loraplex.platform.parameters.request_object import default_of, kind_of
from loraplex.platform.parameters.responses_request import InputTokensRequest, ResponsesRequest
from loraplex.platform.parameters.value_types import Kind

MODELS: Final[Mapping[str, type[ModelRequest]]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "input_tokens": InputTokensRequest,
    "decisions": DecisionRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
    "messages": MessagesRequest,
    "count_tokens": CountTokensRequest,
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row: a parameter of the endpoints (keys of `MODELS`) whose models have the field with the same type, default and meaning."""

    name: str
    kind: Kind
    endpoints: frozenset[str]
    meaning: str
    default: Any
    required: frozenset[str]


def _rows() -> tuple[Parameter, ...]:
    """Merge the fields of the models: those of one name, type and meaning are one row. Required ones come first."""
    fields: defaultdict[tuple[str, Kind, str], dict[str, FieldInfo]] = defaultdict(dict)
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
