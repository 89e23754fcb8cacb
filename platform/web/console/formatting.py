"""How the console writes amounts, counts, durations, sizes, times and ids: the filters of its templates.

Invariant: amounts are integers throughout. What is not zero is never shown as zero. None, an unknown value, is `–`.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from loraplex.platform.evaluations.statistics import wilson_interval
from loraplex.tenants.invoices.currencies import minor_digits

UNKNOWN: Final = "–"
MINUS: Final = "\u2212"
SPACE: Final = "\u00a0"
"""No-break, between a number and its unit."""
PICO_DIGITS: Final = 12
MICRO_DIGITS: Final = 6
SUM_DIGITS: Final = 4
RATE_DIGITS: Final = 3
SYMBOLS: Final = {"USD": "$", "EUR": "€", "GBP": "£"}
_DECIMAL_SIZES: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_BINARY_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SHORT_DIGEST: Final = 12
_SHORT_ID: Final = 8
# A part of a user agent -> its browser or system. The first one counts: each browser names those it is like, too.
BROWSERS: Final = (
    *(("Edg/", "Edge"), ("OPR/", "Opera"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome")),
    *(("Safari/", "Safari"), ("curl/", "curl"), ("python-httpx/", "httpx")),
)
SYSTEMS: Final = (
    *(("iPhone", "iPhone"), ("iPad", "iPad"), ("Android", "Android"), ("Windows", "Windows")),
    *(("Mac OS X", "macOS"), ("Linux", "Linux")),
)


def money_total(micro: int | None, currency: str) -> str:
    """Write an amount in micro-units with the digits of the currency's minor unit: `$20.82`."""
    return _money(micro, currency, MICRO_DIGITS, minor_digits(currency))


def money_spent(pico: int | None, currency: str) -> str:
    """Write an exact amount in pico-units as a total, rounded once: `$20.82`."""
    return _money(pico, currency, PICO_DIGITS, minor_digits(currency))


def money_sum(pico: int | None, currency: str, digits: int = SUM_DIGITS) -> str:
    """Write a sum in pico-units, of a day or an adapter, with four decimals, or with `digits`: `$1.2991`."""
    return _money(pico, currency, PICO_DIGITS, digits)


def sum_digits(column: Iterable[int | None]) -> int:
    """How many decimals the sums of a column need so that different ones look different: from four to six."""
    sums = {each for each in column if each is not None}
    texts = ({money_sum(each, "", digits) for each in sums} for digits in range(SUM_DIGITS, MICRO_DIGITS))
    return next(
        (SUM_DIGITS + more for more, each in enumerate(texts) if len(each) == len(sums)), MICRO_DIGITS
    )


def money_request(pico: int | None, currency: str) -> str:
    """Write the amount of one request in pico-units with six decimals: `$0.000059`."""
    return _money(pico, currency, PICO_DIGITS, MICRO_DIGITS)


def money_exact(pico: int | None, currency: str) -> str:
    """Write an amount in pico-units exactly, without trailing zeros: `$0.0000228`."""
    return _exact(pico, currency, PICO_DIGITS, minor_digits(currency))


def rate(micro_per_million: int | None, currency: str) -> str:
    """Write a price per million tokens, in micro-units, exactly, with at least three decimals: `$0.100`."""
    return _exact(micro_per_million, currency, MICRO_DIGITS, RATE_DIGITS)


def count(number: int | None) -> str:
    """Write a number exactly: `31,654,825`."""
    if number is None:
        return UNKNOWN
    return f"{MINUS if number < 0 else ''}{abs(number):,}"


def compact(number: int | None) -> str:
    """Write a number with three digits and k, M or G: `31.7 M`. Below 1,000 it is exact."""
    if number is None:
        return UNKNOWN
    return _scaled(number, ("", "k", "M", "G", "T", "P"), 1000)


