"""Messages between a gateway and a validation process, one JSON line each."""

from typing import Final

import msgspec


class ValidationRequest(msgspec.Struct, frozen=True):
    """`schema` and `value` are JSON texts."""

    schema: str
    value: str


class ValueResult(msgspec.Struct, frozen=True):
    """`violation` None: the value satisfies the schema. `broken`: the class of an unexpected error."""

    violation: str | None
    broken: str | None = None


encode: Final = msgspec.json.Encoder().encode
decode_result: Final = msgspec.json.Decoder(ValueResult).decode
