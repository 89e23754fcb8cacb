"""Settings of a process, from flags, `LORAPLEX_*` (and DATABASE_URL, REDIS_URL), the TOML file and defaults, in this precedence.

Invariant: no other module reads a setting from the environment.
"""

import os
import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AliasChoices,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from loraplex.platform.startup_errors import SettingsError
from loraplex.tenants.api_keys.networks import parse_network
from loraplex.tenants.billing.pricing import MAX_PRICE, Price
from loraplex.tenants.default_limits import MAX_DEFAULT_TOKENS, DefaultLimits, UnknownParameters
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.names import TENANT_NAME
from loraplex.tenants.webhooks.receiver_urls import MAX_URL_LENGTH, parse_receiver_url
from loraplex.tenants.webhooks.signature import is_secret

DEFAULT_CONFIG_FILE = Path("loraplex.toml")
ENGINE_ADDRESS_PREFIX = "ipc://"
RAY_ADDRESS_PREFIX = "ray://"
RAY_APPLICATION = re.compile(re.escape(RAY_ADDRESS_PREFIX) + "[A-Za-z0-9_.-]{1,100}")
GIB = 1 << 30
PLAIN_HTTP = (
    "`host` is reachable from other machines, and API keys cross the network unencrypted: set `tls_certificate` and `tls_key`, "
    "or put a proxy with TLS in front and name it in `trusted_proxies`"
)
OPEN_METRICS = (
    "`/metrics` has the API's port, and anyone who reaches it reads names and loads of tenants without a key: set `metrics_port`, "
    "and let Prometheus alone reach that"
)
ANY_ORIGIN = "*"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s*]+")
DEFAULT_PORT = re.compile(r"^(http://.+):80$|^(https://.+):443$")
EVERY_ORIGIN = "`allowed_origins` is `*`: any page that a browser shows may call `/v1` with a key that it has; name the origins instead"
MIN_GRACE_S = 30.0
GIVEN_WITH = {"tls_key": "tls_certificate", "smtp_from": "smtp_url", "oidc_client_id": "oidc_issuer"}

REMOVED = {
    "adapter_page_error": "0.05",
    "admission_heartbeat_s": "10",
    "admission_lease_s": "45",
    "chunked_prefill": "true",
    "database_grace_s": "known_caller_s",
    "default_max_adapter_bytes": "17179869184",
    "default_max_adapters": "10000",
    "default_max_keys": "10000",
    "engine_hang_timeout_s": "120",
    "engine_start_silence_s": "60",
    "engine_step_warning_s": "10",
    "engine_unresponsive_s": "30",
    "grammar_deadline_s": "5",
    "grammar_fast_forward": "true",
    "grammar_memory_bytes": "1073741824",
    "idempotency_hours": "24",
    "kv_block_size": "16",
    "max_body_bytes": "10485760",
    "max_buffered_body_bytes": "268435456",
    "max_buffered_tokens": "8192",
    "max_connections_per_address": "1024",
    "max_lora_rank": "256",
    "max_open_uploads": "16",
    "max_uploads_in_flight": "32",
    "overlap": "auto",
    "phases_retention_days": "14",
    "quota_event_retention_days": "400",
    "reader_stall_s": "60",
    "ready_stall_s": "20",
    "upload_body_s": "3600",
    "upload_expiry_s": "86400",
    "upload_part_bytes": "16777216",
    "upload_stall_s": "30",
}
"""Settings of earlier releases, each with what holds now. They stop no start, because an upgrade must need no edit."""


def _url(name: str) -> AliasChoices:
    return AliasChoices(name, f"loraplex_{name}")


