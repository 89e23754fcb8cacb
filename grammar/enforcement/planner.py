"""Plans how a schema is enforced: by a backend that enforces all of it, or relaxed and validated.

Invariants: `full` means that only valid documents can be written; the decision uses the schema alone, never a
compiler. Whatever an analysis or a library raises becomes a refusal of the schema.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from loraplex.grammar.constraints import JsonSchemaValue, SchemaLimits
from loraplex.grammar.enforcement.enforcement_plan import EnforcementPlan, UnenforcedKeyword
from loraplex.grammar.enforcement.relaxation import Relaxed, relax
from loraplex.grammar.enforcement.rewrite import Rewriter
from loraplex.grammar.errors import (
    AnalysisFailed,
    GrammarInvalid,
    GrammarRefused,
    SchemaNotEnforceable,
)
from loraplex.grammar.json_escapes import names_control
from loraplex.grammar.json_schema.bounds import check_bounds, check_keywords
from loraplex.grammar.json_schema.cycles import recursive_groups
from loraplex.grammar.json_schema.dialect import to_newest
from loraplex.grammar.json_schema.formats import FORMATS, HINTS, VALIDATED_FORMATS
from loraplex.grammar.json_schema.metaschema import check_is_schema, check_references
from loraplex.grammar.json_schema.references import References, Target
from loraplex.grammar.json_schema.satisfiable import KnownTypes, types_of_definitions, without_empty_parts
from loraplex.grammar.json_schema.slips import DECLARE
from loraplex.grammar.json_schema.values import allowed_types
from loraplex.grammar.json_schema.walk import walk
from loraplex.grammar.spec import Backend

# llguidance comes first: it compiles any schema in milliseconds.
PREFERENCE: Final[tuple[Backend, ...]] = ("llguidance", "xgrammar")
ALL_BACKENDS: Final[frozenset[Backend]] = frozenset(PREFERENCE)


def plan_enforcement(
    schema: JsonSchemaValue,
    *,
    strict: bool,
    param: str,
    limits: SchemaLimits,
    backends: frozenset[Backend] = ALL_BACKENDS,
) -> EnforcementPlan:
    """Choose the backends and the schema to compile. `backends` are the candidates, `param` is the request field.

    Raises `GrammarTooLarge`; `GrammarInvalid`, also for a schema that no document satisfies; with `strict`
    `SchemaNotEnforceable`; and `AnalysisFailed` in place of any unexpected error.
    """
    try:
        return _plan(schema, strict, param, limits, backends)
    except (GrammarRefused, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    # A panic of a Rust library is not an `Exception`.
    except BaseException as error:
        reason = f"this schema cannot be analysed: {type(error).__name__}"
        raise AnalysisFailed(reason, param=param, pointer="") from error


def _plan(
    schema: JsonSchemaValue, strict: bool, param: str, limits: SchemaLimits, backends: frozenset[Backend]
) -> EnforcementPlan:
    references, slips = _checked(schema, strict, param, limits)
    found = {backend: relaxed for backend, relaxed in _each(references, param, limits) if backend in backends}
    exact = [backend for backend, relaxed in found.items() if not relaxed.unenforced]
    if exact:
        chosen = found[exact[0]].schema
        same = frozenset(backend for backend in exact if found[backend].schema == chosen)
        return EnforcementPlan(enforcement="full", backends=same, schema=chosen, slips=slips)
    if strict or "llguidance" not in found:
        raise _not_enforceable(next(iter(found.values())).unenforced, param)
    relaxed = found["llguidance"]
    return EnforcementPlan(
        enforcement="validated",
        backends=frozenset({"llguidance"}),
        schema=relaxed.schema,
        validation_schema=references.root,
        unenforced=relaxed.unenforced,
        slips=slips,
    )


def _checked(
    schema: JsonSchemaValue, strict: bool, param: str, limits: SchemaLimits
) -> tuple[References, tuple[str, ...]]:
    """Return the references of the schema in the newest draft, once each part that has a meaning is checked, and slips."""
    check_bounds(schema, limits=limits, param=param)
    slips: set[str] = set()
    newest = to_newest(schema, param=param, slips=slips)
    try:
        check_is_schema(newest, param=param)
    except GrammarInvalid as error:
        if isinstance(schema, dict) and schema.get("$schema") is None:
            raise GrammarInvalid(f"{error}; {DECLARE}", param=param, pointer=error.pointer) from error
        raise
    references = References(newest)
    outside = references.outside()
    for place in outside:
        check_is_schema(place.schema, param=param, pointer=place.pointer)
        check_keywords(place.schema, limits=limits, param=param, pointer=place.pointer)
    check_references(references, param=param)
    if strict:
        for place in (references.at_root(), *outside):
            _refuse_unknown_formats(place, param)
    return references, tuple(sorted(slips))


def _each(references: References, param: str, limits: SchemaLimits) -> Iterator[tuple[Backend, Relaxed]]:
    groups, rewriter = recursive_groups(references), Rewriter(references)
    for backend in PREFERENCE:
        # Only the preferred backend ever gets a relaxed schema.
        whole = backend == PREFERENCE[0]
        nodes = 4 * limits.max_nodes
        relaxed = relax(rewriter, groups, backend, param=param, max_nodes=nodes, whole=whole)
        if whole and names_control(relaxed.schema):
            relaxed = relax(rewriter, groups, backend, param=param, max_nodes=nodes, escapes=True)
        yield backend, _inhabited(relaxed, backend, param) if whole or not relaxed.unenforced else relaxed


def _inhabited(relaxed: Relaxed, backend: Backend, param: str) -> Relaxed:
    """Remove the parts that no document satisfies. Raises `GrammarInvalid` if that is the whole schema."""
    schema: Any = relaxed.schema
    known: KnownTypes = types_of_definitions(schema) if isinstance(schema, dict) else {}
    schema = without_empty_parts(schema, known)
    if schema is False:
        raise GrammarInvalid(f"{param}: no document satisfies this schema", param=param, pointer="")
    if "$defs" in schema:
        schema = {**schema, "$defs": _definitions(schema["$defs"], known)}
    if backend == "xgrammar" and any(node is False for _, node in walk(_without_closing(schema))):
        return Relaxed(schema, (*relaxed.unenforced, UnenforcedKeyword("false", "")))
    return Relaxed(schema, relaxed.unenforced)


def _definitions(found: dict[str, Any], known: KnownTypes) -> dict[str, Any]:
    return {
        name: without_empty_parts(member, known) for name, member in found.items() if known[f"#/$defs/{name}"]
    }


def _without_closing(schema: Any) -> Any:
    """Return the schema without `additionalProperties: false`, the only false that xgrammar reads."""
    if isinstance(schema, list):
        return [_without_closing(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_closing(member)
        for key, member in schema.items()
        if not (key == "additionalProperties" and member is False)
    }


def _refuse_unknown_formats(checked: Target, param: str) -> None:
    """Refuse formats that are unknown and so would assert nothing under `strict`.

    Allowed are formats that state the width of a number, and those of a text whose pattern spells them out, as zod
    writes.
    """
    for pointer, node in walk(checked.schema, checked.pointer):
        name = node.get("format") if isinstance(node, dict) else None
        if not isinstance(name, str) or name in FORMATS or name in VALIDATED_FORMATS or name in HINTS:
            continue
        if "string" in allowed_types(node) and not any(map(_has_pattern, (node, *node.get("allOf", ())))):
            raise SchemaNotEnforceable(
                f"{param}: the format {name[:60]!r} is not known, so strict cannot hold it",
                param=param,
                pointer=f"{pointer}/format",
            )


def _has_pattern(node: Any) -> bool:
    return isinstance(node, dict) and "pattern" in node


def _not_enforceable(unenforced: Sequence[UnenforcedKeyword], param: str) -> SchemaNotEnforceable:
    first = unenforced[0]
    places = ", ".join(f"{each.keyword} at {each.pointer!r}" for each in unenforced[:5])
    return SchemaNotEnforceable(
        f"{param}: strict, but no grammar holds {places}; without strict the finished value is checked",
        param=param,
        pointer=first.pointer,
    )
