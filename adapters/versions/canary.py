"""What an engine's probe of an adapter means for its version: a check of the report, passed, warned or failed."""

from loraplex.adapters.report import Check
from loraplex.engine.messages import ProbeReport

CANARY = "canary"


def canary_check(report: ProbeReport) -> Check:
    """Adapters that change nothing pass with a warning, as in validation."""
    if report.code is not None:
        return Check(CANARY, False, f"{report.code}: {report.message}{_figures(report)}")
    done = f"{report.modules} modules agree with the reference{_figures(report)}"
    answer = f"{report.generated_tokens} tokens were generated"
    if not report.effect:
        return Check(CANARY, True, f"{done}; {answer}; the adapter changes nothing", warning=True)
    return Check(CANARY, True, f"{done}; {answer}")


def _figures(report: ProbeReport) -> str:
    if not report.max_error:
        return ""
    errors = ", ".join(f"{kind} {error:.2g}" for kind, error in sorted(report.max_error.items()))
    return f" (greatest relative errors: {errors}; allowed: {report.bound:.2g})"
