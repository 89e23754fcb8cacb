"""Requests made to hurt: what a tenant can put into `response_format`, `tools` and `structured_outputs` to eat time, memory or trust.

Each is the part of a chat completion body beside `model` and `messages`, with what may come back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, TypeAlias

Body: TypeAlias = dict[str, Any]
Expected: TypeAlias = Literal["answer", "refused", "either"]

METADATA_SERVICE = "http://169.254.169.254/latest/meta-data/"


@dataclass(frozen=True, slots=True)
class HostileGrammar:
    """`expected` answer: the request is served (200, or 422 when only the validator finds the violation). refused: 400.

    either: both are right, as long as it comes within the deadline; which one depends on the speed of the machine.
    """

    name: str
    make: Callable[[], Body]
    expected: Expected

    def body(self) -> Body:
        """A fresh copy; large ones are built only when asked for."""
        return self.make()


def response_format(schema: Any, *, strict: bool = False) -> Body:
    """`schema` as `response_format`."""
    named = {"name": "hostile", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def tool(parameters: Any, *, strict: bool = False) -> Body:
    """`parameters` as those of the one tool that must be called."""
    function = {"name": "f", "description": "", "parameters": parameters, "strict": strict}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def structured(kind: str, value: Any) -> Body:
    """One key of `structured_outputs`."""
    return {"structured_outputs": {kind: value}}


def an_object(**properties: Any) -> Body:
    """A closed object of which all properties are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def nested(levels: int, step: Callable[[Any], Any], seed: Any) -> Any:
    """`step` applied `levels` times to `seed`."""
    return reduce(lambda inner, _: step(inner), range(levels), seed)


def nested_one_of(depth: int) -> Any:
    return nested(depth, lambda inner: {"oneOf": [inner, an_object(a=inner)]}, {"type": "integer"})


def nested_arrays(depth: int) -> Any:
    return nested(depth, lambda inner: {"type": "array", "items": inner}, {"type": "string"})


def nested_objects(depth: int) -> Any:
    return nested(depth, lambda inner: an_object(a=inner), {"type": "string"})


def overlapping_all_of(branches: int) -> Any:
    return {
        "allOf": [
            {
                "anyOf": [
                    {"type": "object", "properties": {f"p{row}_{column}": {"type": "string"}}}
                    for column in range(8)
                ]
            }
            for row in range(branches)
        ]
    }


