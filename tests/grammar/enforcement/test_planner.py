"""Which backend a schema goes to, and that this is decided without either of them."""

import subprocess
import sys
import time
from typing import Any

import pytest

from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.enforcement_plan import EnforcementPlan
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import AnalysisFailed, GrammarInvalid, GrammarTooLarge, SchemaNotEnforceable

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}


def plan_for(schema: Any, **options: Any) -> EnforcementPlan:
    return plan_enforcement(
        schema, **{"strict": False, "param": "schema", "limits": SchemaLimits(), **options}
    )


@pytest.mark.parametrize(
    ("schema", "backends"),
    [
        (WEATHER, {"llguidance", "xgrammar"}),
        ({**WEATHER, "additionalProperties": {}}, {"llguidance"}),
        ({"anyOf": [WEATHER, {"type": "null"}]}, {"llguidance", "xgrammar"}),
        ({"type": "string", "maxLength": 3}, {"llguidance"}),
        ({**WEATHER, "required": [], "minProperties": 2}, {"xgrammar"}),
        (True, {"llguidance", "xgrammar"}),
        ({"const": 10**400}, {"llguidance"}),
    ],
)
def test_backends(schema: Any, backends: set[str]) -> None:
    assert plan_for(schema).backends == backends


def test_a_schema_of_one_backend_is_relaxed_for_the_other() -> None:
    schema = {**WEATHER, "required": [], "minProperties": 2}
    relaxed = plan_for(schema, backends=frozenset({"llguidance"}))
    assert relaxed.enforcement == "validated" and relaxed.backends == {"llguidance"}
    with pytest.raises(SchemaNotEnforceable):
        plan_for(schema, strict=True, backends=frozenset({"llguidance"}))
    with pytest.raises(SchemaNotEnforceable):
        plan_for({"type": "string", "maxLength": 3}, backends=frozenset({"xgrammar"}))


def test_strict_names_keyword_and_place() -> None:
    schema = {"properties": {"a/b": {"anyOf": [{"type": "null"}, {"uniqueItems": True}]}}}
    with pytest.raises(SchemaNotEnforceable, match="uniqueItems") as caught:
        plan_for(schema, strict=True, param="tools[0].function.parameters")
    assert caught.value.pointer == "/properties/a~1b/anyOf/1/uniqueItems"
    assert caught.value.param == "tools[0].function.parameters"


def test_a_discriminated_union_is_enforced() -> None:
    def member(kind: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"kind": {"const": kind, "type": "string"}, "n": {"type": "integer"}},
            "required": ["kind", "n"],
        }

    schema = {
        "$defs": {"Cat": member("cat"), "Dog": member("dog")},
        "type": "object",
        "properties": {
            "pet": {
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                "discriminator": {
                    "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                    "propertyName": "kind",
                },
            }
        },
        "required": ["pet"],
    }
    assert plan_for(schema, strict=True).enforcement == "full"


def test_following_references_is_bounded() -> None:
    """60 subschemas that refer to one another inside each other: more than the limit once they are followed."""
    schema: Any = {"type": "null"}
    for level in range(14):
        schema = {"properties": {"a": schema, "b": {"$ref": "#" + "/properties/a" * level}}}
    with pytest.raises(GrammarTooLarge):
        plan_for(schema, limits=SchemaLimits(max_nodes=60))


def test_ordinary_schemas_take_milliseconds() -> None:
    schema = {
        "type": "object",
        "properties": {f"field{index}": {"type": "string", "format": "date"} for index in range(50)},
    }
    best = min(_seconds(schema) for _ in range(5))
    assert best < 0.05


def _seconds(schema: Any) -> float:
    started = time.perf_counter()
    plan_for(schema)
    return time.perf_counter() - started


@pytest.mark.parametrize("schema", [None, "x", 3, [{}]])
def test_no_schema(schema: Any) -> None:
    with pytest.raises(GrammarInvalid):
        plan_for(schema)