def duration(milliseconds: float | None) -> str:
    """Write a duration: `46.0 ms`, `462 ms`, `2.41 s`, `9 h 28 min`."""
    if milliseconds is None:
        return UNKNOWN
    if milliseconds < 99.95:
        return f"{milliseconds:.1f}{SPACE}ms"
    if milliseconds < 999.5:
        return f"{milliseconds:.0f}{SPACE}ms"
    if milliseconds < 59_995:
        return f"{milliseconds / 1000:.2f}{SPACE}s"
    seconds = round(milliseconds / 1000)
    for unit, size, smaller, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            rest = seconds % size // part
            return f"{seconds // size}{SPACE}{unit}" + (f"{SPACE}{rest}{SPACE}{smaller}" if rest else "")
    raise AssertionError(seconds)


def share(part: int | None, whole: int | None) -> str:
    """Write part of whole in per cent: `38.1 %`, two decimals below 1 %: `0.41 %`. Unknown where the whole is 0."""
    if part is None or not whole:
        return UNKNOWN
    digits = 2 if 0 < part * 100 < whole else 1
    scaled = _rounded(part * 10 ** (digits + 2), whole)
    least = f"<0.{'0' * (digits - 1)}1" if part and not scaled else _decimal(scaled, digits, digits)
    return f"{least}{SPACE}%"


def pass_rate(rate: float | None) -> str:
    """Write a pass rate in per cent: `95.0 %`."""
    return UNKNOWN if rate is None else share(round(rate * 10**6), 10**6)


def interval(rate: float | None, cases: int) -> str:
    """Write the interval of a pass rate of so many cases, at 95 %: `88.8 to 97.8 %`."""
    if rate is None:
        return UNKNOWN
    low, high = wilson_interval(round(rate * cases), cases)
    return f"{low * 100:.1f} to {high * 100:.1f}{SPACE}%"


def file_size(size_bytes: int | None) -> str:
    """Write the size of a file in decimal units: `58.4 MB`."""
    return UNKNOWN if size_bytes is None else _scaled(size_bytes, _DECIMAL_SIZES, 1000)


def memory_size(size_bytes: int | None) -> str:
    """Write an amount of memory in binary units, as the settings write it: `512 MiB`."""
    return UNKNOWN if size_bytes is None else _scaled(size_bytes, _BINARY_SIZES, 1024)


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """Write a time relative to now within seven days, `2 min ago` or `in 3 h`, else its day."""
    if moment is None:
        return UNKNOWN
    distance = (now or datetime.now(UTC)) - moment
    if abs(distance) >= timedelta(days=7):
        return day(moment, now)
    text = _distance(abs(distance))
    if text is None:
        return "now"
    return f"{text} ago" if distance > timedelta() else f"in {text}"


def day(moment: datetime | None, now: datetime | None = None) -> str:
    """Write a day in UTC: `4 Nov`, with its year unless that is the present one."""
    if moment is None:
        return UNKNOWN
    moment = moment.astimezone(UTC)
    text = f"{moment.day}{SPACE}{moment:%b}"
    return text if moment.year == (now or datetime.now(UTC)).year else f"{text}{SPACE}{moment.year}"


def month_name(month: str) -> str:
    """Write a month, `YYYY-MM`, with its name: `January 2026`."""
    return f"{datetime.fromisoformat(f'{month}-01'):%B %Y}"


def exact_time(moment: datetime | None) -> str:
    """Write a time with milliseconds and its zone: `2026-11-20 14:28:07.412 UTC`."""
    if moment is None:
        return UNKNOWN
    moment = moment.astimezone(UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03} UTC"


