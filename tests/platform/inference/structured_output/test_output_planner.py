"""Output plans: built once per tenant, large ones off the event loop, and compile-checked before use."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from loraplex.grammar.constraints import (
    Choice,
    ContextFreeGrammar,
    JsonObject,
    JsonSchema,
    OutputConstraints,
    OutputFormat,
    Regex,
    SchemaLimits,
    StructuralTag,
    Tool,
)
from loraplex.grammar.errors import AnalysisFailed, GrammarTooLarge
from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.errors import WorkersUnavailable, describe
from loraplex.platform.inference.structured_output.build_task import (
    AnalysisSetup,
    CachedPlan,
    build_plan,
    unpack_constraints,
)
from loraplex.platform.inference.structured_output.output_planner import OutputPlanner
from loraplex.platform.inference.structured_output.request_analysis import (
    RequestAnalysis,
    request_analysis_task,
)
from loraplex.platform.inference.structured_output.value_validation import ValueValidation
from loraplex.platform.parameters.json_object import BodyLimits
from loraplex.platform.workers.pool import WorkerPool

ONE, OTHER = b"1" * 32, b"2" * 32
CONTROL_TOKENS = frozenset({"<|im_end|>"})
LARGE = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(100)}}
# Each pair of alternatives is compared.
SLOW = {"oneOf": [{"const": {"a": i, "b": [1, 2, {"c": i}]}} for i in range(100)]}


class FakeCompileChecks:
    def __init__(self, error: Exception | None = None) -> None:
        self.checked: list[tuple[bytes, GrammarSpec, str | None]] = []
        self._error = error

    async def check(self, namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        self.checked.append((namespace, spec, param))
        if self._error is not None:
            raise self._error


class FakeValueValidation(ValueValidation):
    def __init__(self) -> None:
        self.validated: list[tuple[bytes, str, str]] = []

    async def validate(self, namespace: bytes, schema: str, value: str) -> None:
        self.validated.append((namespace, schema, value))


@pytest.fixture
async def analyzer() -> AsyncIterator[RequestAnalysis]:
    setup = AnalysisSetup(BodyLimits(), SchemaLimits(), CONTROL_TOKENS)
    pool = WorkerPool()
    yield RequestAnalysis(pool, request_analysis_task(setup, os.environ))
    await pool.close()


MakeComposer = Callable[..., OutputPlanner]


@pytest.fixture
def make_planner(analyzer: RequestAnalysis) -> MakeComposer:
    def make(
        compile_checks: FakeCompileChecks, validation: FakeValueValidation | None = None
    ) -> OutputPlanner:
        return OutputPlanner(
            SchemaLimits(), CONTROL_TOKENS, analyzer, compile_checks, validation or FakeValueValidation()
        )

    return make


def form_of(schema: dict[str, Any]) -> OutputConstraints:
    return OutputConstraints(
        format=JsonSchema(schema, strict=False, param="response_format.json_schema.schema")
    )


async def test_a_large_plan_is_built_once_per_tenant_and_checked_each_time(
    make_planner: MakeComposer,
) -> None:
    compile_checks = FakeCompileChecks()
    planner = make_planner(compile_checks)
    first = (await planner.plan(ONE, form_of(LARGE), ToolStyle.GENERIC)).plan
    assert (await planner.plan(ONE, form_of(dict(LARGE)), ToolStyle.GENERIC)).plan is first
    foreign = (await planner.plan(OTHER, form_of(LARGE), ToolStyle.GENERIC)).plan
    assert foreign is not first and foreign.spec == first.spec
    reordered = {"type": "object", "properties": dict(reversed(LARGE["properties"].items()))}  # type: ignore[attr-defined]
    other = (await planner.plan(ONE, form_of(reordered), ToolStyle.GENERIC)).plan
    assert other.spec != first.spec
    assert [namespace for namespace, *_ in compile_checks.checked] == [ONE, ONE, OTHER, ONE]


async def test_concurrent_requests_share_one_plan(make_planner: MakeComposer) -> None:
    planner = make_planner(FakeCompileChecks())
    forms = [planner.plan(ONE, form_of(LARGE), ToolStyle.GENERIC) for _ in range(5)]
    cached = await asyncio.gather(*forms)
    assert all(each.plan is cached[0].plan for each in cached)


async def test_only_complete_values_are_validated_and_for_their_tenant(
    make_planner: MakeComposer,
) -> None:
    validation = FakeValueValidation()
    planner = make_planner(FakeCompileChecks(), validation)
    schema = {"type": "array", "uniqueItems": True}
    responses = [await planner.plan(tenant, form_of(schema), ToolStyle.GENERIC) for tenant in (ONE, OTHER)]
    for response in responses:
        first, second = response.parser(), response.parser()
        first.feed("[1,")
        second.feed("[2]")
        assert await response.finish(second, "stop") == ([], "stop")
        assert await response.finish(first, "length") == ([], "length")
    assert validation.validated == [(ONE, json.dumps(schema), "[2]"), (OTHER, json.dumps(schema), "[2]")]


async def test_the_event_loop_runs_while_a_slow_schema_is_planned(make_planner: MakeComposer) -> None:
    longest, done = 0.0, False

    async def tick() -> None:
        nonlocal longest
        while not done:
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - begun)

    ticking = asyncio.create_task(tick())
    begun = time.perf_counter()
    await make_planner(FakeCompileChecks()).plan(ONE, form_of(SLOW), ToolStyle.GENERIC)
    took, done = time.perf_counter() - begun, True
    await ticking
    # Composed in the loop itself, it would be all of it.
    assert longest < max(0.8 * took, 0.05)


async def test_one_tenants_schemas_are_planned_one_at_a_time(make_planner: MakeComposer) -> None:
    planner, ended = make_planner(FakeCompileChecks()), list[str]()

    async def plan(namespace: bytes, schema: dict[str, Any], name: str) -> None:
        await planner.plan(namespace, form_of(schema), ToolStyle.GENERIC)
        ended.append(name)

    variants = [{**SLOW, "description": str(index)} for index in range(4)]
    greedy = [plan(ONE, schema, "greedy") for schema in variants]
    await asyncio.gather(*greedy, plan(OTHER, LARGE, "modest"))
    assert ended.index("modest") <= 1


class Unwritten(dict[str, Any]):
    """Encoding megabytes in one call blocks the interpreter."""

    def items(self) -> Any:
        raise AssertionError("written before its size was looked at")


@pytest.mark.parametrize("of", ["schema", "tag", "tool"])
async def test_a_schema_far_above_its_bound_is_not_encoded(make_planner: MakeComposer, of: str) -> None:
    large = Unwritten({"type": "object", "description": "d" * 1_000_000})
    form = form_of(large)
    if of == "tag":
        form = OutputConstraints(format=StructuralTag(large))
    if of == "tool":
        tool = Tool("f", "", large, False, "tools[0].function.parameters")
        form = OutputConstraints(tools=(tool,), tool_choice="auto")
    with pytest.raises(GrammarTooLarge, match="has more than 262144 bytes"):
        await make_planner(FakeCompileChecks()).plan(ONE, form, ToolStyle.GENERIC)


@pytest.mark.parametrize("schema", [{"enum": list(range(10_001))}, {"enum": ["a" * 300_000]}])
async def test_a_refused_schema_reaches_no_compile_check(
    make_planner: MakeComposer, schema: dict[str, Any]
) -> None:
    compile_checks = FakeCompileChecks()
    with pytest.raises(GrammarTooLarge):
        await make_planner(compile_checks).plan(ONE, form_of(schema), ToolStyle.GENERIC)
    assert compile_checks.checked == []


async def test_a_compile_check_without_a_result_ends_the_request(make_planner: MakeComposer) -> None:
    with pytest.raises(WorkersUnavailable):
        await make_planner(FakeCompileChecks(WorkersUnavailable("down"))).plan(
            ONE, form_of(LARGE), ToolStyle.GENERIC
        )


@pytest.mark.parametrize(
    ("format_", "param"),
    [
        (JsonObject(), "response_format"),
        (JsonSchema({"type": "object"}, False, "structured_outputs.json"), "structured_outputs.json"),
        (Regex("a"), "structured_outputs.regex"),
        (Choice(("a", "b")), "structured_outputs.choice"),
        (ContextFreeGrammar('start: "a"'), "structured_outputs.grammar"),
        (
            StructuralTag({"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}),
            "structured_outputs.structural_tag",
        ),
    ],
)
async def test_a_compile_check_gets_the_field_of_its_grammar(
    make_planner: MakeComposer, format_: OutputFormat, param: str
) -> None:
    compile_checks = FakeCompileChecks()
    await make_planner(compile_checks).plan(ONE, OutputConstraints(format=format_), ToolStyle.GENERIC)
    assert compile_checks.checked[0][2] == param


async def test_tools_and_a_format_are_one_grammar_named_tools(make_planner: MakeComposer) -> None:
    compile_checks = FakeCompileChecks()
    tool = Tool("f", "", {"type": "object"}, False, "tools[0].function.parameters")
    form = OutputConstraints(format=JsonObject(), tools=(tool,), tool_choice="auto")
    await make_planner(compile_checks).plan(ONE, form, ToolStyle.HERMES)
    assert [param for *_, param in compile_checks.checked] == ["tools"]


@pytest.mark.parametrize("schema", [{"type": "object"}, LARGE])
async def test_an_unexpected_error_is_logged_by_class_and_counted(
    make_planner: MakeComposer, analyzer: RequestAnalysis, monkeypatch: pytest.MonkeyPatch, schema: Any
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("secret")

    async def plan(namespace: bytes, packed: bytes) -> CachedPlan:
        return build_plan(*unpack_constraints(packed), SchemaLimits(), CONTROL_TOKENS)

    monkeypatch.setattr("loraplex.grammar.enforcement.planner.recursive_groups", fail)
    monkeypatch.setattr(analyzer, "plan", plan)
    planner = make_planner(FakeCompileChecks())
    with capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(AnalysisFailed) as refused:
                await planner.plan(ONE, form_of(schema), ToolStyle.GENERIC)
    assert refused.value.param == "response_format.json_schema.schema" and refused.value.pointer == ""
    assert describe(refused.value).row.status == 400
    assert [(line["event"], line["count"]) for line in logs] == [
        ("analysis failed", 1),
        ("analysis failed", 2),
    ]
    assert "KeyError" in logs[0]["reason"] and "secret" not in str(logs)
