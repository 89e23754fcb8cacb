"""How a schema is held: the result of the static analysis that routes it to a backend (see `keywords.py` for its table)."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.spec import Backend

Enforcement: TypeAlias = Literal["full", "validated"]


@dataclass(frozen=True, slots=True)
class UnenforcedKeyword:
    """A keyword no grammar enforces here, by JSON Pointer."""

    keyword: str
    pointer: str


@dataclass(frozen=True, slots=True)
class EnforcementPlan:
    """`schema` is what is compiled, by any of `backends`, each exact for it. full: it is the schema asked for.

    validated: it is a relaxation of `judged`, by which a validator judges the finished value; `unenforced` tells why.
    """

    enforcement: Enforcement
    backends: frozenset[Backend]
    schema: JsonSchemaValue
    validation_schema: JsonSchemaValue | None = None
    unenforced: tuple[UnenforcedKeyword, ...] = ()
