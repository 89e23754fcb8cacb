"""What a journal contains: admissions, ends, open requests and rejected records, and their text.

Invariant: a record that was read equals the one that was written, less what only an admission needs (`subjects`, `rate`) and
the limits that it met: the record of its end has them.
"""

from dataclasses import dataclass, fields
from datetime import datetime
from operator import attrgetter
from typing import Final, TypeAlias

import msgspec

from loraplex.tenants.errors import InvalidField, JournalUnreadable
from loraplex.tenants.quotas.reservation import NOTHING_USED, Reservation, ReservationRequest, SettledUsage

_ENCODER: Final = msgspec.json.Encoder()
_RESERVATIONS: Final = msgspec.json.Decoder(Reservation)
_USAGES: Final = msgspec.json.Decoder(SettledUsage)
# What only an admission needs is left out: it has a default.
_REQUEST_FIELDS: Final = tuple(each.name for each in fields(ReservationRequest) if each.name != "subjects")
_RESERVATION_FIELDS: Final = tuple(
    each.name for each in fields(Reservation) if each.name not in ("request", "rate", "limits")
)
_request_values: Final = attrgetter(*_REQUEST_FIELDS)
_reservation_values: Final = attrgetter(*_RESERVATION_FIELDS)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request was admitted. Positions rise in the order of writing."""

    position: int
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class Ended:
    """An admitted request ended; the outcome of `usage` is None if it was cancelled."""

    position: int
    reservation: Reservation
    usage: SettledUsage


JournalRecord: TypeAlias = Admitted | Ended


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request without an end. `usage`: its last progress; nothing used where there was none."""

    reservation: Reservation
    usage: SettledUsage


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that PostgreSQL rejected, and why. It stays in the journal until an operator has dealt with it."""

    record: JournalRecord
    reason: str
    rejected_at: datetime


def reservation_text(reservation: Reservation) -> str:
    """A reservation as JSON, without what only its admission needed."""
    request = dict(zip(_REQUEST_FIELDS, _request_values(reservation.request), strict=True))
    stored = dict(zip(_RESERVATION_FIELDS, _reservation_values(reservation), strict=True))
    return _ENCODER.encode({**stored, "request": request}).decode()


def usage_text(usage: SettledUsage) -> str:
    """Usage as JSON."""
    return _ENCODER.encode(usage).decode()


def read_reservation(text: str) -> Reservation:
    """Decode a reservation. Raises `JournalUnreadable`."""
    try:
        return _RESERVATIONS.decode(text)
    except (msgspec.DecodeError, InvalidField) as error:
        raise JournalUnreadable(f"a reservation cannot be read: {error}") from error


def read_usage(text: str | None) -> SettledUsage:
    """Decode usage; without a text, nothing was used. Raises `JournalUnreadable`."""
    try:
        return NOTHING_USED if text is None else _USAGES.decode(text)
    except (msgspec.DecodeError, InvalidField) as error:
        raise JournalUnreadable(f"the usage of a request cannot be read: {error}") from error


def record_of(position: int, reservation: Reservation, usage: str | None) -> JournalRecord:
    """An admission or, with usage as JSON, an end. Raises `JournalUnreadable`."""
    return (
        Admitted(position, reservation) if usage is None else Ended(position, reservation, read_usage(usage))
    )
