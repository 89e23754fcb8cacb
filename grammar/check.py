"""Checks a list of schemas as a request would, without a model: how each is enforced and which documents it accepts.

Invariant: a document is accepted if the grammar accepts exactly its text, token by token, and the validator, where
one is used, accepts its value. Any error that a schema causes is a refusal. Creating a `Checker` imports the backends.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal

from loraplex.grammar.backends.emit_llguidance import emit as emit_llguidance
from loraplex.grammar.backends.emit_xgrammar import emit as emit_xgrammar
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.constraints import JsonSchemaValue, SchemaLimits
from loraplex.grammar.enforcement.enforcement_plan import EnforcementPlan
from loraplex.grammar.enforcement.planner import PREFERENCE, plan_enforcement
from loraplex.grammar.errors import (
    AnalysisFailed,
    GrammarError,
    GrammarInvalid,
    GrammarRefused,
    MatcherFailed,
    SchemaNotSatisfied,
)
from loraplex.grammar.json_schema.validator import Validator
from loraplex.grammar.spec import Backend, GrammarSpec, encode_spec
from loraplex.grammar.tree import JsonValue

if TYPE_CHECKING:
    from loraplex.grammar.backends.replayed_mask import AnswerMask

NAMESPACE = b"check"
_MAX_DIGITS: Final = 4_300


class BadLine(ValueError):
    """A line of the list is malformed; the message has its number."""


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, and documents as the texts that a model would write."""

    schema: JsonSchemaValue
    documents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SchemaReport:
    """The result for one schema.

    `refused_at` is the JSON Pointer of the reason for a refusal, empty for the whole schema, and `reason` its text.
    `is_unexpected`: the reason is a defect here or in a library. `compile_ms` includes planning and compiling.
    """

    enforcement: Literal["full", "validated", "refused"]
    backend: Literal["xgrammar", "llguidance", "none"]
    refused_at: str | None
    compile_ms: float
    accepted: tuple[bool, ...]
    reason: str | None = None
    is_unexpected: bool = False

    def as_line(self) -> dict[str, Any]:
        """Return the line that `loraplex grammar check` writes."""
        return {
            "enforcement": self.enforcement,
            "backend": self.backend,
            "refused_at": self.refused_at,
            "compile_ms": round(self.compile_ms, 2),
            "accepted": list(self.accepted),
        }


class Checker:
    """Checks schemas against one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, limits: SchemaLimits | None = None) -> None:
        import torch

        from loraplex.grammar.backends.compiler import MaskCompiler

        self._compiler = MaskCompiler(vocabulary)
        self._limits = limits or SchemaLimits()
        self._bitmask = torch.zeros((1, vocabulary.bitmask_words), dtype=torch.int32)
        self._tokenizer = vocabulary.tokenizer
        # A document may contain the text of a control token; a model would write it as ordinary text.
        self._tokenizer.encode_special_tokens = True

    def check(self, case: Case, *, strict: bool = False) -> SchemaReport:
        """Plan, compile and try one schema. A refusal is a result, not an error."""
        started = perf_counter()
        try:
            return self._checked(case, strict, started)
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        # A panic of a Rust library is not an `Exception`.
        except BaseException as error:  # noqa: BLE001
            return _refused(case, error, started)

    def _checked(self, case: Case, strict: bool, started: float) -> SchemaReport:
        plan = plan_enforcement(case.schema, strict=strict, param="schema", limits=self._limits)
        backend = next(backend for backend in PREFERENCE if backend in plan.backends)
        start = self._start(plan, backend)
        validator = None if plan.validation_schema is None else Validator(plan.validation_schema)
        elapsed = (perf_counter() - started) * 1e3
        self._check_first_mask(start)
        accepted = tuple(
            self._accepts(start, text) and _satisfies(validator, text) for text in case.documents
        )
        return SchemaReport(plan.enforcement, backend, None, elapsed, accepted)

    def _start(self, plan: EnforcementPlan, backend: Backend) -> "AnswerMask":
        emit = emit_llguidance if backend == "llguidance" else emit_xgrammar
        spec = GrammarSpec(backend=backend, source=emit(JsonValue(plan.schema)))
        return self._compiler.compile(NAMESPACE, encode_spec(spec))

    def _check_first_mask(self, start: "AnswerMask") -> None:
        """Raises `GrammarInvalid` for a grammar without any text, as a compile check does."""
        start.fork().fill(self._bitmask, 0)
        if not self._bitmask.count_nonzero():
            raise GrammarInvalid("no text satisfies the grammar")

    def _accepts(self, start: "AnswerMask", text: str) -> bool:
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
        mask = start.fork()
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not all(mask.accept(token) for token in tokens):
            return False
        # A mask may accept tokens before it checks them; filling it checks all of them.
        mask.fill(self._bitmask, 0)
        return mask.is_complete()


def _refused(case: Case, error: BaseException, started: float) -> SchemaReport:
    is_expected = isinstance(error, GrammarRefused | MatcherFailed) and not isinstance(error, AnalysisFailed)
    refused_at = error.pointer if isinstance(error, GrammarRefused) else None
    return SchemaReport(
        enforcement="refused",
        backend="none",
        refused_at=refused_at or "",
        compile_ms=(perf_counter() - started) * 1e3,
        accepted=(False,) * len(case.documents),
        reason=str(error)
        if isinstance(error, GrammarError)
        else f"unexpected {type(error).__name__}: {error}",
        is_unexpected=not is_expected,
    )


def _satisfies(validator: Validator | None, text: str) -> bool:
    if validator is None:
        return True
    try:
        validator.validate(text)
    except SchemaNotSatisfied:
        return False
    return True


def read_cases(lines: Iterable[str]) -> Iterator[Case]:
    """Yield the cases of a list; blank lines are skipped. Raises `BadLine`."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _read_case(line, number)


def _read_case(line: str, number: int) -> Case:
    try:
        found = json.loads(line, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"line {number}: not JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict) or found.keys() != {"schema", "documents"}:
        raise BadLine(f'line {number}: must be {{"schema": …, "documents": [text, …]}}')
    schema, documents = found["schema"], found["documents"]
    if not isinstance(schema, dict | bool):
        raise BadLine(f"line {number}: schema must be an object or a boolean")
    if not isinstance(documents, list) or not all(isinstance(text, str) for text in documents):
        raise BadLine(f"line {number}: documents must be a list of texts, each the JSON text of a document")
    return Case(schema, tuple(documents))


def _integer(text: str) -> int | float:
    """Parse an integer; one that Python does not read is infinite, which no schema may contain."""
    return int(text) if len(text) <= _MAX_DIGITS else math.inf
