"""Formats as patterns (RFC 3339, 4122, 5321, 1123, 3986, ISO 8601).

Invariant: a pattern allows nothing that its RFC forbids, so 29 February only in leap years; it may omit rare
spellings (leap seconds, quoted local parts, IPvFuture).
"""

from typing import Final

_LEAP_YEAR: Final = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE: Final = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_OFFSET: Final = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME: Final = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?{_OFFSET}"
_CLOCK: Final = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CALENDAR: Final = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9]|-[A-Za-z0-9]){0,30}"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_OCTET: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX: Final = r"[0-9A-Fa-f]{1,4}"
_LOCAL: Final = r"[A-Za-z0-9_+\-]{1,20}(?:\.[A-Za-z0-9_+\-]{1,20}){0,2}"
_IN_PATH: Final = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@\-]|%[0-9A-Fa-f]{2})"


def _ipv6() -> str:
    """Return all eight groups, or one `::` for at least one group of zeros, at each place."""
    kinds = [rf"(?:{_HEX}:){{7}}{_HEX}", "::"]
    for before in range(8):
        after = 7 - before
        left = rf"{_HEX}(?::{_HEX}){{{before - 1}}}" if before else ""
        right = rf"(?:{_HEX}(?::{_HEX}){{0,{after - 1}}})?" if after else ""
        if before or after:
            kinds.append(f"{left}::{right}")
    return "(?:" + "|".join(kinds) + ")"


# In Rust's syntax, matched as a whole.
FORMATS: Final = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_LOCAL}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"(?:{_OCTET}\.){{3}}{_OCTET}",
    "ipv6": _ipv6(),
    "time": _TIME,
    "uri": (
        r"[A-Za-z][A-Za-z0-9+.\-]*:"
        rf"(?://{_HOST}(?::[0-9]{{1,4}})?(?:/{_IN_PATH}*)*|{_IN_PATH}+(?:/{_IN_PATH}*)*)"
        rf"(?:\?(?:{_IN_PATH}|[/?])*)?(?:\#(?:{_IN_PATH}|[/?])*)?"
    ),
    "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
}
# Formats without a pattern that the validator asserts.
VALIDATED_FORMATS: Final = frozenset(
    (
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "uri-reference",
        "uri-template",
    )
)
# Formats that describe the use of a text and forbid none (OpenAPI, pydantic).
HINTS: Final = frozenset(("binary", "directory-path", "file-path", "password", "path"))


def format_pattern(name: str) -> str | None:
    """Return the whole pattern of a format, or None if no grammar expresses it."""
    source = FORMATS.get(name)
    return None if source is None else f"^(?:{source})$"
