"""`OutputConstraints`: what a request demands of its output, parsed from the request; no backend is chosen yet."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

JsonSchemaValue: TypeAlias = dict[str, Any] | bool


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object: `response_format` json_object."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """`strict`: refuse the schema if no grammar enforces all of it. `param` is the request field of the schema."""

    schema: JsonSchemaValue
    strict: bool
    param: str


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole output matches (Rust syntax: no look-around, no back-references)."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The output is one of these texts."""

    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ContextFreeGrammar:
    """A grammar in Lark as llguidance reads it, or in GBNF-style EBNF (rules with `::=`) as xgrammar reads it."""

    text: str


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A structural tag in xgrammar's format language. `param` is the request field that has it."""

    tag: dict[str, Any]
    param: str = "structured_outputs.structural_tag"


OutputFormat: TypeAlias = JsonObject | JsonSchema | Regex | Choice | ContextFreeGrammar | StructuralTag


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that a model may call. `parameters` is the schema of its arguments; `param` is the place of that
    schema in the request.

    `input`: a custom tool, whose arguments are one member `input`, a text that this format holds.
    """

    name: str
    description: str
    parameters: JsonSchemaValue
    strict: bool
    param: str
    input: Regex | ContextFreeGrammar | None = None


@dataclass(frozen=True, slots=True)
class OutputConstraints:
    """The format and the tool calls that a request allows.

    `tool_choice` none means that no call can be written. A named tool is `required` with that one tool in `tools`.

    `tools` are those that may be called. `parallel` allows more than one call in one output.
    """

    format: OutputFormat | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["none", "auto", "required"] = "none"
    parallel: bool = True
    close: bool = False
    fast_forward: bool = True


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """Limits that are tested before anything is compiled; every refusal contains the number.

    `max_nodes_together` and `max_patterns_bytes` are for all schemas of a request, `max_pattern_bytes` for one
    pattern. `max_length` is that of a string's characters, `max_repeat` that of all else that repeats.
    """

    max_bytes: int = 262_144
    max_depth: int = 64
    max_nodes: int = 10_000
    max_nodes_together: int = 40_000
    max_enum: int = 10_000
    max_pattern_bytes: int = 4_096
    max_patterns_bytes: int = 65_536
    max_repeat: int = 100_000
    max_length: int = 1_048_576
    max_tools: int = 128
    max_choices: int = 1_000
    max_text_bytes: int = 65_536
