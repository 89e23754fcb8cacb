"""Checks of schemas: results as a request gets them, with the keyword that is only validated, or the place of a refusal."""

import json
import os
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.platform.inference.structured_output.test_output_planner import (
    FakeCompileChecks,
    FakeValueValidation,
)

from loraplex.grammar.errors import GrammarTooCostly
from loraplex.platform.errors import WorkersUnavailable
from loraplex.platform.inference.dependencies import GatewayDependencies, ServingConfig
from loraplex.platform.inference.schema_check import SchemaCheckResult, SchemaChecks
from loraplex.platform.inference.structured_output.build_task import AnalysisSetup
from loraplex.platform.inference.structured_output.request_analysis import (
    RequestAnalysis,
    request_analysis_task,
)
from loraplex.platform.workers.pool import WorkerPool

NAMESPACE = b"1" * 32
HELD = {"type": "object", "properties": {"pier": {"type": "string"}}, "additionalProperties": False}
UNIQUE = {"type": "object", "properties": {"piers": {"type": "array", "uniqueItems": True}}}
LARGE_UNIQUE = {
    "type": "object",
    "properties": {f"piers_{index}": {"type": "array", "uniqueItems": True} for index in range(40)},
}


class Checked:
    """Schema checks with compile checks that fail on demand."""

    def __init__(self, pool: WorkerPool) -> None:
        config = ServingConfig()
        setup = AnalysisSetup(config.body, config.grammar, frozenset())
        self.checks = FakeCompileChecks()
        dependencies = SimpleNamespace(
            config=config,
            prompts=SimpleNamespace(special_tokens=()),
            request_analysis=RequestAnalysis(pool, request_analysis_task(setup, os.environ)),
            compile_checks=self.checks,
            value_validation=FakeValueValidation(),
        )
        given = cast(GatewayDependencies, dependencies)
        dependencies.output_planner = partial(GatewayDependencies.output_planner, given)
        self.checker = SchemaChecks(given)

    async def of(self, schema: Any, *, strict: bool = False) -> SchemaCheckResult:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return await self.checker.of_text(NAMESPACE, text, strict=strict)


@pytest.fixture
async def schemas() -> AsyncIterator[Checked]:
    pool = WorkerPool()
    yield Checked(pool)
    await pool.close()


async def test_the_result_is_that_of_a_request(schemas: Checked) -> None:
    held = await schemas.of(HELD)
    assert (held.enforcement, held.backend, held.unenforced) == ("full", "llguidance", ())
    assert schemas.checks.checked[0][0] == NAMESPACE

    validated = await schemas.of(UNIQUE)
    assert validated.enforcement == "validated"
    assert [(each.keyword, each.pointer) for each in validated.unenforced] == [
        ("uniqueItems", "/properties/piers/uniqueItems")
    ]
    strict = await schemas.of(UNIQUE, strict=True)
    assert (strict.enforcement, strict.pointer) == ("refused", "/properties/piers/uniqueItems")
    assert "uniqueItems" in strict.reason


async def test_a_large_schema_is_planned_in_a_worker_with_the_same_result(schemas: Checked) -> None:
    result = await schemas.of(LARGE_UNIQUE)
    assert result.enforcement == "validated" and len(result.unenforced) == 40


async def test_a_text_that_is_no_schema_is_refused_with_its_place(schemas: Checked) -> None:
    cut_off = await schemas.of('{"type": "object",')
    assert cut_off.enforcement == "refused" and "not JSON" in cut_off.reason and "column" in cut_off.reason
    twice = await schemas.of('{"type": "object", "type": "array"}')
    assert twice.enforcement == "refused" and "twice" in twice.reason
    assert (await schemas.of("[]")).reason == "the schema must be a JSON object"
    wrong = await schemas.of({"properties": {"a": {"type": "text"}}})
    assert (wrong.enforcement, wrong.pointer) == ("refused", "/properties/a/type")


async def test_a_refused_compile_check_is_a_refusal_and_a_missing_one_an_error(schemas: Checked) -> None:
    schemas.checks._error = GrammarTooCostly("it does not compile within 4 s of CPU time", param="schema")
    costly = await schemas.of(HELD)
    assert (costly.enforcement, costly.reason) == ("refused", "it does not compile within 4 s of CPU time")
    schemas.checks._error = WorkersUnavailable("the compile-check process does not run")
    with pytest.raises(WorkersUnavailable):
        await schemas.of(HELD)