class Settings(BaseSettings):
    """Every setting with its bounds. The names have the units: `_bytes`, `_s`, tokens."""

    model_config = SettingsConfigDict(
        env_prefix="LORAPLEX_", frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=()
    )

    demo: bool = False
    model: str | None = Field(default=None, min_length=1)
    served_model_name: str | None = Field(default=None, min_length=1, max_length=200)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = Field(default=None, ge=16, le=10_000_000)

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65_535)
    metrics_port: int | None = Field(default=None, ge=0, le=65_535)
    tls_certificate: Path | None = None
    tls_key: Path | None = Field(default=None, validate_default=True)
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(default=(), max_length=64)
    public_url: str | None = Field(default=None, pattern=r"^https?://[^/?#\s]+$")
    console: bool = True
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = Field(default=(), max_length=64)

    smtp_url: SecretStr | None = None
    smtp_from: str | None = Field(default=None, min_length=3, max_length=320, validate_default=True)
    oidc_issuer: str | None = Field(default=None, pattern=r"^https?://[^?#\s]+$", max_length=500)
    oidc_client_id: str | None = Field(default=None, min_length=1, max_length=500, validate_default=True)
    oidc_client_secret: SecretStr | None = None
    oidc_name: str = Field(default="OpenID Connect", min_length=1, max_length=40)
    oidc_allowed_domains: Annotated[tuple[str, ...], NoDecode] = Field(default=(), max_length=64)

    data_dir: Path = Path("./.loraplex")
    role: Literal["all", "engine", "gateway"] = "all"
    engine: tuple[str, ...] = Field(default=(), max_length=64)
    database_url: SecretStr | None = Field(default=None, validation_alias=_url("database_url"))
    redis_url: SecretStr | None = Field(default=None, validation_alias=_url("redis_url"))
    secret: SecretStr | None = None

    blob_store: Literal["local", "s3"] = "local"
    s3_bucket: str | None = Field(default=None, min_length=3, max_length=63)
    s3_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    s3_region: str | None = Field(default=None, min_length=1, max_length=100)
    s3_prefix: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._/-]{1,200}$")
    s3_access_key_id: SecretStr | None = None
    s3_secret_access_key: SecretStr | None = None
    adapter_disk_bytes: int = Field(default=64 * GIB, ge=1 << 20, le=1 << 50)
    storage_floor_bytes: int = Field(default=GIB, ge=0, le=1 << 50)

    memory_utilization: float = Field(default=0.9, gt=0, le=1)
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20, le=1 << 44)
    prefix_caching: bool = True
    adapter_bytes: int | None = Field(default=None, ge=0, le=1 << 44)
    adapter_host_bytes: int = Field(default=4 * GIB, ge=0, le=1 << 44)
    adapter_page_dtype: Literal["auto", "int8", "fp8"] = "auto"
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    max_adapters_per_step: int = Field(default=64, ge=1, le=4096)
    max_waiting: int = Field(default=1024, ge=0, le=1 << 20)
    cuda_graphs: Literal["auto", "off"] = "auto"
    deterministic: bool = False

    default_max_tokens: int = Field(default=4096, ge=0, le=MAX_DEFAULT_TOKENS)
    tier_default_max_tokens: Annotated[
        dict[Annotated[str, Field(pattern=TENANT_NAME)], Annotated[int, Field(ge=0, le=MAX_DEFAULT_TOKENS)]],
        NoDecode,
    ] = Field(default={}, max_length=64)
    unknown_parameters: UnknownParameters = "refuse"
    max_requests_in_flight: int = Field(default=2048, ge=1, le=1 << 20)
    max_connections: int = Field(default=4096, ge=1, le=1 << 20)
    queue_timeout_s: float = Field(default=120.0, gt=0, le=86_400)
    first_token_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    total_timeout_s: float = Field(default=1800.0, gt=0, le=86_400)

    currency: str = Field(default="USD", pattern=r"^[A-Z]{3}$")
    price_prompt: int = Field(default=0, ge=0, le=MAX_PRICE)
    price_cached_prompt: int | None = Field(default=None, ge=0, le=MAX_PRICE)
    price_completion: int = Field(default=0, ge=0, le=MAX_PRICE)
    accelerator_price_per_hour: int | None = Field(default=None, ge=0, le=10**12)
    invoice_grace_hours: int = Field(default=24, ge=0, le=720)
    journal_max_bytes: int = Field(default=256 << 20, ge=32 << 20, le=1 << 40)
    ledger_retention_months: int = Field(default=24, ge=2, le=240)
    audit_retention_days: int = Field(default=365, ge=2, le=3650)
    webhook_allow_private: bool = False
    meter_export: str | None = Field(default=None, min_length=1, max_length=MAX_URL_LENGTH)
    meter_export_secret: SecretStr | None = Field(default=None, validate_default=True)

    drain_grace_s: float = Field(default=5.0, ge=0, le=600)
    drain_s: float = Field(default=30.0, ge=0, le=3600)
    engine_start_timeout_s: float = Field(default=1800.0, gt=0, le=86_400)
    valkey_timeout_s: float = Field(default=0.05, gt=0, le=1)
    known_caller_s: float = Field(default=300.0, ge=0, le=86_400)
    metrics_adapter_names: bool = False
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s?#]{1,500}$")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    fake_engine: Path | None = None

    _without_effect: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("engine")
    @classmethod
    def _engines_are_sockets_or_one_application(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) == 1 and RAY_APPLICATION.fullmatch(value[0]):
            return value
        for address in value:
            if not address.startswith(f"{ENGINE_ADDRESS_PREFIX}/"):
                raise ValueError(
                    f"{address} is not a unix socket; allowed: {ENGINE_ADDRESS_PREFIX}/absolute/path, or one {RAY_ADDRESS_PREFIX}APP"
                )
        return value

    @field_validator(*GIVEN_WITH)
    @classmethod
    def _both_or_neither(cls, value: object, info: ValidationInfo) -> object:
        other = GIVEN_WITH[str(info.field_name)]
        if other in info.data and (value is None) != (info.data[other] is None):
            raise ValueError(f"must be given exactly if `{other}` is")
        return value

    @field_validator("public_url")
    @classmethod
    def _an_origin_as_browsers_write_it(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if not parts.hostname or "@" in parts.netloc or not value.isascii():
            raise ValueError("must be https://name or https://name:port, the name in ASCII (xn--…)")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        is_usual = parts.port in (None, {"http": 80, "https": 443}[parts.scheme])
        return f"{parts.scheme}://{host}" if is_usual else f"{parts.scheme}://{host}:{parts.port}"

    @field_validator("smtp_url")
    @classmethod
    def _links_in_mails_lead_here(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is None:
            return None
        parts = urlsplit(value.get_secret_value())
        if parts.scheme not in ("smtp", "smtps") or not parts.hostname:
            raise ValueError("must be smtp://user:password@host:port or smtps://…")
        if info.data.get("public_url") is None:
            raise ValueError("needs `public_url`, to which the links in mails lead")
        return value

    @field_validator("smtp_from")
    @classmethod
    def _mails_have_a_sender(cls, value: str | None) -> str | None:
        if value is not None and ("@" not in value or not value.isprintable()):
            raise ValueError("must be an email address, such as loraplex <no-reply@example.com>")
        return value

    @field_validator("oidc_issuer")
    @classmethod
    def _issuers_are_trusted_through_tls(cls, value: str | None) -> str | None:
        here = value is not None and urlsplit(value).hostname in ("127.0.0.1", "::1", "localhost")
        if value is not None and not here and not value.startswith("https://"):
            raise ValueError("must begin with https://, unless the provider runs on this machine")
        return value

    @field_validator("trusted_proxies", "oidc_allowed_domains", "allowed_origins", mode="before")
    @classmethod
    def _split_at_commas(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(value) if isinstance(value, list) else value

    @field_validator("tier_default_max_tokens", mode="before")
    @classmethod
    def _tiers_with_their_numbers(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(number for _, _, number in pairs):
            raise ValueError("must be tier=tokens, with commas between them, as in gold=8192,free=512")
        return {tier.strip(): number.strip() for tier, _, number in pairs}

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(parse_network(text)) for text in value)

    @field_validator("allowed_origins")
    @classmethod
    def _origins_as_browsers_send_them(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        origins = [origin.lower().removesuffix("/") for origin in value]
        if wrong := next(
            (each for each in origins if each != ANY_ORIGIN and not ORIGIN.fullmatch(each)), None
        ):
            raise ValueError(f"{wrong!r} must be `*` or scheme://host[:port], as in https://app.example.com")
        return tuple(DEFAULT_PORT.sub(r"\1\2", origin) for origin in origins)

    @field_validator("price_cached_prompt")
    @classmethod
    def _a_cached_token_costs_no_more(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value > info.data.get("price_prompt", MAX_PRICE):
            raise ValueError("must be at most `price_prompt`")
        return value

    @field_validator("meter_export")
    @classmethod
    def _exported_to_a_file_or_url(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and "://" in value:
            allow_private = info.data.get("webhook_allow_private", False)
            try:
                parse_receiver_url(value, allow_private=allow_private, field="meter_export")
            except InvalidField as error:
                raise ValueError(str(error)) from error
        elif value is not None and not Path(value).is_absolute():
            raise ValueError("must be a URL or the absolute path of a file")
        return value

    @field_validator("meter_export_secret")
    @classmethod
    def _a_url_needs_a_secret(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        is_url = "://" in (info.data.get("meter_export") or "")
        if "meter_export" in info.data and (value is not None) != is_url:
            raise ValueError("must be given exactly if `meter_export` is a URL")
        if value is not None and not is_secret(value.get_secret_value()):
            raise ValueError("must be `whsec_` and at least 24 bytes in base64")
        return value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @model_validator(mode="wrap")
    @classmethod
    def _without_what_is_gone(cls, values: dict[str, Any], build: ModelWrapValidatorHandler[Self]) -> Self:
        """Take settings of earlier releases out of `values` and the environment, of which pydantic reads known names only."""
        given = {name: os.environ.get(f"LORAPLEX_{name.upper()}", values.get(name)) for name in REMOVED}
        settings = build({name: value for name, value in values.items() if name not in REMOVED})
        settings._without_effect = {
            name: str(value)
            for name, value in given.items()
            if value is not None and not _means(str(value), REMOVED[name])
        }
        return settings

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, environment, file: the first source that has a setting wins."""
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))

    @property
    def price(self) -> Price:
        """The price of tokens. Without a price of their own, cached prompt tokens cost as much as others."""
        cached = self.price_prompt if self.price_cached_prompt is None else self.price_cached_prompt
        return Price(prompt=self.price_prompt, cached_prompt=cached, completion=self.price_completion)

    @property
    def exposes_plain_http(self) -> bool:
        """Whether API keys cross a network unencrypted: clients reach `host` from other machines, and nothing ends TLS.

        A configured proxy is taken to do so.
        """
        is_plain = self.tls_certificate is None and not self.trusted_proxies
        return self.role != "engine" and is_plain and not self.is_local

    @property
    def exposures(self) -> tuple[str, ...]:
        """What other machines can read without being meant to, as warnings."""
        is_open = self.role != "engine" and self.metrics_port is None and not self.is_local
        return (PLAIN_HTTP,) * self.exposes_plain_http + (OPEN_METRICS,) * is_open

    @property
    def without_effect(self) -> tuple[str, ...]:
        """A warning for each setting of an earlier release that was given, and is not what holds now."""
        return tuple(
            f"setting `{name}` is gone: {value} has no effect, {REMOVED[name]} holds; remove it"
            for name, value in self._without_effect.items()
        )

    @property
    def is_local(self) -> bool:
        """Whether no other machine reaches `host`, but through a proxy on this one."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def scheme(self) -> str:
        """`https` with a certificate of its own, `http` without."""
        return "http" if self.tls_certificate is None else "https"

    @property
    def ray_application(self) -> str | None:
        """The Serve application whose replicas are the engines; None for engines on sockets."""
        is_ray = bool(self.engine) and self.engine[0].startswith(RAY_ADDRESS_PREFIX)
        return self.engine[0].removeprefix(RAY_ADDRESS_PREFIX) if is_ray else None

    @property
    def readiness_grace_s(self) -> float:
        """How long PostgreSQL may be away before this gateway is not ready: as long as known callers are served."""
        return max(self.known_caller_s, MIN_GRACE_S)

    @property
    def default_limits(self) -> DefaultLimits:
        """The limits of tenants whose own are null."""
        return DefaultLimits(
            default_max_tokens=self.default_max_tokens,
            tier_default_max_tokens=self.tier_default_max_tokens,
            unknown_parameters=self.unknown_parameters,
        )


def load_settings(flags: Mapping[str, Any] | None = None, config_file: Path | None = None) -> Settings:
    """Read all sources. Flags that are None count as not given. Raises `SettingsError`, which names every wrong value."""
    if config_file is not None and not config_file.is_file():
        raise SettingsError(f"--config: {config_file} does not exist")

    class FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=config_file or DEFAULT_CONFIG_FILE)

    given = {name: value for name, value in (flags or {}).items() if value is not None}
    try:
        return FromFile(**given)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(detail) for detail in error.errors())) from None
    except TOMLDecodeError as error:
        raise SettingsError(f"{config_file or DEFAULT_CONFIG_FILE}: not valid TOML: {error}") from None


def _means(value: str, held: str) -> bool:
    """Whether both are the same number or word."""
    try:
        return float(value) == float(held)
    except ValueError:
        return value.lower() == held


def _explain(detail: ErrorDetails) -> str:
    name = str(detail["loc"][0]).lower().removeprefix("loraplex_")
    if detail["type"] == "extra_forbidden":
        return f"unknown setting `{name}`; allowed: {', '.join(sorted(Settings.model_fields))}"
    field = Settings.model_fields.get(name)
    private = field is not None and "SecretStr" in str(field.annotation)
    value = "(hidden)" if private else repr(detail["input"])
    allowed = detail["msg"].removeprefix("Value error, ").replace("Input should", "should")
    return f"setting `{name}` (LORAPLEX_{name.upper()}): {value}: {allowed}"