def machine_time(moment: datetime) -> str:
    """Write a time for the attribute `datetime`: RFC 3339 with milliseconds."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def short_digest(digest: str | None) -> str:
    """Write the first 12 characters of a digest and an ellipsis."""
    return _shortened(digest, _SHORT_DIGEST)


def short_id(identity: object | None) -> str:
    """Write the first 8 characters of an id and an ellipsis."""
    return _shortened(None if identity is None else str(identity), _SHORT_ID)


def sentence(text: str) -> str:
    """Write the message of an error as a sentence: with a capital and a full stop."""
    ended = text if text.endswith((".", "?", "…")) else f"{text}."
    return f"{ended[:1].upper()}{ended[1:]}"


def _money(amount: int | None, currency: str, scale: int, digits: int) -> str:
    """Write `amount`, in units of 10 ** -`scale`, rounded half away from zero to `digits` decimals."""
    if amount is None:
        return UNKNOWN
    shown = _rounded(abs(amount), int(10 ** (scale - digits)))
    if amount and not shown:
        least = _with_currency(_decimal(1, digits, digits), currency, False)
        return f"<{least}" if amount > 0 else f"{MINUS}<{least}"
    return _with_currency(_decimal(shown, digits, digits), currency, amount < 0)


def _exact(amount: int | None, currency: str, scale: int, least: int) -> str:
    """Write `amount`, in units of 10 ** -`scale`, without trailing zeros behind `least` decimals."""
    if amount is None:
        return UNKNOWN
    whole, _, fraction = _decimal(abs(amount), scale, scale).partition(".")
    fraction = fraction.rstrip("0").ljust(least, "0")
    return _with_currency(f"{whole}.{fraction}" if fraction else whole, currency, amount < 0)


def _with_currency(text: str, currency: str, negative: bool) -> str:
    symbol = SYMBOLS.get(currency, f"{currency}{SPACE}")
    return f"{MINUS if negative else ''}{symbol}{text}"


def _decimal(magnitude: int, scale: int, digits: int) -> str:
    """Write `magnitude`, in units of 10 ** -`scale`, with thousands and `digits` decimals, at most `scale`."""
    whole, fraction = divmod(magnitude, int(10**scale))
    return f"{whole:,}.{fraction:0{scale}}"[: len(f"{whole:,}") + 1 + digits] if digits else f"{whole:,}"


def _rounded(numerator: int, denominator: int) -> int:
    """Divide, half away from zero; both are not negative."""
    return (2 * numerator + denominator) // (2 * denominator)


def browser(user_agent: str | None) -> str:
    """Write which browser a session is of, such as `Firefox on Linux`; the whole text where it names none that is known."""
    if user_agent is None:
        return UNKNOWN
    name = next((name for part, name in BROWSERS if part in user_agent), None)
    system = next((name for part, name in SYSTEMS if part in user_agent), None)
    return " on ".join(filter(None, (name, system))) if name else user_agent


def _scaled(number: int, units: tuple[str, ...], base: int) -> str:
    """Write `number` with three digits in the largest unit of which it is at least one."""
    magnitude, power = abs(number), 0
    while power + 1 < len(units) and _rounded(magnitude, base**power) >= base:
        power += 1
    digits = max(0, 3 - len(str(magnitude // base**power))) if power else 0
    text = _decimal(_rounded(magnitude * int(10**digits), base**power), digits, digits)
    if base == 1024 and digits:
        text = text.rstrip("0").rstrip(".")
    unit = f"{SPACE}{units[power]}" if units[power] else ""
    return f"{MINUS if number < 0 else ''}{text}{unit}"


def _distance(distance: timedelta) -> str | None:
    seconds = int(distance.total_seconds())
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= size:
            return f"{seconds // size}{SPACE}{unit}"
    return None


def _shortened(text: str | None, length: int) -> str:
    if text is None:
        return UNKNOWN
    return text if len(text) <= length else f"{text[:length]}…"


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    each.__name__: each
    for each in (
        *(money_total, money_spent, money_sum, sum_digits, money_request, money_exact, rate, count),
        *(compact, duration, share, pass_rate, interval, file_size, memory_size, ago, day),
        *(exact_time, month_name, machine_time, short_digest, short_id, sentence, browser),
    )
}
