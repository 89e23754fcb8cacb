"""Parses the JSON of uploaded files strictly (`grammar/strict_json.py`), of bounded depth."""

from json import JSONDecodeError
from typing import Final

from loraplex.adapters.errors import MalformedJson
from loraplex.grammar.errors import JsonNumberRefused, JsonRefused, JsonTooDeep, RepeatedName
from loraplex.grammar.strict_json import check_values
from loraplex.grammar.strict_json import parse_json as parse_strict_json

_MAX_DIGITS: Final = 4_300


def parse_json(data: bytes, *, max_depth: int) -> object:
    """Return the parsed document. Raises `MalformedJson`; the caller bounds the length of `data`.

    A number beyond the range of a double is an infinity, which the checks of fields refuse by name.
    """
    try:
        document: object = parse_strict_json(data.decode(), max_digits=_MAX_DIGITS, parse_float=float)
        check_values(document, max_depth=max_depth)
    except UnicodeDecodeError as error:
        raise MalformedJson(f"is not UTF-8 at byte {error.start}") from error
    except JSONDecodeError as error:
        raise MalformedJson(f"is not JSON: {error.msg} at character {error.pos}") from error
    except RepeatedName as error:
        raise MalformedJson(f"repeats the key {error.name[:100]!r}") from error
    except JsonNumberRefused as error:
        raise MalformedJson("holds a number with more digits than allowed") from error
    except JsonTooDeep as error:
        raise MalformedJson(f"is nested more than {max_depth} levels deep") from error
    except JsonRefused as error:
        raise MalformedJson(str(error)) from error
    return document
