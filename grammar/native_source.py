"""Formats that are one backend's own language: its text goes there as it is. Invariant: a schema inside a structural tag is
one that xgrammar is exact for, or it is refused.
"""

from collections.abc import Iterator
from typing import Any, Final

from loraplex.grammar.answer_form import ContextFreeGrammar, Limits, StructuralTag
from loraplex.grammar.emit_llguidance import lark_source
from loraplex.grammar.emit_xgrammar import ebnf_source, structural_tag_source
from loraplex.grammar.errors import GrammarRefused, GrammarTooLarge, SchemaNotHeld
from loraplex.grammar.routing import hold_schema
from loraplex.grammar.schema_bounds import check_bounds
from loraplex.grammar.spec import Backend

GRAMMAR: Final = "structured_outputs.grammar"
STRUCTURAL_TAG: Final = "structured_outputs.structural_tag"


def native_param(form: ContextFreeGrammar | StructuralTag) -> str:
    """The field of the request it came from."""
    return STRUCTURAL_TAG if isinstance(form, StructuralTag) else GRAMMAR


def native_source(form: ContextFreeGrammar | StructuralTag, limits: Limits) -> tuple[Backend, str]:
    """The one backend that reads this, and its source. Raises `GrammarRefused`."""
    if isinstance(form, StructuralTag):
        check_bounds(form.tag, limits=limits, param=STRUCTURAL_TAG)
        for schema in _schemas_in(form.tag):
            _check_held(schema, limits)
        return "xgrammar", structural_tag_source(form.tag)
    size = len(form.text.encode(errors="surrogatepass"))
    if size > limits.max_text_bytes:
        message = f"the grammar has {size} bytes, at most {limits.max_text_bytes} are allowed"
        raise GrammarTooLarge(message, param=GRAMMAR)
    if "::=" in form.text:
        return "xgrammar", ebnf_source(form.text)
    return "llguidance", lark_source(form.text)


def _schemas_in(tag: dict[str, Any]) -> Iterator[Any]:
    """The schemas of the formats of a tag, from `json_schema` outside in; what is inside a schema is not looked at."""
    open_values: list[Any] = [tag]
    while open_values:
        value = open_values.pop()
        if isinstance(value, list):
            open_values.extend(value)
        elif isinstance(value, dict) and value.get("type") == "json_schema":
            if value.get("style", "json") != "json":
                raise GrammarRefused(
                    'of the styles of "json_schema" only "json" is held', param=STRUCTURAL_TAG
                )
            yield value.get("json_schema")
        elif isinstance(value, dict):
            open_values.extend(value.values())


def _check_held(schema: Any, limits: Limits) -> None:
    holding = hold_schema(schema, strict=True, param=STRUCTURAL_TAG, limits=limits)
    if "xgrammar" not in holding.backends:
        raise SchemaNotHeld(
            "a schema in a structural tag needs a keyword that only other formats hold", param=STRUCTURAL_TAG
        )
