"""Every class of code points as const, member of enum, property name and pattern: grammar, validator and `json.loads` agree."""

import json
from typing import Any, Final

import pytest
from tests.grammar.grammar_walks import Walks

from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.enforcement_plan import EnforcementPlan
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import GrammarInvalid, SchemaNotSatisfied
from loraplex.grammar.json_escapes import has_escapes
from loraplex.grammar.json_schema.validator import Validator
from loraplex.grammar.spec import Backend

C0: Final = tuple(map(chr, range(0x20)))
OTHERS: Final = (
    *("\x7f", "\x80", "\x85", "\x9f", "\xa0", "\u200b", "\u2028", "\u2029", "\ufeff", "\ufffd", "\uffff"),
    *("é", "中", "\ud7ff", "\ue000", "😀", "\U0010ffff", '"', "\\", "/", " ", "a\x01b\x7fc\né"),
)
BACKENDS: Final[tuple[Backend, ...]] = ("llguidance", "xgrammar")


@pytest.fixture(scope="module")
def walks() -> Walks:
    return Walks(byte_vocabulary())


def plan_for(schema: Any, *, strict: bool = False) -> EnforcementPlan:
    return plan_enforcement(schema, strict=strict, param="schema", limits=SchemaLimits())


def spellings(text: str) -> list[str]:
    """Texts that may spell it: some are no JSON, and some are of another value."""
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in text if ord(letter) < 0x10000)
    written = json.dumps(text, ensure_ascii=False)
    return list(
        dict.fromkeys(
            (
                *(written, json.dumps(text), written.replace("\x7f", "\\u007f"), f'"{escaped}"', f'"{text}"'),
                *(f'"{escaped.upper().replace("U", "u")}"', f'"{escaped}a"', '"\\u0002"', '"\\u00e8"', '"~"'),
            )
        )
    )


def is_value(text: str, value: Any) -> bool:
    try:
        return bool(json.loads(text) == value)
    except ValueError:
        return False


@pytest.mark.parametrize("text", [*C0, *OTHERS], ids=ascii)
def test_as_a_value_and_beside_others_and_as_a_name(walks: Walks, text: str) -> None:
    name = {
        "type": "object",
        "properties": {text: {"const": 1}},
        "required": [text],
        "additionalProperties": False,
    }
    for schema, frame, value in (
        ({"const": text}, "%s", text),
        ({"enum": ["b", text]}, "%s", text),
        ({"const": {"x": [text]}}, '{"x":[%s]}', {"x": [text]}),
        (name, "{%s:1}", {text: 1}),
    ):
        plan = plan_for(schema, strict=True)
        validator = Validator(schema)
        for backend in plan.backends:
            start = walks.start(plan.schema, backend)
            documents = [frame.replace("%s", each) for each in spellings(text)]
            accepted = [each for each in documents if walks.accepts(start, each)]
            assert accepted, (backend, schema)
            for each in accepted:
                assert is_value(each, value), each
                validator.validate(each)
            assert walks.accepts(start, '"b"') == ("enum" in schema)


def test_both_backends_hold_texts_of_any_characters() -> None:
    assert plan_for({"enum": ["\x01", "b", "\x7f", "\u2028"]}).backends == set(BACKENDS)


@pytest.mark.parametrize("text", [*C0, *OTHERS[:-1]], ids=ascii)
def test_as_a_pattern(walks: Walks, text: str) -> None:
    code = ord(text)
    sources = [f"^\\u{{{code:x}}}$", f"^[\\u{{{code:x}}}]$", f"^[^\\u{{{code:x}}}]$"]
    sources += [f"^\\x{code:02x}$"] if code < 0x100 else []
    for source in sources:
        schema = {"type": "string", "pattern": source}
        start = walks.start(plan_for(schema, strict=True).schema, "llguidance")
        accepted = [each for each in spellings(text) if walks.accepts(start, each)]
        assert bool(accepted) != source.startswith("^[^") or '"~"' in accepted
        for each in accepted:
            assert is_value(each, text) != source.startswith("^[^"), (source, each)


def test_half_of_a_surrogate_pair_is_no_text(walks: Walks) -> None:
    halves: tuple[Any, ...] = ({"const": "\ud800"}, {"enum": ["a", "\udfff"]}, {"properties": {"\ud83d": {}}})
    for schema in halves:
        with pytest.raises(GrammarInvalid, match="half of a surrogate pair"):
            plan_for(schema)
    start = walks.start(plan_for({"type": "string"}).schema, "llguidance")
    assert walks.accepts(start, '"\\ud83d\\ude00"')
    for text in ('"\\ud83d"', '"\\ude00"', '"\\ud83dx"', '"\\ud83d\\u0041"', '"\\ude00\\ud83d"'):
        assert not walks.accepts(start, text)


