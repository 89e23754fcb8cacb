"""Every error of this package. Nothing here knows HTTP.

GrammarError
├── GrammarRefused            the output constraints cannot be enforced: names the request field
│   ├── GrammarTooLarge       a limit on bytes, depth, nodes, enum or pattern is exceeded
│   ├── SchemaNotEnforceable  `strict`, and a keyword that neither backend enforces; names it by JSON Pointer
│   ├── GrammarInvalid        not a schema, a regular expression or a grammar
│   ├── AnalysisFailed        an unexpected error, of which only the class is named: a defect here or in a library
│   └── GrammarTooCostly      the compile check exceeded its deadline, CPU time or memory
├── SchemaNotSatisfied        a finished value does not satisfy its schema
├── JsonRefused               a text is JSON, and not what `strict_json` accepts
│   ├── RepeatedName          a name occurs twice in an object
│   ├── NotANumber            NaN or an infinity
│   ├── JsonNumberRefused     a number is too large or has too many digits
│   └── JsonTooDeep           arrays and objects nest too deeply
└── MatcherFailed             a compiled grammar failed while decoding; only its own request ends
    └── MatcherTooCostly      its work limit is spent; a `TimeoutError` too, by which the engine recognises it
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


class AnalysisFailed(GrammarRefused):
    """The message has the class of the unexpected error; its text may quote the schema."""


class GrammarTooCostly(GrammarRefused):
    pass


class SchemaNotSatisfied(GrammarError):
    pass


class JsonRefused(GrammarError):
    """The message continues a sentence about the document: "the body" + "nests deeper than 64 levels"."""


class RepeatedName(JsonRefused):
    """`name` occurs more than once."""

    def __init__(self, name: str) -> None:
        super().__init__(f"has the name {name[:100]!r} twice in an object")
        self.name = name


class NotANumber(JsonRefused):
    """`text` is the spelling: NaN, Infinity or -Infinity."""

    def __init__(self, text: str) -> None:
        super().__init__(f"holds {text}, which is not JSON")
        self.text = text


class JsonNumberRefused(JsonRefused):
    pass


class JsonTooDeep(JsonRefused):
    pass


class MatcherFailed(GrammarError):
    pass


class MatcherTooCostly(MatcherFailed, TimeoutError):
    pass
