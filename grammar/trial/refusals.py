"""Maps the result of a compile check to an error that names the exceeded limit, or to None."""

from loraplex.grammar.errors import GrammarError, GrammarInvalid, GrammarTooCostly, WorkersUnavailable
from loraplex.grammar.trial.messages import CompileResult, SandboxLimits

MIB = 1 << 20


def refusal(result: CompileResult, limits: SandboxLimits, param: str | None) -> GrammarError | None:
    """Return the error of a result; None when the grammar may be used."""
    match result.outcome:
        case "accepted":
            return None
        case "invalid":
            reason = result.text or "its library gives no reason"
            return GrammarInvalid(f"the grammar does not compile: {reason}", param=param)
        case "unsatisfiable":
            return GrammarInvalid("no text satisfies the grammar", param=param)
        case "cpu" | "deadline" | "memory" | "size" | "crashed":
            return GrammarTooCostly(_budget(result, limits), param=param)
        case "starved":
            return WorkersUnavailable(
                f"this machine was too busy to check the grammar within {limits.deadline_s:g} s"
            )
        case "cancelled":
            return WorkersUnavailable("the check of the grammar was cancelled")


def _budget(result: CompileResult, limits: SandboxLimits) -> str:
    match result.outcome:
        case "cpu":
            return f"the grammar does not compile within {limits.cpu_s} s of CPU time"
        case "deadline":
            return f"the grammar was not compiled within {limits.deadline_s:g} s"
        case "memory":
            return f"compiling the grammar takes more than {limits.memory_bytes // MIB} MiB of memory"
        case "size":
            taken, allowed = result.bytes // MIB, limits.grammar_bytes // MIB
            return f"the compiled grammar takes {taken} MiB, allowed are {allowed} MiB"
        case _:
            return "the grammar compiler crashed on the grammar; it may be nested too deep"
