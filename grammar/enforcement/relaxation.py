"""Relaxes a schema for one backend: keeps and rewrites what the keyword table grants, and drops the rest.

Invariant: every value valid under the schema is valid under the result, which the backend enforces exactly. Nothing
below `not`, `if` or another negating keyword is kept, since relaxing it would narrow the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.enforcement.enforcement_plan import UnenforcedKeyword
from loraplex.grammar.enforcement.keywords import KEYWORDS, Site, is_exact, is_writable
from loraplex.grammar.enforcement.rewrite import Rewriter, Rewritten
from loraplex.grammar.errors import GrammarTooLarge
from loraplex.grammar.json_escapes import is_closed
from loraplex.grammar.json_schema.pattern import translate
from loraplex.grammar.json_schema.references import Target
from loraplex.grammar.json_schema.satisfiable import contradicts_itself
from loraplex.grammar.json_schema.values import listed_values, type_of
from loraplex.grammar.json_schema.walk import escaped
from loraplex.grammar.spec import Backend

_IN_PLACE: Final = frozenset(("$ref", "allOf", "anyOf", "const", "enum", "if", "oneOf"))
_CLOSED_BOUND: Final = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_MAPS: Final = frozenset(("properties", "patternProperties"))
_SINGLE: Final = frozenset(("additionalProperties", "items"))


@dataclass(frozen=True, slots=True)
class Relaxed:
    """`unenforced` is empty if the schema means what the requested schema means."""

    schema: JsonSchemaValue
    unenforced: tuple[UnenforcedKeyword, ...]


def relax(
    rewriter: Rewriter,
    groups: Mapping[str, int],
    backend: Backend,
    *,
    param: str,
    max_nodes: int,
    whole: bool = True,
    escapes: bool = False,
) -> Relaxed:
    """Relax the rewriter's schema for `backend`; `groups` are those of `recursive_groups`.

    With `escapes` an object whose undeclared names may be aliases of declared ones is unenforced (`json_escapes.py`).

    Without `whole` the work stops at the first unenforced keyword: `unenforced` is then incomplete and the schema
    unusable.

    The schema has passed `check_references`. Raises `GrammarTooLarge` beyond `max_nodes` subschemas.
    """
    return _Relaxation(rewriter, groups, backend, param, max_nodes, whole, escapes).run()


@dataclass(slots=True)
class _Subschema:
    """One subschema in progress. `merged`: the backend must intersect its keywords with another subschema."""

    place: Target
    rewritten: Rewritten
    merged: bool
    own: dict[str, Any]
    all_of: list[Any]
    any_of: list[list[Any]]


class _Relaxation:
    def __init__(
        self,
        rewriter: Rewriter,
        groups: Mapping[str, int],
        backend: Backend,
        param: str,
        max_nodes: int,
        whole: bool,
        escapes: bool,
    ) -> None:
        self._references = rewriter.references
        self._backend = backend
        self._param = param
        self._nodes_left = max_nodes
        self._whole = whole
        self._escapes = escapes
        self._rewriter = rewriter
        self._groups = groups
        self._unenforced: dict[UnenforcedKeyword, None] = {}
        self._names: dict[tuple[str, bool], str] = {}
        self._waiting: list[tuple[Target, bool]] = []
        self._definition = self._references.at_root()

    def run(self) -> Relaxed:
        root = self._relaxed(self._definition, False)
        definitions: dict[str, Any] = {}
        while self._waiting:
            target, merged = self._waiting.pop()
            self._definition = target
            definitions[self._names[target.pointer, merged]] = self._relaxed(target, merged)
        if isinstance(root, dict) and definitions:
            root["$defs"] = definitions
        return Relaxed(root, tuple(self._unenforced))

    def _relaxed(self, place: Target, merged: bool) -> Any:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise GrammarTooLarge(
                f"{self._param} has too many subschemas once its references are followed", param=self._param
            )
        if self._unenforced and not self._whole:
            return {}
        if isinstance(place.schema, bool):
            # xgrammar reads `true` in some places only.
            return {} if place.schema else False
        rewritten = self._rewriter.rewrite(place)
        keywords = rewritten.keywords
        if keywords.get("enum") == [] or contradicts_itself(keywords):
            return False
        inside = merged or self._is_merge(keywords)
        node = _Subschema(place, rewritten, inside, {}, [], [])
        left_out = self._left_out(node)
        for keyword in keywords:
            if keyword not in KEYWORDS:
                continue
            if keyword in left_out:
                self._soften(node, keyword)
            else:
                self._keep(node, keyword)
        if self._escapes and not is_closed(node.own):
            pointer = f"{node.place.pointer}/additionalProperties"
            self._unenforced[UnenforcedKeyword("additionalProperties", pointer)] = None
        return self._joined(node)

    def _is_merge(self, keywords: Mapping[str, Any]) -> bool:
        asserted = [keyword for keyword in keywords if keyword != "$format"]
        if len(keywords.get("allOf", ())) > 1:
            return True
        return len(asserted) > 1 and any(keyword in _IN_PLACE for keyword in asserted)

    def _left_out(self, node: _Subschema) -> set[str]:
        """Return the keywords that this backend does not enforce here, and those dropped with them."""
        keywords = node.rewritten.keywords
        recursive = self._comes_back(node.place)
        found: set[str] = set()
        for keyword in keywords:
            row = KEYWORDS.get(keyword)
            if row is None:
                continue
            if not row.enforces(self._backend, Site(keyword, keywords, node.merged, recursive)):
                place = node.rewritten.place_of(keyword)
                self._unenforced[UnenforcedKeyword(place, f"{node.place.pointer}/{escaped(place)}")] = None
                found.update((keyword, *row.drops))
        return found

    def _comes_back(self, place: Target) -> bool:
        reference = place.schema.get("$ref")
        if reference is None:
            return False
        target = self._references.resolve(reference, place.base)
        here = self._groups.get(self._definition.pointer)
        return target is not None and self._groups.get(target.pointer) == here

    def _keep(self, node: _Subschema, keyword: str) -> None:
        value = node.rewritten.keywords[keyword]
        if keyword in _MAPS:
            node.own[keyword] = {
                self._name(keyword, name): self._child(node, keyword, name, member)
                for name, member in value.items()
            }
        elif keyword in _SINGLE:
            node.own[keyword] = self._child(node, keyword, None, value)
        elif keyword == "prefixItems":
            node.own[keyword] = self._members(node, keyword)
        elif keyword == "allOf":
            node.all_of.extend(self._members(node, keyword))
        elif keyword == "anyOf":
            node.any_of.append(self._members(node, keyword))
        elif keyword == "$ref":
            self._refer(node, value)
        elif keyword == "$format" and "pattern" in node.rewritten.keywords:
            node.all_of.append({"pattern": value})
        elif keyword == "$format":
            node.own["pattern"] = value
        elif keyword == "pattern":
            node.own[keyword] = self._name("patternProperties", value)
        else:
            node.own[keyword] = value

    def _soften(self, node: _Subschema, keyword: str) -> None:
        """Keep what still follows from an unenforced keyword."""
        keywords = node.rewritten.keywords
        if keyword in ("const", "enum"):
            values = listed_values({keyword: keywords[keyword]}) or []
            held = [value for value in values if is_writable(value)]
            types = sorted({type_of(value) for value in values if not is_writable(value)})
            if held:
                node.any_of.append([{"enum": held}, {"type": types}])
            elif "type" not in keywords:
                node.own["type"] = types
        elif (
            keyword in _CLOSED_BOUND
            and _CLOSED_BOUND[keyword] not in keywords
            and is_exact(keywords[keyword])
        ):
            node.own[_CLOSED_BOUND[keyword]] = keywords[keyword]
        elif keyword == "oneOf":
            node.any_of.append(self._members(node, keyword))
        elif keyword == "if" and "then" in keywords and "else" in keywords:
            branches = [self._child(node, branch, None, keywords[branch]) for branch in ("then", "else")]
            node.any_of.append(branches)

    def _members(self, node: _Subschema, keyword: str) -> list[Any]:
        values = node.rewritten.keywords[keyword]
        return [self._child(node, keyword, str(index), value) for index, value in enumerate(values)]

    def _child(self, node: _Subschema, keyword: str, name: str | None, schema: Any) -> Any:
        found_in = node.rewritten.place_of(keyword)
        named = name is not None and found_in != "additionalProperties"
        suffix = f"/{escaped(found_in)}" + (f"/{escaped(name)}" if name is not None and named else "")
        # A declared name that also matches a pattern has both subschemas.
        both = keyword in _MAPS and all(node.rewritten.keywords.get(other) for other in _MAPS)
        return self._relaxed(self._references.child(node.place, suffix, schema), node.merged or both)

    def _refer(self, node: _Subschema, reference: str) -> None:
        target = self._references.resolve(reference, node.place.base)
        if target is None:
            # A document of the standard, which the validator contains: `check_references` refuses all others.
            self._unenforced[UnenforcedKeyword("$ref", f"{node.place.pointer}/$ref")] = None
            return
        key = (target.pointer, node.merged)
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            self._waiting.append((target, node.merged))
        node.own["$ref"] = f"#/$defs/{self._names[key]}"

    def _name(self, keyword: str, pattern: str) -> str:
        if keyword == "properties":
            return pattern
        found = translate(pattern)
        return pattern if found is None else found.source

    def _joined(self, node: _Subschema) -> Any:
        """Join the parts in the request's order of properties.

        The subschema's own keywords come first, unless an applicator precedes them.
        """
        made = dict(node.own)
        if len(made.get("type", "")) == 1 and isinstance(made["type"], list):
            made["type"] = made["type"][0]
        all_of = node.all_of + [{"anyOf": options} for options in node.any_of[1:]]
        applied: dict[str, Any] = {"anyOf": node.any_of[0]} if node.any_of else {}
        if all_of:
            applied["allOf"] = all_of
        if not made and not node.any_of and len(all_of) == 1:
            return all_of[0]
        keywords = list(node.rewritten.keywords)
        first = next((keyword for keyword in keywords if keyword in ("properties", *_IN_PLACE)), None)
        return made | applied if first in (None, "properties", "$ref", "const", "enum") else applied | made
