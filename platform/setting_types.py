"""Types of settings whose values are more than text or a number: each checks a value, and returns it in one form."""

import re
from pathlib import Path
from typing import Annotated, Final, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from loraplex.tenants.api_keys.networks import parse_network
from loraplex.tenants.default_limits import MAX_DEFAULT_TOKENS
from loraplex.tenants.names import TENANT_NAME

ENGINE_ADDRESS_PREFIX: Final = "ipc://"
RAY_ADDRESS_PREFIX: Final = "ray://"
RAY_APPLICATION: Final = re.compile(re.escape(RAY_ADDRESS_PREFIX) + "[A-Za-z0-9_.-]{1,100}")
ANY_ORIGIN: Final = "*"
ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s*]+")


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


def _tiers(value: object) -> object:
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if not all(number for _, _, number in pairs):
        raise ValueError("must be tier=tokens, with commas between them, as in gold=8192,free=512")
    return {tier.strip(): number.strip() for tier, _, number in pairs}


def _networks(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(parse_network(text)) for text in value)


def _engines(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(value) == 1 and RAY_APPLICATION.fullmatch(value[0]):
        return value
    for address in value:
        if not address.startswith(f"{ENGINE_ADDRESS_PREFIX}/"):
            raise ValueError(
                f"{address} is not a unix socket; allowed: {ENGINE_ADDRESS_PREFIX}/absolute/path, or one {RAY_ADDRESS_PREFIX}APP"
            )
    return value


def _origins(value: tuple[str, ...]) -> tuple[str, ...]:
    origins = [origin.lower().removesuffix("/") for origin in value]
    for origin in origins:
        if origin != ANY_ORIGIN and not ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} must be `*` or scheme://host[:port], as in https://app.example.com")
    return tuple(origin if origin == ANY_ORIGIN else _origin(origin) for origin in origins)


def _origin(url: str) -> str:
    """Return the origin of `url` as browsers write it: in lower case, without the scheme's own port."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    is_usual = parts.port in (None, {"http": 80, "https": 443}.get(parts.scheme))
    return f"{parts.scheme}://{host}" if is_usual else f"{parts.scheme}://{host}:{parts.port}"


def _public_url(value: str) -> str:
    parts = urlsplit(value)
    if not parts.hostname or "@" in parts.netloc or not value.isascii():
        raise ValueError("must be https://name or https://name:port, the name in ASCII (xn--…)")
    return _origin(value)


def _issuer(value: str) -> str:
    is_here = urlsplit(value).hostname in ("127.0.0.1", "::1", "localhost")
    if not is_here and not value.startswith("https://"):
        raise ValueError("must begin with https://, unless the provider runs on this machine")
    return value


def _mail_server(value: SecretStr) -> SecretStr:
    parts = urlsplit(value.get_secret_value())
    if parts.scheme not in ("smtp", "smtps") or not parts.hostname:
        raise ValueError("must be smtp://user:password@host:port or smtps://…")
    return value


def _sender(value: str) -> str:
    if "@" not in value or not value.isprintable():
        raise ValueError("must be an email address, such as loraplex <no-reply@example.com>")
    return value


DataFolder: TypeAlias = Annotated[Path, AfterValidator(lambda folder: folder.expanduser().absolute())]
Listed: TypeAlias = Annotated[tuple[str, ...], NoDecode, Field(max_length=64), BeforeValidator(_split)]
Networks: TypeAlias = Annotated[Listed, AfterValidator(_networks)]
Origins: TypeAlias = Annotated[Listed, AfterValidator(_origins)]
Engines: TypeAlias = Annotated[tuple[str, ...], Field(max_length=64), AfterValidator(_engines)]
Tier: TypeAlias = Annotated[str, Field(pattern=TENANT_NAME)]
MaxTokens: TypeAlias = Annotated[int, Field(ge=0, le=MAX_DEFAULT_TOKENS)]
TierMaxTokens: TypeAlias = Annotated[
    dict[Tier, MaxTokens], NoDecode, Field(max_length=64), BeforeValidator(_tiers)
]
PublicUrl: TypeAlias = Annotated[str, Field(pattern=r"^https?://[^/?#\s]+$"), AfterValidator(_public_url)]
Issuer: TypeAlias = Annotated[
    str, Field(pattern=r"^https?://[^?#\s]+$", max_length=500), AfterValidator(_issuer)
]
MailServerUrl: TypeAlias = Annotated[SecretStr, AfterValidator(_mail_server)]
Sender: TypeAlias = Annotated[str, Field(min_length=3, max_length=320), AfterValidator(_sender)]
