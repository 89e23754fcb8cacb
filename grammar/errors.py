"""Every error of this package. Nothing here knows HTTP.

GrammarError
├── GrammarRefused            the asked-for form cannot be held: names the place in the request
│   ├── GrammarTooLarge       a bound on bytes, depth, nodes, enum or pattern is exceeded
│   ├── SchemaNotHeld         `strict`, and a keyword that neither backend enforces; names it by JSON Pointer
│   ├── GrammarInvalid        not a schema, a regular expression or a grammar at all
│   └── GrammarTooCostly      the trial compilation passed its deadline or its memory
├── TrialsUnavailable         the worker of trial compilations is down or its queue is full
├── AnswerNotSatisfied        a finished value that only the validator could judge failed
└── MatcherFailed             a compiled grammar broke down while decoding: its request ends, the others go on
    └── MatcherTooCostly      its work limit is spent: also a `TimeoutError`, by which the engine tells it
"""


class GrammarError(Exception):
    """Base of all errors of this package."""


class GrammarRefused(GrammarError):
    """`param` is the field of the request, `pointer` the JSON Pointer (RFC 6901) inside its schema, if it has one."""

    def __init__(self, message: str, *, param: str | None = None, pointer: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.pointer = pointer


class GrammarTooLarge(GrammarRefused):
    pass


class SchemaNotEnforceable(GrammarRefused):
    pass


class GrammarInvalid(GrammarRefused):
    pass


class GrammarTooCostly(GrammarRefused):
    pass


class WorkersUnavailable(GrammarError):
    pass


class SchemaNotSatisfied(GrammarError):
    pass


class MatcherFailed(GrammarError):
    pass


class MatcherTooCostly(MatcherFailed, TimeoutError):
    pass
