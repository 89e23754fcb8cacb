"""Renders the console's templates. Invariant: every value is escaped; an unknown name in a template is an error."""

from collections.abc import Mapping
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, Final

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PrefixLoader, StrictUndefined
from markupsafe import Markup

from loraplex.platform.static_files import StaticFiles
from loraplex.platform.web.console.amounts import decimal
from loraplex.platform.web.console.formatting import FILTERS

SHARED: Final = Path(__file__).parent / "templates"
ROOMS: Final = Path(__file__).parents[1]


class Templates:
    """The templates of the console. `static` gives them the addresses of stylesheets and scripts."""

    def __init__(self, static: StaticFiles) -> None:
        self._environment = Environment(
            loader=ChoiceLoader([FileSystemLoader(SHARED), PrefixLoader(_rooms())]),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters.update(FILTERS, attributes=attributes, decimal=decimal)
        self._environment.globals.update(static=static.url, new_key=new_idempotency_key)

    def render(self, template: str, context: Mapping[str, Any]) -> str:
        """Render a whole template."""
        return self._environment.get_template(template).render(context)

    def render_block(self, template: str, block: str, context: Mapping[str, Any]) -> str:
        """Render one block of a template, with what the template imports. Raises `KeyError` for an unknown block."""
        loaded = self._environment.get_template(template)
        scope = loaded.new_context(dict(context))
        # The imports at the head of the template run before its parent writes anything.
        next(loaded.root_render_func(scope))
        return "".join(loaded.blocks[block](scope))


def _rooms() -> dict[str, FileSystemLoader]:
    """Return the templates of each room by its name, the first part of their names."""
    return {folder.parent.name: FileSystemLoader(folder) for folder in ROOMS.glob("*/templates")}


def new_idempotency_key() -> str:
    """Make the key of a form that is being rendered."""
    return token_urlsafe(18)


def attributes(values: Mapping[str, Any]) -> Markup:
    """Write HTML attributes: an underscore of a name stands for a hyphen, True for a bare name; False and None are left out."""
    written = Markup()
    for name, value in values.items():
        if value is True:
            written += Markup(" {}").format(name.replace("_", "-"))
        elif value is not False and value is not None:
            written += Markup(' {}="{}"').format(name.replace("_", "-"), value)
    return written
