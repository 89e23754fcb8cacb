"""Finds references that can lead back to their own subschema (strongly connected components, Kosaraju's algorithm)."""

from collections.abc import Mapping, Sequence
from typing import Any

from loraplex.grammar.json_schema.references import References, Target
from loraplex.grammar.json_schema.walk import subschemas


def recursive_groups(references: References) -> dict[str, int]:
    """Map the pointer of the root and of each reference's target to its component; members of one reach each other."""
    edges = _edges(references)
    order = _postorder(edges)
    reversed_edges: dict[str, list[str]] = {pointer: [] for pointer in edges}
    for pointer, targets in edges.items():
        for target in targets:
            reversed_edges[target].append(pointer)
    groups: dict[str, int] = {}
    for number, start in enumerate(reversed(order)):
        stack = [start]
        while stack:
            pointer = stack.pop()
            if pointer not in groups:
                groups[pointer] = number
                stack.extend(reversed_edges[pointer])
    return groups


def _edges(references: References) -> dict[str, list[str]]:
    edges: dict[str, list[str]] = {}
    waiting = [references.at_root()]
    while waiting:
        place = waiting.pop()
        if place.pointer in edges:
            continue
        targets = _targets(references, place)
        edges[place.pointer] = [target.pointer for target in targets]
        waiting.extend(targets)
    return edges


def _targets(references: References, place: Target) -> list[Target]:
    """Return the targets of the references in the subtree; definitions count only where they are referenced."""
    found: dict[str, Target] = {}
    stack: list[Target] = [place]
    while stack:
        here = stack.pop()
        reference = here.schema.get("$ref") if isinstance(here.schema, dict) else None
        if isinstance(reference, str):
            target = references.resolve(reference, here.base)
            if target is not None:
                found[target.pointer] = target
        for suffix, member in subschemas(here.schema):
            if not suffix.startswith(("/$defs/", "/definitions/")):
                stack.append(references.child(here, suffix, member))
    return list(found.values())


def _postorder(edges: Mapping[str, Sequence[str]]) -> list[str]:
    order: list[str] = []
    seen: set[str] = set()
    for start in edges:
        stack: list[tuple[str, Any]] = [(start, iter(edges[start]))] if start not in seen else []
        seen.add(start)
        while stack:
            pointer, targets = stack[-1]
            following = next((target for target in targets if target not in seen), None)
            if following is None:
                order.append(pointer)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(edges[following])))
    return order
