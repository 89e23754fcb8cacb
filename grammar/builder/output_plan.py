"""`OutputPlan`: one grammar of one backend for a request, and the parser of its output.

Invariant: each schema of the request is enforced exactly by that backend, or validated on the finished value.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.builder.format_tree import TreeFormat, check_beside_calls, schemas_of, text_tree
from loraplex.grammar.builder.native_source import INPUT, input_source, native_param, native_source
from loraplex.grammar.builder.schema_set import (
    PREFERRED,
    RequestedSchema,
    plan_schemas,
    validation_schema,
    value_schema,
)
from loraplex.grammar.constraints import (
    Choice,
    ContextFreeGrammar,
    JsonObject,
    JsonSchema,
    OutputConstraints,
    Regex,
    SchemaLimits,
    StructuralTag,
    Tool,
)
from loraplex.grammar.enforcement.enforcement_plan import Enforcement, EnforcementPlan, UnenforcedKeyword
from loraplex.grammar.enforcement.planner import ALL_BACKENDS
from loraplex.grammar.errors import GrammarRefused, GrammarTooLarge
from loraplex.grammar.json_schema.slips import NULLABLE
from loraplex.grammar.parsing.content_parser import ContentParser, ValidateValue
from loraplex.grammar.parsing.deltas import OutputParser
from loraplex.grammar.parsing.tool_call_parser import ToolCallFormat, ToolCallParser, ToolCallPlacement
from loraplex.grammar.spec import Backend, GrammarSpec, HeldInput
from loraplex.grammar.tools.call_syntax import CallSyntax, ToolStyle, syntax_of
from loraplex.grammar.tools.call_tree import calls_tree, text_or_calls_tree
from loraplex.grammar.tools.tool_list import arguments_schema, check_tools
from loraplex.grammar.tree import Alternation, JsonValue, Node


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """Plain data that may cross processes. `spec` None: unconstrained output. `enforcement` None: no schema applies.

    `keep_special_tokens`: control tokens mark calls, so the text must be decoded with them.

    `calls` None: no calls; `content` is then the schema, a JSON text, that validates the whole output, if any.

    `unenforced`: the keywords of its schemas that are validated, because the grammar does not enforce them. `slips`:
    those that were read in another form than their dialect has, and `nullable`.
    """

    spec: GrammarSpec | None
    enforcement: Enforcement | None = None
    keep_special_tokens: bool = False
    calls: ToolCallFormat | None = None
    content: str | None = None
    unenforced: tuple[UnenforcedKeyword, ...] = ()
    slips: tuple[str, ...] = ()

    @property
    def described_enforcement(self) -> str | None:
        """The enforcement with what was read in another form, for instance `full; read="items required"`."""
        if self.enforcement is None:
            return None
        read = " ".join(keyword for keyword in self.slips if keyword != NULLABLE)
        noted = f'; annotation="{NULLABLE}"' if NULLABLE in self.slips else ""
        return self.enforcement + (f'; read="{read}"' if read else "") + noted

    def parser(self, validate: ValidateValue) -> OutputParser:
        """Create the parser of one choice. It calls `validate` for each value that the grammar alone does not
        enforce.
        """
        return (
            ContentParser(self.content, validate)
            if self.calls is None
            else ToolCallParser(self.calls, validate)
        )


def plan_output(
    constraints: OutputConstraints,
    style: ToolStyle,
    *,
    limits: SchemaLimits,
    control_tokens: Collection[str] = (),
) -> OutputPlan:
    """Plan the grammar of a request. `control_tokens`: the texts of the tokenizer's special tokens. Raises
    `GrammarRefused`.
    """
    tools = () if constraints.tool_choice == "none" else constraints.tools
    if constraints.tool_choice == "required" and not tools:
        raise GrammarRefused("a call is required and there is no tool to call", param="tool_choice")
    if isinstance(constraints.format, ContextFreeGrammar | StructuralTag):
        return _native(constraints, constraints.format, tools, limits)
    content = None if constraints.tool_choice == "required" else constraints.format
    if tools:
        return _with_calls(constraints, content, style, limits, control_tokens)
    if content is None:
        return OutputPlan(None)
    return _content_only(constraints, content, limits)


def _native(
    constraints: OutputConstraints,
    native: ContextFreeGrammar | StructuralTag,
    tools: Sequence[Tool],
    limits: SchemaLimits,
) -> OutputPlan:
    if tools:
        param = native_param(native)
        raise GrammarRefused(f"{param} cannot be combined with tools", param=param)
    backend, source = native_source(native, limits)
    spec = GrammarSpec(
        backend=backend, source=source, fast_forward=constraints.fast_forward, close=constraints.close
    )
    return OutputPlan(spec)


def _content_only(constraints: OutputConstraints, content: TreeFormat, limits: SchemaLimits) -> OutputPlan:
    schema_set = plan_schemas(schemas_of(content), limits, backends=_backends_of(content))
    spec = _spec(constraints, schema_set.backend, _content_tree(content, schema_set.plans, limits))
    return OutputPlan(
        spec,
        schema_set.enforcement,
        content=_content_schema(schema_set.plans),
        unenforced=schema_set.unenforced,
        slips=schema_set.slips,
    )


def _with_calls(
    constraints: OutputConstraints,
    content: TreeFormat | None,
    style: ToolStyle,
    limits: SchemaLimits,
    control_tokens: Collection[str],
) -> OutputPlan:
    check_tools(constraints.tools, limits)
    syntax = syntax_of(style, beside_json=isinstance(content, JsonObject | JsonSchema))
    requested = [
        RequestedSchema(arguments_schema(tool), tool.strict, tool.param, tool.name)
        for tool in constraints.tools
    ]
    schema_set = plan_schemas([*requested, *schemas_of(content)], limits, backends=_backends_of(content))
    of_tools = dict(zip((tool.name for tool in constraints.tools), schema_set.plans, strict=False))
    of_content = schema_set.plans[len(constraints.tools) :]

    schemas = {name: plan.schema for name, plan in of_tools.items()}
    calls = calls_tree(syntax, schemas, parallel=constraints.parallel, control_tokens=control_tokens)
    if constraints.tool_choice == "required":
        tree, placement = calls, ToolCallPlacement.BE_ALL
    elif content is None:
        tree = text_or_calls_tree(syntax, calls)
        placement = ToolCallPlacement.REPLACE_TEXT if syntax.marker is None else ToolCallPlacement.FOLLOW_TEXT
    else:
        check_beside_calls(content, syntax)
        tree = Alternation((calls, _content_tree(content, of_content, limits)))
        placement = ToolCallPlacement.REPLACE_TEXT

    # A regular expression may match text that is parsed as a call; only validation then checks its arguments.
    ambiguous = isinstance(content, Regex)
    select_schema = value_schema if ambiguous else validation_schema
    argument_schemas = {name: select_schema(plan) for name, plan in of_tools.items()}
    return OutputPlan(
        _spec(constraints, schema_set.backend, tree, _inputs(constraints.tools, syntax, limits)),
        "validated" if ambiguous else schema_set.enforcement,
        any(token in control_tokens for token in syntax.tokens),
        ToolCallFormat(syntax, placement, argument_schemas, _content_schema(of_content)),
        unenforced=schema_set.unenforced,
        slips=schema_set.slips,
    )


def _content_tree(content: TreeFormat, plans: Sequence[EnforcementPlan], limits: SchemaLimits) -> Node:
    if isinstance(content, Regex | Choice):
        return text_tree(content, limits)
    return JsonValue(plans[0].schema)


def _content_schema(plans: Sequence[EnforcementPlan]) -> str | None:
    return validation_schema(plans[0]) if plans else None


def _backends_of(content: TreeFormat | None) -> frozenset[Backend]:
    """Return the backends that read the format; only one reads regular expressions as documented."""
    return frozenset({PREFERRED}) if isinstance(content, Regex) else ALL_BACKENDS


def _spec(
    constraints: OutputConstraints, backend: Backend, tree: Node, inputs: tuple[HeldInput, ...] = ()
) -> GrammarSpec:
    emit = emit_llguidance.emit if backend == "llguidance" else emit_xgrammar.emit
    return GrammarSpec(
        backend=backend,
        source=emit(tree),
        fast_forward=constraints.fast_forward,
        close=constraints.close,
        inputs=inputs,
    )


def _inputs(tools: Sequence[Tool], syntax: CallSyntax, limits: SchemaLimits) -> tuple[HeldInput, ...]:
    """Return the inputs of custom tools that have grammars. Raises `GrammarTooLarge`."""
    held = [(tool, input_source(tool, limits)) for tool in tools if tool.input is not None]
    size = sum(len(source) for _, source in held)
    if size > limits.max_text_bytes:
        message = f"the formats of all custom tools have {size} characters, at most {limits.max_text_bytes} are allowed"
        raise GrammarTooLarge(message, param="tools")
    return tuple(
        HeldInput(head=f'{syntax.head(tool.name)}{{"{INPUT}": "', source=source) for tool, source in held
    )