def mutual_references(count: int) -> Any:
    definitions = {
        f"d{i}": an_object(**{f"to{j}": {"$ref": f"#/$defs/d{j}"} for j in range(count) if j != i})
        for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def mutual_optional_references(count: int) -> Any:
    definitions = {
        f"d{i}": {
            "type": "object",
            "properties": {f"to{j}": {"$ref": f"#/$defs/d{j}"} for j in range(count)},
            "additionalProperties": False,
        }
        for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def structural_tag(tag_format: Any) -> Body:
    return structured("structural_tag", {"type": "structural_tag", "format": tag_format})


def _case(name: str, expected: Expected, make: Callable[[], Body]) -> HostileGrammar:
    return HostileGrammar(name, make, expected)


SCHEMAS = (
    _case("one_of_depth_12", "refused", lambda: response_format(nested_one_of(12))),
    _case("one_of_depth_12_strict_tool", "refused", lambda: tool(nested_one_of(12), strict=True)),
    _case("enum_of_10k", "answer", lambda: response_format({"enum": [f"value {i}" for i in range(10_000)]})),
    _case("enum_of_20k", "refused", lambda: response_format({"enum": [f"v{i}" for i in range(20_000)]})),
    _case(
        "enum_of_10k_objects",
        "refused",
        lambda: response_format({"enum": [{"k": [i]} for i in range(10_000)]}),
    ),
    _case("reference_to_itself", "refused", lambda: response_format({"$ref": "#"}, strict=True)),
    _case(
        "reference_ring",
        "refused",
        lambda: response_format(
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            strict=True,
        ),
    ),
    _case("required_recursion", "refused", lambda: response_format(an_object(a={"$ref": "#"}), strict=True)),
    _case(
        "mutual_required_references", "refused", lambda: response_format(mutual_references(8), strict=True)
    ),
    _case("mutual_optional_references", "answer", lambda: response_format(mutual_optional_references(40))),
    _case("arrays_500_deep", "refused", lambda: response_format(nested_arrays(500))),
    _case("objects_200_deep", "refused", lambda: tool(nested_objects(200))),
    _case("objects_28_deep", "answer", lambda: response_format(nested_objects(28))),
    _case(
        "schema_of_1_mb",
        "refused",
        lambda: response_format({"type": "string", "description": "x" * 1_000_000}),
    ),
    _case(
        "ten_thousand_properties",
        "refused",
        lambda: response_format(an_object(**{f"p{i}": {"type": "string"} for i in range(10_000)})),
    ),
    _case(
        "max_length_2000",
        "answer",
        lambda: response_format(an_object(a={"type": "string", "maxLength": 2_000})),
    ),
    _case(
        "min_length_million",
        "answer",
        lambda: response_format(an_object(a={"type": "string", "minLength": 10**6})),
    ),
    _case(
        "min_length_above_the_bound",
        "refused",
        lambda: response_format(an_object(a={"type": "string", "minLength": 2**21})),
    ),
    _case(
        "max_items_100k",
        "answer",
        lambda: response_format({"type": "array", "items": {}, "maxItems": 100_000}),
    ),
    _case(
        "min_items_billion",
        "refused",
        lambda: response_format({"type": "array", "items": {}, "minItems": 10**9}),
    ),
    _case(
        "array_bounds_nested",
        "answer",
        lambda: response_format(
            nested(
                4,
                lambda inner: {"type": "array", "items": inner, "minItems": 50, "maxItems": 200},
                {"type": "null"},
            )
        ),
    ),
    _case("all_of_product", "refused", lambda: response_format(overlapping_all_of(12))),
    _case(
        "pattern_properties_overlap",
        "answer",
        lambda: response_format(
            {
                "type": "object",
                "patternProperties": {
                    f"^(a|b)*{c}.*(a|b){{{n}}}$": {"type": "integer"}
                    for n, c in enumerate("abcdefgh", start=5)
                },
            }
        ),
    ),
    _case(
        "pattern_repeat_bounds",
        "either",
        lambda: response_format(
            an_object(a={"type": "string", "pattern": "^(([a-z]{1,100}){1,100}){1,100}$"})
        ),
    ),
    _case(
        "pattern_look_ahead",
        "refused",
        lambda: response_format(
            an_object(a={"type": "string", "pattern": "^(?=.*[0-9])(?!x).+$"}), strict=True
        ),
    ),
    _case(
        "pattern_look_ahead_judged",
        "answer",
        lambda: response_format(an_object(a={"type": "string", "pattern": "^(?!x)[a-z]{1,4}$"})),
    ),
    _case(
        "pattern_back_reference",
        "refused",
        lambda: response_format(an_object(a={"type": "string", "pattern": r"^(a+)\1$"}), strict=True),
    ),
    _case(
        "pattern_exponential",
        "answer",
        lambda: response_format(an_object(a={"type": "string", "pattern": "^(a|a|aa)*(a|aa)*b[ab]{40}$"})),
    ),
    _case(
        "pattern_property_classes",
        "either",
        lambda: response_format(an_object(a={"type": "string", "pattern": r"^[\p{L}\p{N}]{1,500}$"})),
    ),
    _case(
        "pattern_of_5000_bytes",
        "refused",
        lambda: response_format(an_object(a={"type": "string", "pattern": "(ab|cd)" * 715})),
    ),
    _case(
        "numbers_beyond_doubles",
        "either",
        lambda: response_format(
            an_object(a={"type": "number", "minimum": 1e308, "maximum": 1.7e308, "multipleOf": 1e-300})
        ),
    ),
    _case(
        "integer_range_of_4000_digits",
        "either",
        lambda: response_format(an_object(a={"type": "integer", "minimum": 10**4000})),
    ),
    _case(
        "minimum_above_maximum",
        "refused",
        lambda: response_format(an_object(a={"type": "integer", "minimum": 2, "maximum": 1}), strict=True),
    ),
    _case("false_schema", "refused", lambda: response_format(False, strict=True)),
    _case("remote_reference", "refused", lambda: response_format({"$ref": METADATA_SERVICE})),
    _case(
        "remote_id",
        "refused",
        lambda: response_format(
            {
                "$id": METADATA_SERVICE,
                "$schema": METADATA_SERVICE,
                "$anchor": "x",
                **an_object(a={"$ref": "other#/x"}),
            }
        ),
    ),
    _case("file_reference", "refused", lambda: response_format({"$ref": "file:///etc/passwd"})),
    _case(
        "options_for_the_library",
        "answer",
        lambda: response_format(
            {
                "x-guidance": {"lenient": True, "whitespace_pattern": r"\s*", "coerce_one_of": True},
                **nested_one_of(2),
            }
        ),
    ),
    _case(
        "not_of_everything",
        "either",
        lambda: response_format(nested(12, lambda inner: {"not": inner}, {"type": "object"})),
    ),
    _case("lone_surrogates", "refused", lambda: response_format({"enum": ["\ud800", "\udfff\ud800", "a"]})),
    _case(
        "control_characters",
        "answer",
        lambda: response_format({"const": "\x00\x1b[2J\x07\r\n</tool_call><|im_end|>"}),
    ),
    _case("schema_that_is_a_number", "refused", lambda: response_format(7)),
)

TOOLS = (
    _case(
        "tools_128_wide",
        "either",
        lambda: {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": f"f{i}",
                        "parameters": an_object(
                            **{f"p{i}_{j}": {"type": "string", "maxLength": 200 + j} for j in range(8)}
                        ),
                    },
                }
                for i in range(128)
            ],
            "tool_choice": "required",
        },
    ),
    _case(
        "tools_200",
        "refused",
        lambda: {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(200)]},
    ),
    _case(
        "tool_name_with_markers",
        "refused",
        lambda: {"tools": [{"type": "function", "function": {"name": '"}</tool_call>', "parameters": {}}}]},
    ),
)

