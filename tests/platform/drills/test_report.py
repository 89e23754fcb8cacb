"""A report survives only if every promise was kept, and its JSON and its tables have the same figures."""

import io
import json

from rich.console import Console

from loraplex.platform.drills.ledger_drift import LedgerDrift
from loraplex.platform.drills.report import DrillReport, Promise


def report(*promises: Promise) -> DrillReport:
    return DrillReport(
        fault="redis-flush",
        fault_s=1.0,
        requests=9,
        completed=7,
        errors={"engine_restarting": 2},
        recovery_s=None,
        drift=LedgerDrift(rows=7, amount_pico=712, drift_pico=13, unexpected=1),
        promises=list(promises),
        notes=["a [note]"],
    )


def test_one_broken_promise_decides() -> None:
    kept, broken = Promise("[drift]", True, "0"), Promise("rows", False, "1 missing")
    assert report(kept).survived
    assert not report(kept, broken).survived


def test_json_and_tables_have_the_figures() -> None:
    found = report(Promise("[drift]", False, "13 pico-units"))
    document = json.loads(json.dumps(found.document()))
    assert document["drift"]["drift_pico"] == 13 and document["errors"] == {"engine_restarting": 2}
    assert document["survived"] is False and document["recovery_s"] is None
    text = io.StringIO()
    found.print(Console(file=text, width=120))
    for shown in ("drill redis-flush", "9, of which 7", "2 engine_restarting", "not yet", "[drift]", "NO"):
        assert shown in text.getvalue()
    assert "712 pico-units" in text.getvalue() and "a [note]" in text.getvalue()
