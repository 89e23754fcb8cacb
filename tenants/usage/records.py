"""Finished requests and corrections.

Invariant: `prompt_tokens` includes `cached_tokens`, and `completion_tokens` includes `reasoning_tokens`, as in the responses of
`/v1`.
"""

from typing import Annotated, Final
from uuid import UUID

from pydantic import Field

from loraplex.tenants.records import Pico, Record, UtcTime

REFUSED: Final = "refused"
"""The outcome of requests that have no row in the ledger."""


def is_absent(value: object) -> bool:
    """Return whether a field is left out of a document."""
    return value is None


class RequestDocument(Record):
    """One finished request. `adapter` and `version` are null for the base model; times in milliseconds are null where unknown.
    `system_fingerprint`: as in the response, null where it is unknown. `session`: the label made of what the client named so.

    `code`, `status` and `message` are there for a day in requests that failed or were refused: the error, without what it quoted.
    `omitted` is there where so many others of its minute, key and `code` are not listed. A refused one has the outcome `refused`, no
    tokens, and the `model` that it asked for if that is a name.

    `reverses_id` and `reason` are there in corrections, whose tokens and amount are added to those of the request that they
    name.
    """

    id: UUID
    at: UtcTime
    adapter: str | None
    version: int | None
    digest: str | None
    key_id: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    ttft_ms: int | None
    duration_ms: int | None
    amount_pico: Pico
    price_version_id: UUID | None
    client_request_id: str | None
    system_fingerprint: str | None
    session: str | None
    code: Annotated[str | None, Field(exclude_if=is_absent)] = None
    status: Annotated[int | None, Field(exclude_if=is_absent)] = None
    message: Annotated[str | None, Field(exclude_if=is_absent)] = None
    model: Annotated[str | None, Field(exclude_if=is_absent)] = None
    omitted: Annotated[int | None, Field(exclude_if=is_absent)] = None
    reverses_id: Annotated[UUID | None, Field(exclude_if=is_absent)] = None
    reason: Annotated[str | None, Field(exclude_if=is_absent)] = None


class LoggedRequest(RequestDocument):
    """A request as pages show it. `adapter` and `key_id` are UUIDs once their rows were erased, and `key_name` is None then.

    `is_listed_key`: the tenant manages the key; those of the console's own pages, as of the playground, are in no list. `currency` is
    empty in a refused one, which has no amount.
    """

    adapter_id: UUID | None
    key_name: str | None
    is_listed_key: bool
    currency: str

    @property
    def uncached_tokens(self) -> int:
        """The tokens of the prompt that were computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def answer_tokens(self) -> int:
        """The tokens of the completion without its reasoning."""
        return self.completion_tokens - self.reasoning_tokens


class CorrectionDocument(Record):
    """What a correction adds to the ledger: negative tokens and a negative amount. `amount_pico` is in pico-units of `currency`."""

    id: UUID
    request_id: UUID
    tenant_id: UUID
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    amount_pico: Pico
    currency: str
