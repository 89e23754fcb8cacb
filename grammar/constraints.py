"""`OutputConstraints`: what a request asks its answer to be, read from the request and nothing decided yet."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

JsonSchemaValue: TypeAlias = dict[str, Any] | bool


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object: `response_format` json_object."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """`strict`: refuse what the grammar alone cannot hold. `param` is the field the schema came from."""

    schema: JsonSchemaValue
    strict: bool
    param: str


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole answer matches (Rust syntax: no look-around, no back-references)."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer is one of these texts."""

    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ContextFreeGrammar:
    """Lark as llguidance reads it, or GBNF-style EBNF (rules with `::=`) as xgrammar does."""

    text: str


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """The object of `structured_outputs.structural_tag`, in xgrammar's format language."""

    tag: dict[str, Any]


OutputFormat: TypeAlias = JsonObject | JsonSchema | Regex | Choice | ContextFreeGrammar | StructuralTag


@dataclass(frozen=True, slots=True)
class Tool:
    """One function a model may call. `parameters` is the schema of its arguments; `param` the place of that schema."""

    name: str
    description: str
    parameters: JsonSchemaValue
    strict: bool
    param: str


@dataclass(frozen=True, slots=True)
class OutputConstraints:
    """`tool_choice` none means that no call can be written; named is `required` with the one tool in `tools`.

    `tools` are those that may be called. `parallel` allows more than one call per answer.
    """

    format: OutputFormat | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["none", "auto", "required"] = "none"
    parallel: bool = True
    close: bool = False
    fast_forward: bool = True


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """Bounds checked before anything is compiled; every refusal names the number.

    `max_nodes_together` and `max_patterns_bytes` are for all schemas of a request, `max_pattern_bytes` for one pattern.
    """

    max_bytes: int = 262_144
    max_depth: int = 64
    max_nodes: int = 10_000
    max_nodes_together: int = 40_000
    max_enum: int = 10_000
    max_pattern_bytes: int = 4_096
    max_patterns_bytes: int = 65_536
    max_repeat: int = 100_000
    max_tools: int = 128
    max_choices: int = 1_000
    max_text_bytes: int = 65_536
