"""The console's cookies: one session for each area, the sentence that the next page shows once, skipped first steps, the theme.

Invariant: no cookie can be read by scripts, and behind TLS none can be set by another host (`__Host-`).
"""

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias, get_args
from uuid import UUID

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.web.console.origin import PublicOrigin
from loraplex.tenants.people.sessions import Area

OPERATOR_PATH: Final = "/operator/console"
TENANT_PATH: Final = "/console"
SESSION_COOKIE: Final[dict[Area, str]] = {"tenant": "loraplex", "operator": "loraplex-operator"}
TOAST_COOKIE: Final = "loraplex-toast"
TOAST_SECONDS: Final = 60
ATTEMPT_COOKIE: Final = "loraplex-oidc"
MAX_TOAST_LENGTH: Final = 400
STEPS_COOKIE: Final = "loraplex-steps"
STEPS_SECONDS: Final = 365 * 24 * 3600
THEME_COOKIE: Final = "loraplex-theme"
THEME_SECONDS: Final = 365 * 24 * 3600
Theme: TypeAlias = Literal["system", "light", "dark"]
THEMES: Final[tuple[Theme, ...]] = get_args(Theme)
# The cookie is the browser's, and pages of sibling domains can write it: `/` or `..` in a name would lead the form elsewhere.
Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]*\Z")]


@dataclass(frozen=True, slots=True)
class Undo:
    """The change of an alias that a rollback takes back, while the alias has this generation."""

    adapter: Name
    alias: Name
    generation: int


@dataclass(frozen=True, slots=True)
class Toast:
    """A sentence that the next page shows once, with a button where the change can be taken back."""

    text: str
    undo: Undo | None = None


def theme_of(name: str | None) -> Theme:
    """Return the theme of that name; an unknown one is the system's."""
    return next((theme for theme in THEMES if theme == name), "system")


def area_of(request: Request) -> Area:
    """Return the area that the path of a request belongs to."""
    return "operator" if request.url.path.startswith(OPERATOR_PATH) else "tenant"


@dataclass(frozen=True, slots=True)
class Cookies:
    """Reads the console's cookies of a request, and writes those of its response."""

    origin: PublicOrigin
    request: Request

    def session_token(self) -> str | None:
        """Return the token of the session of the request's area."""
        return self.request.cookies.get(self._name(SESSION_COOKIE[area_of(self.request)]))

    def start_session(self, response: Response, area: Area, token: str) -> None:
        """Give the browser the token of a session; the server alone knows when it ends."""
        self._set(response, SESSION_COOKIE[area], token, None)

    def end_session(self, response: Response, area: Area) -> None:
        """Take the token from the browser."""
        self._set(response, SESSION_COOKIE[area], "", 0)

    def leave_toast(self, response: Response, text: str, undo: Undo | None = None) -> None:
        """Leave a sentence for the next page, and what takes the change back."""
        toast = Toast(text[:MAX_TOAST_LENGTH], undo)
        value = base64.urlsafe_b64encode(msgspec.json.encode(toast)).rstrip(b"=").decode()
        self._set(response, TOAST_COOKIE, value, TOAST_SECONDS)

    def toast(self) -> Toast | None:
        """Return what an earlier response left."""
        value = self.request.cookies.get(self._name(TOAST_COOKIE))
        if not value:
            return None
        try:
            encoded = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
            return msgspec.json.decode(encoded, type=Toast)
        except (binascii.Error, ValueError):
            return None

    def drop_toast(self, response: Response) -> None:
        """Take the sentence from the browser: it was shown."""
        self._set(response, TOAST_COOKIE, "", 0)

    def skipped_steps(self, tenant_id: UUID) -> frozenset[str]:
        """Return the first steps that the browser's person has skipped in a tenant."""
        value = self.request.cookies.get(self._name(_steps_cookie(tenant_id)), "")
        return frozenset(value.split(".")) - {""}

    def skip_steps(self, response: Response, tenant_id: UUID, steps: Iterable[str]) -> None:
        """Let the browser keep which first steps are skipped in a tenant, besides those that are already."""
        skipped = self.skipped_steps(tenant_id) | frozenset(steps)
        value = ".".join(sorted(skipped))
        self._set(response, _steps_cookie(tenant_id), value, STEPS_SECONDS)

    def theme(self) -> Theme:
        """Return the theme that the browser's person has chosen."""
        return theme_of(self.request.cookies.get(self._name(THEME_COOKIE)))

    def choose_theme(self, response: Response, theme: Theme) -> None:
        """Let the browser keep a theme for all pages, those before signing in too."""
        chosen, seconds = ("", 0) if theme == "system" else (theme, THEME_SECONDS)
        self._set(response, THEME_COOKIE, chosen, seconds)

    def leave_attempt(self, response: Response, sealed: str, max_age_s: int) -> None:
        """Leave what the answer of the identity provider must match."""
        self._set(response, ATTEMPT_COOKIE, sealed, max_age_s)

    def attempt(self) -> str | None:
        """Return what `leave_attempt` left in this browser."""
        return self.request.cookies.get(self._name(ATTEMPT_COOKIE))

    def drop_attempt(self, response: Response) -> None:
        """Take the attempt from the browser: it was used."""
        self._set(response, ATTEMPT_COOKIE, "", 0)

    def _set(self, response: Response, name: str, value: str, max_age_s: int | None) -> None:
        response.set_cookie(
            self._name(name),
            value,
            max_age=max_age_s,
            path="/",
            httponly=True,
            samesite="lax",
            secure=self.origin.is_secure(self.request),
        )

    def _name(self, name: str) -> str:
        return f"__Host-{name}" if self.origin.is_secure(self.request) else name


def _steps_cookie(tenant_id: UUID) -> str:
    return f"{STEPS_COOKIE}-{tenant_id.hex[:12]}"
