"""Records: what use cases and queries return, and what the API sends, the console shows and commands print."""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainSerializer

UtcTime = Annotated[datetime, AfterValidator(lambda time: time.astimezone(UTC))]
"""A time, written in UTC as in RFC 3339."""
Pico = Annotated[int, PlainSerializer(str, return_type=str, when_used="json")]
"""An exact amount in pico-units; JSON has it as a decimal text, since it exceeds what its readers keep."""


class Record(BaseModel):
    """Base of all records. `model_validate` reads a table's row, or anything else with attributes of these names."""

    # An error that quotes its input would write a secret into the log.
    model_config = ConfigDict(
        frozen=True, from_attributes=True, hide_input_in_errors=True, protected_namespaces=()
    )


class OneTimeSecret(Record):
    """A record with a secret that is returned this once: no cache may keep it."""
