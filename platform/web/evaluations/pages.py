"""Suites, the evaluations of an adapter's versions with their reports, and the gates of aliases, in the console.

Invariant: what an evaluation requests is requested by a key of the person who started it.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import Response

from loraplex.platform.evaluations.report import Report
from loraplex.platform.web.adapters.alias_pages import ALIAS
from loraplex.platform.web.adapters.pages import ONE, Reader, Submission, Writer
from loraplex.platform.web.adapters.version_pages import VERSION
from loraplex.platform.web.console.addresses import path_of, query_form
from loraplex.platform.web.console.form_routes import MAX_NUMBER, VersionNumber, form_page, whole_number
from loraplex.platform.web.console.page import ROWS, PageRequest
from loraplex.platform.web.evaluations.routes import BY_NAME, EvaluationId, GateBody
from loraplex.platform.web.evaluations.suites import built_in, checked_suite, new_evaluation, report_text
from loraplex.platform.web.sorting import BY_ID
from loraplex.tenants.administration import console_evaluations
from loraplex.tenants.errors import EvaluationNotFound
from loraplex.tenants.evaluations import queries, use_cases
from loraplex.tenants.evaluations.records import MAX_SEED, MAX_SUITES, EvaluationDocument, SuiteDocument
from loraplex.tenants.evaluations.use_cases import BASE
from loraplex.tenants.pages import Part
from loraplex.tenants.registry import queries as registry
from loraplex.tenants.scopes import ADAPTERS_WRITE, INFERENCE

SUITES: Final = "/console/suites"
EVALUATION: Final = f"{ONE}/evaluations/{{evaluation_id}}"
GATE: Final = f"{ALIAS}/gate"
PRODUCTION: Final = "production"
ALL_SUITES: Final[Part[str]] = Part(2 * MAX_SUITES)
"""The tenant's and the installation's."""

router = APIRouter()


class SuiteForm(BaseModel):
    """`cases`: JSONL. A file that is larger than a form goes to the API, by the page's script."""

    name: str
    cases: str


class EvaluationForm(BaseModel):
    """`baseline`: an alias, `base`, or a version's number behind `@`; empty: none."""

    suite: str
    baseline: str = ""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)


@router.get(SUITES)
async def list_suites(page: Reader) -> Response:
    part, reason = page.part(BY_NAME), page.lacks(ADAPTERS_WRITE)
    suites = page.rows(part, await page.query(queries.suites, page.tenant_id, part))
    return page.show("evaluations/suites.html", suites=suites, built_in=built_in(), reason=reason)


async def new_suite_form(page: Writer) -> dict[str, object]:
    """Return what the form of a new suite shows."""
    return {}


@form_page(
    router, f"{SUITES}/new", "evaluations/new_suite.html", new_suite_form, fields=("name",), is_page=True
)
async def create_suite(submission: Submission) -> Response:
    values, tenant_id = submission.parse(SuiteForm), submission.tenant_id
    content = values.cases.encode()
    new = await checked_suite(submission.dependencies, tenant_id, values.name, content, None)
    await submission.run(use_cases.add_suite, tenant_id, new)
    return submission.back(SUITES, f"Suite {new.name} is stored. Cases: {new.cases:,}.")


async def suite_form(page: Writer, name: str) -> dict[str, object]:
    """Return what the question about a suite shows. Raises `SuiteNotFound`."""
    return {"suite": await page.query(queries.suite, page.tenant_id, name)}


@form_page(router, f"{SUITES}/{{name}}/delete", "evaluations/delete_suite.html", suite_form)
async def delete_suite(submission: Submission, name: str) -> Response:
    await submission.run(use_cases.delete_suite, submission.tenant_id, name)
    return submission.back(SUITES, f"Suite {name} is deleted. Reports on it stay.")


@router.get(f"{ONE}/evaluations")
async def list_evaluations(page: Reader, name: str, version: VersionNumber | None = None) -> Response:
    part = page.part(BY_ID)
    found = page.rows(part, await page.query(queries.evaluations, page.tenant_id, name, version, part))
    return page.show("evaluations/list.html", name=name, version=version, evaluations=found)


async def evaluation_form(page: Writer, name: str, version: VersionNumber) -> dict[str, object]:
    """Return what the form of a new evaluation shows: the suite and the baseline of its address, or what the gate of `production`
    needs. Raises `AdapterNotFound`, `VersionNotFound`.
    """
    asked = query_form(page.http)
    async with page.reading() as session:
        gate = (await queries.gates(session, page.tenant_id, name)).get(PRODUCTION)
        suites = await queries.suites(session, page.tenant_id, ALL_SUITES)
        return {
            "name": name,
            "chosen": await registry.version(session, page.tenant_id, name, version),
            "versions": await registry.versions(session, page.tenant_id, name, Part(ROWS)),
            "aliases": await registry.aliases(session, page.tenant_id, name, Part(ROWS)),
            "suites": suites,
            "suite": asked.text("suite") or (gate.suite if gate else _newest(suites)),
            "baseline": asked.text("baseline") or PRODUCTION,
            "base": BASE,
            "reason": page.lacks(INFERENCE),
        }


