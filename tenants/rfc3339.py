"""Times as RFC 3339 texts. Invariant: a time without a zone is none, and what is written is UTC."""

from datetime import UTC, datetime


def utc_text(time: datetime | None) -> str | None:
    """Write a time in UTC; None stays None."""
    return None if time is None else time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def zoned_time(text: str) -> datetime | None:
    """Parse a time with its zone; None for any other text."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if time.tzinfo is None else time
