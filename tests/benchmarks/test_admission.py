"""`bench admission` on the stores of the test run: all three cases, their figures and demands."""

from uuid import uuid4

from tests.benchmarks.admission import LIMITED, PRICE, UNLIMITED, WITHOUT, AdmissionShape, measure_on
from tests.tenants.admission.memory_journal import MemoryJournal
from tests.tenants.billing.fixed_prices import fixed_prices

from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.database import Database
from loraplex.tenants.valkey import open_valkey


async def test_every_case_is_answered_and_compared(database: Database, valkey_url: str) -> None:
    client, said = open_valkey(valkey_url), list[str]()
    admissions = QuotaAdmissionController(
        database, client, fixed_prices(PRICE), uuid4(), AdmissionConfig(valkey_s=1.0), journal=MemoryJournal()
    )
    shape = AdmissionShape(rate=40, seconds=0.25, rounds=2, engine_ms=1)
    report = await measure_on(database, admissions, shape, said.append)
    await admissions.close()
    await client.aclose()
    cases = {case.name: case.figure for case in report.cases}
    assert list(cases) == [WITHOUT, UNLIMITED, LIMITED] and len(said) == 6
    for name, figure in cases.items():
        assert figure["requests"] == 20 and figure["first_p99_ms"] >= figure["first_p50_ms"] > 0
        assert (figure["admit_p50_ms"] > 0.1) == (name != WITHOUT)
    required = [(ratio.required, ratio.kind) for ratio in report.ratios]
    assert required == [(1.5, "at most")] * 2 + [(5.0, "at most")] * 2 + [(None, "at least")] * 2