def test_no_backend_is_imported() -> None:
    program = (
        "import sys, loraplex.grammar.enforcement.planner, loraplex.grammar.json_schema.validator; "
        "print([name for name in ('torch', 'transformers', 'xgrammar', 'llguidance') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def _refers_to_all(keyword: str) -> dict[str, Any]:
    """Definitions each of which refers to every other one."""
    names = [f"d{number}" for number in range(60)]
    everything = {keyword: [*({"$ref": f"#/$defs/{name}"} for name in names), {"type": "string"}]}
    return {"$ref": "#/$defs/d0", "$defs": dict.fromkeys(names, everything)}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"enum": [f"{option}-{value}" for value in range(30)]} for option in range(300)]},
        {"oneOf": [*({"const": [option] * 50} for option in range(120)), {"const": [1] * 50}]},
        {"oneOf": [{"type": "object", "minProperties": least} for least in range(1_000)]},
        {"patternProperties": {f"^p{number:04}_": {} for number in range(4_000)}},
        _refers_to_all("oneOf"),
        _refers_to_all("anyOf"),
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3_000)} | {"d3000": {}},
        },
    ],
)
def test_no_schema_takes_long(schema: Any) -> None:
    started = time.process_time()
    plan_enforcement(schema, strict=False, param="s", limits=SchemaLimits())
    # Some tenths on an idle machine; work that grows faster than the schema would take minutes.
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("part", "pointer"),
    [
        ({"items": [{"type": "null"}], "prefixItems": [{}]}, "/x/y/items"),
        ({"properties": 5}, "/x/y/properties"),
        ({"type": 7}, "/x/y/type"),
        ({"type": {"a": 1}}, "/x/y/type"),
        ({"required": "a"}, "/x/y/required"),
        ({"$ref": 3}, "/x/y/$ref"),
        ({"format": []}, "/x/y/format"),
        ({"minimum": "a"}, "/x/y/minimum"),
        ({"not": {"pattern": "("}}, "/x/y/not/pattern"),
        ({"maxItems": 10**9}, "/x/y/maxItems"),
        ({"items": {"$ref": "#/x/z"}}, "/x/z/enum"),
    ],
)
def test_a_target_where_no_keyword_expects_a_schema_is_checked(part: Any, pointer: str) -> None:
    schema = {"allOf": [{"$ref": "#/x/y"}], "x": {"y": part, "z": {"enum": 5}, "unreached": {"type": 7}}}
    with pytest.raises((GrammarInvalid, GrammarTooLarge)) as caught:
        plan_for(schema)
    assert (caught.value.param, caught.value.pointer) == ("schema", pointer)


def test_a_format_of_such_a_target_is_held_to_strict() -> None:
    with pytest.raises(SchemaNotEnforceable) as caught:
        plan_for({"$ref": "#/x/y", "x": {"y": {"type": "string", "format": "none"}}}, strict=True)
    assert caught.value.pointer == "/x/y/format"


def test_an_older_drafts_keywords_there_mean_what_they_meant() -> None:
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    part = {"items": [{"type": "null"}], "additionalItems": False, "dependencies": {"a": ["b"]}}
    plan = plan_for({**draft, "allOf": [{"$ref": "#/x/y"}], "x": {"y": part}})
    assert [(each.keyword, each.pointer) for each in plan.unenforced] == [
        ("dependentRequired", "/x/y/dependentRequired")
    ]
    assert plan.schema["$defs"]["d0"] == {"prefixItems": [{"type": "null"}], "items": False}  # type: ignore[index]


class Panic(BaseException):
    """As the bindings of a Rust library raise it."""


@pytest.mark.parametrize("error", [KeyError("secret"), RecursionError("secret"), Panic("secret")])
def test_an_unexpected_error_is_a_refusal_with_its_class(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("loraplex.grammar.enforcement.planner.recursive_groups", fail)
    with pytest.raises(AnalysisFailed) as caught:
        plan_for(WEATHER)
    assert (caught.value.param, caught.value.pointer) == ("schema", "")
    assert str(caught.value) == f"this schema cannot be analysed: {type(error).__name__}"


def test_a_lack_of_memory_is_not_blamed_on_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("loraplex.grammar.enforcement.planner.recursive_groups", fail)
    with pytest.raises(MemoryError):
        plan_for(WEATHER)


@pytest.mark.parametrize("value", [5, "^a$", "("])
def test_the_rewriters_own_keyword_means_nothing_in_a_request(value: object) -> None:
    plan = plan_for({"$format": value, "type": "string"}, strict=True)
    assert plan.enforcement == "full" and plan.schema == {"type": "string"}
