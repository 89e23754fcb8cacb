"""`EnforcementPlan`: how a schema is enforced, the result of the static analysis (support table: `keywords.py`)."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.spec import Backend

Enforcement: TypeAlias = Literal["full", "validated"]


@dataclass(frozen=True, slots=True)
class UnenforcedKeyword:
    """A keyword that the grammar does not enforce at `pointer`, a JSON Pointer."""

    keyword: str
    pointer: str


@dataclass(frozen=True, slots=True)
class EnforcementPlan:
    """`schema` is what is compiled, by any of `backends`; each enforces it exactly.

    full: it means what the requested schema means. validated: it is a relaxation of `validation_schema`, by which a
    validator checks the finished value; `unenforced` lists the reasons. `slips`: the keywords that were read in another
    form than the schema's dialect has for them, and `nullable`.
    """

    enforcement: Enforcement
    backends: frozenset[Backend]
    schema: JsonSchemaValue
    validation_schema: JsonSchemaValue | None = None
    unenforced: tuple[UnenforcedKeyword, ...] = ()
    slips: tuple[str, ...] = ()
