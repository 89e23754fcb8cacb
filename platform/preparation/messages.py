"""Messages between a gateway and its analysis process: msgpack with a length prefix of eight bytes."""

from typing import Final, TypeAlias

import msgspec

from loraplex.grammar import errors as grammar_errors
from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.errors import GrammarRefused
from loraplex.platform.errors import GatewayError, InvalidBody, InvalidParameter
from loraplex.platform.parameters.json_object import BodyLimits
from loraplex.platform.preparation.composed import CachedPlan

LENGTH_BYTES: Final = 8
MAX_BYTES: Final = 1 << 30

Refused: TypeAlias = GatewayError | GrammarRefused
REFUSALS: Final[dict[str, type[Refused]]] = {
    each.__name__: each
    for each in (
        InvalidBody,
        InvalidParameter,
        GrammarRefused,
        grammar_errors.AnalysisFailed,
        grammar_errors.GrammarInvalid,
        grammar_errors.GrammarTooCostly,
        grammar_errors.GrammarTooLarge,
        grammar_errors.SchemaNotEnforceable,
    )
}


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message. `control_tokens`: the texts of the tokenizer's special tokens."""

    body: BodyLimits
    grammar: SchemaLimits
    control_tokens: frozenset[str]


class CheckBody(msgspec.Struct, frozen=True, tag=True):
    """Check that the body is a JSON object within the bounds. The reply has no result."""

    body: bytes


class BuildPlan(msgspec.Struct, frozen=True, tag=True):
    """Build the output plan of constraints packed by `pack_constraints`."""

    packed: bytes


class Refusal(msgspec.Struct, frozen=True):
    """An error caused by the request. `kind` is a name of `REFUSALS`."""

    kind: str
    message: str
    param: str | None
    pointer: str | None

    @classmethod
    def of(cls, error: Refused) -> "Refusal":
        kind = next(each.__name__ for each in type(error).__mro__ if REFUSALS.get(each.__name__) is each)
        pointer = error.pointer if isinstance(error, GrammarRefused) else None
        return cls(kind, str(error), error.param, pointer)

    def error(self) -> Refused:
        """Rebuild the error as it was raised."""
        kind = REFUSALS[self.kind]
        if issubclass(kind, GrammarRefused):
            return kind(self.message, param=self.param, pointer=self.pointer)
        return kind(self.message, param=self.param)


class Reply(msgspec.Struct, frozen=True):
    """`result`: the plan of a `BuildPlan`. `broken`: the class of an error that no request should cause."""

    result: CachedPlan | None = None
    refusal: Refusal | None = None
    broken: str | None = None


Task: TypeAlias = CheckBody | BuildPlan

decode_setup: Final = msgspec.msgpack.Decoder(Setup).decode
decode_task: Final = msgspec.msgpack.Decoder(Task).decode
decode_reply: Final = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Setup | Task | Reply) -> bytes:
    """Encode the message with its length prefix."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def length(head: bytes) -> int:
    """Decode the length prefix. Raises `msgspec.DecodeError` above `MAX_BYTES`."""
    size = int.from_bytes(head, "big")
    if size > MAX_BYTES:
        raise msgspec.DecodeError(f"a message of {size} bytes, at most {MAX_BYTES} are allowed")
    return size