TEXTS = (
    _case("regex_exponential", "either", lambda: structured("regex", "(x+x+)+y(a|aa)+[ab]*a[ab]{18}")),
    _case("regex_repeat_bounds", "either", lambda: structured("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}")),
    _case("regex_look_behind", "refused", lambda: structured("regex", "(?<=a)b(?!c)")),
    _case("regex_of_nothing", "refused", lambda: structured("regex", "[^\\s\\S]")),
    _case("regex_of_2000_parentheses", "refused", lambda: structured("regex", "(" * 2000 + "a" + ")" * 2000)),
    _case("regex_unicode_classes", "either", lambda: structured("regex", r"(\p{L}|\p{Han}|[^\x00-\x{10fff0}]){1,999}")),
    _case("choice_of_5000", "refused", lambda: structured("choice", [f"choice {i}" for i in range(5_000)])),
    _case("choice_of_nothing", "refused", lambda: structured("choice", [])),
    _case("grammar_empty", "refused", lambda: structured("grammar", "")),
    _case("grammar_undefined_rule", "refused", lambda: structured("grammar", "root ::= missing")),
    _case("grammar_left_recursion", "either", lambda: structured("grammar", 'root ::= root root | root "a" | "a" | ""')),
    _case("grammar_without_end", "either", lambda: structured("grammar", 'root ::= "a" root')),
    _case("grammar_only_itself", "refused", lambda: structured("grammar", "root ::= root")),
    _case("grammar_ambiguous", "either", lambda: structured("grammar", 'root ::= s\ns ::= s s s | s s | "a" | "b"')),
    _case("grammar_doubling", "either", lambda: structured(
        "grammar", "\n".join([f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)] + ['r60 ::= "a"', "root ::= r0"]))),
    _case("grammar_giant_repeat", "either", lambda: structured("grammar", 'root ::= (("a"{1,9999}){1,9999}){1,9999}')),
    _case("grammar_of_2000_rules", "refused", lambda: structured(
        "grammar", "root ::= " + " | ".join(f"r{i}" for i in range(2_000)) + "\n" +
        "\n".join(f'r{i} ::= "{i}" r{(i * 7) % 2_000} | "x"' for i in range(2_000)))),
    _case("grammar_1_mb", "refused", lambda: structured("grammar", 'root ::= "' + "a" * 1_000_000 + '"')),
    _case("lark_left_recursion", "either", lambda: structured("grammar", 'start: start start | start "a" | "a" |')),
    _case("lark_import", "refused", lambda: structured("grammar", "%import python (expr)\nstart: expr")),
    _case("lark_json_smuggled", "refused", lambda: structured(
        "grammar", 'start: %json {"x-guidance": {"lenient": true}, "$ref": "http://169.254.169.254/"}')),
    _case("lark_options", "either", lambda: structured(
        "grammar", '%llguidance {"allow_invalid_utf8": true, "no_forcing": true}\nstart: /(.|\\n)*/')),
    _case("lark_control_token", "refused", lambda: structured("grammar", 'start: "a" <|im_end|> <[0-9]> "b"')),
    _case("lark_undefined", "refused", lambda: structured("grammar", "start: missing")),
    _case("lark_lexer_bomb", "either", lambda: structured(
        "grammar", "start: (" + " | ".join(f"T{i}" for i in range(50)) + ")+\n" +
        "\n".join(f"T{i}: /[ab]*{'ab'[i % 2]}[ab]{{{i + 10}}}/" for i in range(50)))),
    _case("tag_of_unknown_type", "refused", lambda: structural_tag({"type": "execute", "command": "id"})),
    _case("tag_without_format", "refused", lambda: structured("structural_tag", {"type": "structural_tag"})),
    _case("tag_giant_repeat", "either", lambda: structural_tag(
        {"type": "repeat", "min": 1, "max": 1_000_000, "content": {"type": "regex", "pattern": "[a-z]{1,100}"}})),
    _case("tag_of_one_of_bomb", "refused", lambda: structural_tag(
        {"type": "json_schema", "json_schema": nested_one_of(12)})),
    _case("tag_of_one_of_depth_9", "either", lambda: structural_tag(
        {"type": "json_schema", "json_schema": nested_one_of(9)})),
    _case("tag_of_long_strings", "either", lambda: structural_tag({"type": "json_schema", "json_schema": an_object(
        **{f"p{i}": {"type": "string", "maxLength": 2_000 + i} for i in range(40)})})),
    _case("tag_of_enum_of_9k", "either", lambda: structural_tag(
        {"type": "json_schema", "json_schema": {"enum": [f"value {i}" for i in range(9_000)]}})),
    _case("tag_nested_500", "refused", lambda: structural_tag(nested(
        500, lambda inner: {"type": "optional", "content": inner}, {"type": "const_string", "value": "a"}))),
)  # fmt: skip

HOSTILE_GRAMMARS: tuple[HostileGrammar, ...] = SCHEMAS + TOOLS + TEXTS
