"""The page that asks before something is destroyed or stopped: it says what happens, and may ask for a name to be typed."""

from dataclasses import dataclass

from loraplex.platform.web.console.forms import Form, FormInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """`verb` is the button that does it, `keep` the one that does not and leads to `back`.

    `typed`: the name to type; None: none. `ends_running`: whether running requests end, too, is asked.

    `method` and `path`: the call of the operator plane that does the same.
    """

    title: str
    consequence: str
    action: str
    verb: str
    keep: str
    back: str
    path: str
    method: str = "POST"
    typed: str | None = None
    ends_running: bool = False

    def require(self, form: Form) -> None:
        """Raise `FormInvalid` unless the name was typed."""
        if self.typed is not None and form.text("typed") != self.typed:
            raise FormInvalid({"typed": f"This is not {self.typed}."}, form.fields)
