"""Compile checks as a request sees them: recorded in the metrics, or all refused where the model has no end token."""

import time
from typing import Protocol

from loraplex.grammar.errors import GrammarRefused, GrammarTooCostly
from loraplex.grammar.spec import GrammarSpec
from loraplex.platform.errors import ShareExceeded, UnsupportedParameter, WorkersUnavailable


class CompileChecks(Protocol):
    """Compiles a grammar in a sandbox before an engine receives it."""

    async def check(self, namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        """Compile the grammar. Raises `GrammarRefused` naming `param`, or `WorkersUnavailable` when no check is possible."""
        ...


class CompileCheckRecorder(Protocol):
    """Records every check: `accepted`, `invalid`, `too_costly`, `unavailable` or `abandoned`, and its seconds."""

    def record_compile_check(self, result: str, seconds: float) -> None: ...


class RecordedCompileChecks:
    """`CompileChecks` that are recorded. A cached result counts as well."""

    def __init__(self, checks: CompileChecks, recorder: CompileCheckRecorder) -> None:
        self._checks = checks
        self._recorder = recorder

    async def check(self, namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        """See `CompileChecks.check`."""
        begun, result = time.monotonic(), "abandoned"
        try:
            await self._checks.check(namespace, spec, param=param)
            result = "accepted"
        except GrammarTooCostly:
            result = "too_costly"
            raise
        except GrammarRefused:
            result = "invalid"
            raise
        except (WorkersUnavailable, ShareExceeded):
            result = "unavailable"
            raise
        finally:
            self._recorder.record_compile_check(result, time.monotonic() - begun)


class NoCompileChecks:
    """The compile checks of a model without an end token, whose documents could never end."""

    async def check(self, namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        """Refuse every grammar."""
        raise UnsupportedParameter(f"`{param}` is not supported: the model has no end token.", param=param)
