"""Reading forms, checking them against a model, and what the author of a wrong one reads."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, ValidationInfo, field_validator

from loraplex.platform.web.console.csrf import is_token, masked
from loraplex.platform.web.console.forms import Form, FormInvalid, field_errors, parse
from loraplex.tenants.errors import BoundNotHeld, DatabaseUnavailable, InvalidField, NameTaken


class KeyForm(BaseModel):
    name: Annotated[str, Field(max_length=8)]
    scopes: list[str] = Field(min_length=1)
    per_minute: int | None = Field(default=None, ge=1, le=1000)
    mode: Literal["on", "off"] = "on"

    @field_validator("name")
    @classmethod
    def no_spaces(cls, name: str, info: ValidationInfo) -> str:
        if " " in name:
            raise ValueError(f"“{name}” has a space.")
        return name


def form(**lists: list[str]) -> Form:
    return Form(
        {name: values[-1] for name, values in lists.items()},
        {name: tuple(values) for name, values in lists.items()},
    )


def wrong(**lists: list[str]) -> dict[str, str]:
    with pytest.raises(FormInvalid) as refused:
        parse(form(**lists), KeyForm)
    return refused.value.errors


def test_a_right_form() -> None:
    parsed = parse(
        form(name=[" app "], scopes=["inference", "usage:read"], per_minute=[""], csrf=["x"]), KeyForm
    )
    assert parsed == KeyForm(name="app", scopes=["inference", "usage:read"])


def test_each_wrong_field_says_what_is_wrong() -> None:
    assert wrong(name=["a much longer name"], per_minute=["0"], mode=["maybe"]) == {
        "name": "At most 8 characters; these are 18.",
        "scopes": "Choose at least one.",
        "per_minute": "“0” is too little: at least 1.",
        "mode": "“maybe” is none of 'on' or 'off'.",
    }
    assert wrong(name=[" "], scopes=["inference"], per_minute=["many"]) == {
        "name": "Enter a value.",
        "per_minute": "“many” is no whole number.",
    }
    assert wrong(name=["a b"], scopes=["inference"]) == {"name": "“a b” has a space."}


def test_errors_of_the_domain_stand_at_their_field() -> None:
    for error, expected in (
        (InvalidField("name", "no such name"), {"name": "No such name."}),
        (BoundNotHeld("expires_at", "later than your own"), {"expires_at": "Later than your own."}),
        (NameTaken("there is one already"), {"": "There is one already."}),
    ):
        with pytest.raises(FormInvalid) as refused, field_errors():
            raise error
        assert refused.value.errors == expected


def test_faults_of_the_server_are_no_errors_of_a_form() -> None:
    for error in (DatabaseUnavailable("away"), ZeroDivisionError()):
        with pytest.raises(type(error)), field_errors():
            raise error


def test_a_repetition_is_known_by_what_was_typed() -> None:
    first, other = form(name=["app"], csrf=["one"]), form(name=["app"], csrf=["two"])
    assert first.sha256 == other.sha256
    assert first.sha256 != form(name=["app2"], csrf=["one"]).sha256


def test_each_page_writes_the_token_differently() -> None:
    one, two = masked("the token"), masked("the token")
    assert one != two
    assert is_token(one, "the token") and is_token(two, "the token")
    for text in (None, "", "the token", one[:-4], "é", masked("another token")):
        assert not is_token(text, "the token")
