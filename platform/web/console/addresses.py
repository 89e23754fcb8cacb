"""The query strings of pages: filters that a form sends by GET, and links to the same page with other filters."""

from collections.abc import Mapping
from datetime import date
from urllib.parse import quote, urlencode

from starlette.requests import Request

from loraplex.platform.web.console.forms import Form, FormInvalid


def query_form(request: Request) -> Form:
    """Read the query string as a form that was sent."""
    names = request.query_params.keys()
    lists = {name: tuple(request.query_params.getlist(name)) for name in names}
    return Form({name: values[-1].replace("\0", "") for name, values in lists.items()}, lists)


def link(path: str, filters: Mapping[str, str | None]) -> str:
    """Return the address of a page with the filters that have a value."""
    query = urlencode({name: value for name, value in filters.items() if value})
    return f"{path}?{query}" if query else path


def path_of(*parts: str) -> str:
    """Return the path of names that a tenant chose, each as one part."""
    return "/".join(("/console", *(quote(part, safe="@") for part in parts)))


def chosen(form: Form, name: str, allowed: tuple[str, ...]) -> str:
    """Return the value of a choice, the first one if it is absent or none of those that exist."""
    return form.text(name) if form.text(name) in allowed else allowed[0]


def day_of(form: Form, name: str, default: date) -> date:
    """Return the day of a field. Raises `FormInvalid`."""
    text = form.text(name)
    try:
        day = date.fromisoformat(text) if text else default
    except ValueError:
        raise FormInvalid({name: f"“{text[:40]}” is no day."}) from None
    if not 2000 <= day.year < 2100:
        raise FormInvalid({name: f"“{text[:40]}” is not between 2000 and 2099."})
    return day