@form_page(
    router,
    f"{VERSION}/evaluate",
    "evaluations/new.html",
    evaluation_form,
    fields=("suite", "baseline", "seed"),
)
async def start_evaluation(submission: Submission, name: str, version: VersionNumber) -> Response:
    values = submission.parse(EvaluationForm)
    number = whole_number(values.baseline[1:], beyond=MAX_NUMBER) if values.baseline[:1] == "@" else None
    asked = {"seed": values.seed, "key_id": "", "address": submission.client_address}
    new = await new_evaluation(submission, version, values.suite, number or values.baseline or None, **asked)
    begun = await submission.result(console_evaluations.start, submission.session, name, new)
    toast = f"{name}@{version} is evaluated on suite {begun.suite}."
    return submission.back(path_of("adapters", name, "evaluations", str(begun.id)), toast)


@router.get(EVALUATION)
async def show_evaluation(
    page: Reader, name: str, evaluation_id: EvaluationId, after: VersionNumber | None = None
) -> Response:
    """The page asks for itself again until the evaluation has ended. `after`: how many cases are skipped."""
    found, report = await _found(page, name, evaluation_id), None
    async with page.reading() as session:
        gates = await queries.gates(session, page.tenant_id, name)
        aliases = await registry.aliases(session, page.tenant_id, name, Part(ROWS))
    asked = [
        (each, gate)
        for each in aliases
        if (gate := gates.get(each.alias)) and gate.suite_sha256 == found.suite_sha256
    ]
    if found.state == "completed":
        content = await report_text(page, evaluation_id)
        report = await asyncio.to_thread(msgspec.json.decode, content, type=Report)
    template = "evaluations/evaluation.html"
    return page.show(template, evaluation=found, report=report, gates=asked, skipped=after or 0, size=ROWS)


@router.get(f"{EVALUATION}/report")
async def download_report(page: Reader, name: str, evaluation_id: EvaluationId) -> Response:
    await _found(page, name, evaluation_id)
    headers = {"content-disposition": f'attachment; filename="evaluation-{evaluation_id}.json"'}
    content = await report_text(page, evaluation_id)
    return Response(content, media_type="application/json", headers=headers)


@router.post(f"{EVALUATION}/cancel")
async def cancel_evaluation(submission: Submission, name: str, evaluation_id: EvaluationId) -> Response:
    await _found(submission, name, evaluation_id)
    await submission.run(use_cases.cancel, submission.tenant_id, evaluation_id)
    path = path_of("adapters", name, "evaluations", str(evaluation_id))
    return submission.back(path, "The evaluation is cancelled.")


async def _found(page: PageRequest, name: str, evaluation_id: EvaluationId) -> EvaluationDocument:
    """Return an evaluation of this adapter. Raises `EvaluationNotFound`."""
    found = await page.query(queries.evaluation, page.tenant_id, evaluation_id)
    if found.adapter != name:
        raise EvaluationNotFound(f"no evaluation {evaluation_id} of this adapter")
    return found


async def gate_form(page: Writer, name: str, alias: str) -> dict[str, object]:
    """Return what the form of a gate shows. Raises `AdapterNotFound`, `AliasNotFound`."""
    async with page.reading() as session:
        suites = await queries.suites(session, page.tenant_id, ALL_SUITES)
        return {
            "alias": await registry.alias(session, page.tenant_id, name, alias),
            "gate": (await queries.gates(session, page.tenant_id, name)).get(alias),
            "suites": suites,
            "newest": _newest(suites),
        }


def _newest(suites: Sequence[SuiteDocument]) -> str | None:
    """Return the name of the tenant's newest suite; None if it has none."""
    own = [each for each in suites if not each.shared]
    return max(own, key=lambda each: each.created_at).name if own else None


@form_page(router, GATE, "evaluations/gate.html", gate_form, fields=tuple(GateBody.model_fields))
async def set_gate(submission: Submission, name: str, alias: str) -> Response:
    values, tenant_id = submission.parse(GateBody), submission.tenant_id
    suite = await submission.query(queries.find_suite, tenant_id, values.suite, built_in())
    bounds = (values.min_pass, values.max_regression)
    scopes = submission.session.scopes
    await submission.run(use_cases.set_gate, tenant_id, name, alias, suite, *bounds, scopes=scopes)
    toast = f"{name}:{alias} moves to a new version only with a report on suite {suite.name}."
    return submission.back(path_of("adapters", name), toast)


@form_page(router, f"{GATE}/delete", "evaluations/delete_gate.html", gate_form)
async def delete_gate(submission: Submission, name: str, alias: str) -> Response:
    scopes = submission.session.scopes
    await submission.run(use_cases.delete_gate, submission.tenant_id, name, alias, scopes=scopes)
    return submission.back(path_of("adapters", name), f"{name}:{alias} has no gate now.")