def test_a_text_may_spell_any_character_and_counts_it_once(walks: Walks) -> None:
    start = walks.start(plan_for({"type": "string", "minLength": 1, "maxLength": 1}).schema, "llguidance")
    for text in ('"\\u0001"', '"\\u001B"', '"\\u00e9"', '"\\ud83d\\ude00"', '"\\n"', '"\\u0041"'):
        assert walks.accepts(start, text)
    assert not walks.accepts(start, '"\\u0001\\u0002"')
    assert not walks.accepts(start, '"\x01"')


def test_a_pattern_that_only_forbids_characters_admits_no_half_spelled_one() -> None:
    """`\\u2019` begins as `\\u0019` does."""
    assert has_escapes({"pattern": "^[a-z]+$"}) and has_escapes(True)
    assert not has_escapes({"pattern": "^[^a]+$"}) and not has_escapes({"pattern": "a"})


CONTROL: Final = {"enum": ["\x01", "b"]}
OPEN: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"a": CONTROL, "ab": CONTROL, "\x1f": CONTROL, "\x7f": CONTROL},
}


@pytest.mark.parametrize(
    ("schema", "enforcement"),
    [
        ({**OPEN, "properties": {**OPEN["properties"], "c": True}, "additionalProperties": False}, "full"),
        (OPEN, "validated"),
        ({**OPEN, "additionalProperties": {"type": "integer"}}, "validated"),
        ({"type": "array", "items": OPEN}, "validated"),
        ({**OPEN, "patternProperties": {"^x": {"type": "integer"}}}, "validated"),
        ({"allOf": [OPEN, {"properties": {"c": True}}]}, "validated"),
    ],
)
def test_no_declared_name_is_written_as_another_one(walks: Walks, schema: Any, enforcement: str) -> None:
    plan = plan_for(schema)
    assert plan.enforcement == enforcement
    if enforcement == "validated":
        assert {each.keyword for each in plan.unenforced} == {"additionalProperties"}
    start, validator = walks.start(plan.schema, "llguidance"), Validator(schema)
    names = (
        "a",
        "ab",
        "abc",
        "b",
        "",
        "\\u0061",
        "a\\u0062",
        "\\u001f",
        "\\u001F",
        "\x7f",
        "\\u007f",
        "\\u007F",
    )
    for name in names:
        for value in ('"b"', '"\\u0001"', '"c"', "1"):
            for text in (f'{{"{name}":{value}}}', f'{{"{name}":{value},"c":1}}', f'[{{"{name}":{value}}}]'):
                if walks.accepts(start, text):
                    try:
                        validator.validate(text)
                    except SchemaNotSatisfied:
                        assert enforcement == "validated", text
    valid = '{"a":"\\u0001","ab":"b","\\u001f":"b","\x7f":"b","c":1}'
    valid = f"[{valid}]" if "items" in schema else valid
    validator.validate(valid)
    assert walks.accepts(start, valid)


def test_a_pattern_with_control_characters_leaves_a_strict_schema_as_it_was() -> None:
    """Its escapes are not worth what could not be held then."""
    ascii_text = {"type": "string", "pattern": "^[\\x00-\\x7f]*$"}
    merged = {"allOf": [{"properties": {"a": ascii_text}}, {"properties": {"b": True}}]}
    assert plan_for(merged, strict=True).enforcement == "full"
    assert not has_escapes(plan_for(merged).schema)
    closed = {"properties": {"a": ascii_text}, "additionalProperties": False}
    assert has_escapes(plan_for(closed).schema)


@pytest.mark.parametrize("source", [r"^\x7f$", r"^[\x01-\x1f\x7f]$", r"^[\x00-\x1f\x7f]$"])
def test_a_pattern_of_control_characters_only_is_satisfiable_in_an_open_object(
    walks: Walks, source: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": source}}}
    plan = plan_for(schema)
    assert plan.enforcement == "validated"
    assert walks.accepts(walks.start(plan.schema, "llguidance"), '{"a":"\\u007f"}')


@pytest.mark.parametrize(
    "source",
    [
        "^(" + "|".join(f"\\x{code:02x}" for code in range(0x20)) + ")$",
        r"^(\x00|\x01|[\x02-\x1f])$",
        r"^(\x01|[\x00\x02-\x1f])$",
    ],
)
def test_joined_control_characters_admit_no_quote(walks: Walks, source: str) -> None:
    plan = plan_for({"type": "string", "pattern": source})
    start = walks.start(plan.schema, "llguidance")
    assert plan.enforcement == "validated" or not walks.accepts(start, '"\\""')


def test_a_number_that_is_not_exact_frees_no_other_member(walks: Walks) -> None:
    plan = plan_for({"enum": ["a\x01", "b", 2**60]})
    assert plan.enforcement == "validated"
    start = walks.start(plan.schema, "llguidance")
    assert [each for each in ('"a\\u0001"', '"b"', '"c"', "null", "5") if walks.accepts(start, each)] == [
        '"a\\u0001"',
        '"b"',
        "5",
    ]
