"""Settings of a process, from flags, `LORAPLEX_*` (and DATABASE_URL, REDIS_URL), the TOML file and defaults, in this precedence.

Invariant: no other module reads a setting from the environment.
"""

import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Any, Literal, Self

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
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from loraplex.platform import setting_types as types
from loraplex.platform.removed_settings import REMOVED, without_effect
from loraplex.platform.startup_errors import SettingsError
from loraplex.tenants.billing.pricing import MAX_PRICE, Price
from loraplex.tenants.default_limits import DefaultLimits, UnknownParameters
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.webhooks.receiver_urls import MAX_URL_LENGTH, parse_receiver_url
from loraplex.tenants.webhooks.signature import is_secret

DEFAULT_CONFIG_FILE = Path("loraplex.toml")
GIB = 1 << 30
PLAIN_HTTP = (
    "`host` is reachable from other machines, and API keys cross the network unencrypted: set `tls_certificate` and `tls_key`, "
    "or put a proxy with TLS in front and name it in `trusted_proxies`"
)
OPEN_METRICS = (
    "`/metrics` has the API's port, and anyone who reaches it reads names and loads of tenants without a key: set `metrics_port`, "
    "and let Prometheus alone reach that"
)
EVERY_ORIGIN = "`allowed_origins` is `*`: any page that a browser shows may call `/v1` with a key that it has; name the origins instead"
MIN_GRACE_S = 30.0
GIVEN_WITH = {"tls_key": "tls_certificate", "smtp_from": "smtp_url", "oidc_client_id": "oidc_issuer"}


def _url(name: str) -> AliasChoices:
    return AliasChoices(name, f"loraplex_{name}")


class Settings(BaseSettings):
    """Every setting with its bounds. The names have the units: `_bytes`, `_s`, tokens."""

    model_config = SettingsConfigDict(
        env_prefix="LORAPLEX_", frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=()
    )

    demo: bool = False
    """Serve the demo model with three tenants and their adapters, as `--demo` does."""
    model: str | None = Field(default=None, min_length=1)
    """The base model: a folder, a `.gguf` file or a hub id."""
    served_model_name: str | None = Field(default=None, min_length=1, max_length=200)
    """The base model's name in requests. Default: the hub id, or the last part of the path."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. `auto`: the checkpoint's, or what a CPU computes fast."""
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    """Format of the base model's projections and head, rounded while they load. `fp8`: CUDA only."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache. `auto`: the model's. `fp8` holds twice as many tokens; slow on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    max_model_len: int | None = Field(default=None, ge=16, le=10_000_000)
    """Most tokens of prompt and response together. Default: the model's own limit."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65_535)
    """Port to listen on; 0 takes a free one."""
    metrics_port: int | None = Field(default=None, ge=0, le=65_535)
    """Port of `host` that has `/metrics` and nothing else. Default: `/metrics` is on `port`."""
    tls_certificate: Path | None = None
    """PEM file: the server's certificate and those between it and its root."""
    tls_key: Path | None = None
    """PEM file of the certificate's key, without a password. Needed with `tls_certificate`."""
    trusted_proxies: types.Networks = ()
    """Proxies whose `X-Forwarded-For` is trusted, such as `10.0.0.0/8`, separated by commas."""
    public_url: types.PublicUrl | None = None
    """Address that people use, such as `https://llm.example.com`, if it is not that of the request."""
    console: bool = True
    """Serve the web console at `/console` and `/operator/console`."""
    allowed_origins: types.Origins = ()
    """Pages whose scripts may call `/v1` in a browser (CORS), separated by commas; `*`: any page."""

    smtp_url: types.MailServerUrl | None = None
    """`smtp://user:password@host:port` (STARTTLS) or `smtps://…`. Needs `public_url`."""
    smtp_from: types.Sender | None = None
    """Sender of mails. Needed with `smtp_url`."""
    oidc_issuer: types.Issuer | None = None
    """Issuer of an OpenID Connect provider, exactly as its discovery document names it."""
    oidc_client_id: str | None = Field(default=None, min_length=1, max_length=500)
    """This server's client at the provider. Needed with `oidc_issuer`."""
    oidc_client_secret: SecretStr | None = None
    """The client's secret. Without one the client is public, and PKCE alone protects it."""
    oidc_name: str = Field(default="OpenID Connect", min_length=1, max_length=40)
    """The provider's name on the sign-in page."""
    oidc_allowed_domains: types.Listed = ()
    """Domains of the email addresses that may sign in by the provider. Default: all."""

    data_dir: types.DataFolder = Path("./.loraplex")
    """Folder of the embedded databases, adapters, demo model and server secret."""
    role: Literal["all", "engine", "gateway"] = "all"
    """`all`: a gateway with its own engines. `engine` and `gateway`: only that process."""
    engines: int | None = Field(default=None, ge=1, le=64)
    """Role `all`: engines of its own. Default: one for each GPU that is visible, else 1."""
    engine: types.Engines = ()
    """Sockets of the engines, or the Ray Serve application whose replicas they are."""
    database_url: SecretStr | None = Field(default=None, validation_alias=_url("database_url"))
    """PostgreSQL; versions 16 and 18 are tested. Default: the embedded server."""
    redis_url: SecretStr | None = Field(default=None, validation_alias=_url("redis_url"))
    """Valkey or Redis, one server. Default: the embedded server."""
    secret: SecretStr | None = None
    """The server secret, at least 16 bytes. Default: generated once in the data directory."""

    blob_store: Literal["local", "s3"] = "local"
    """Where stored adapters and uploaded parts are: in `data_dir`, or in a bucket."""
    s3_bucket: str | None = Field(default=None, min_length=3, max_length=63)
    """The bucket. Give it a lifecycle rule that aborts incomplete multipart uploads."""
    s3_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """`http://` or `https://` address. Default: AWS."""
    s3_region: str | None = Field(default=None, min_length=1, max_length=100)
    """Region of the bucket. Default: that of the machine."""
    s3_prefix: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._/-]{1,200}$")
    """Prefix of every key in the bucket."""
    s3_access_key_id: SecretStr | None = None
    """Default: the identity of the machine."""
    s3_secret_access_key: SecretStr | None = None
    """Secret of `s3_access_key_id`."""
    adapter_disk_bytes: int = Field(default=64 * GIB, ge=1 << 20, le=1 << 50)
    """With a bucket: disk space of the copies of adapters in `data_dir`."""
    storage_floor_bytes: int = Field(default=GIB, ge=0, le=1 << 50)
    """Free disk space below which uploads get 507 `storage_full`. 0: no floor."""

    memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that may be used. CPU memory has no budget."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20, le=1 << 44)
    """Memory of the KV cache. Default: what weights and adapters leave on a GPU, 1 GiB on a CPU."""
    prefix_caching: bool = True
    """Reuse cached prefixes within a tenant."""
    adapter_bytes: int | None = Field(default=None, ge=0, le=1 << 44)
    """Memory of resident adapters. 0: no adapter is served."""
    adapter_host_bytes: int = Field(default=4 * GIB, ge=0, le=1 << 44)
    """With a GPU: pinned host memory, of all `engines`, from which evicted adapters return without reading the disk."""
    adapter_page_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Format of resident adapters. `auto`: the model's type."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Most rows of a batch."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    """Most tokens of a step. Default: 1,024 on a GPU, 256 on a CPU."""
    max_adapters_per_step: int = Field(default=64, ge=1, le=4096)
    """Most different adapters of a batch."""
    max_waiting: int = Field(default=1024, ge=0, le=1 << 20)
    """Sequences that wait to begin in the engine."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """`auto`: steps are replayed as CUDA graphs. `off`: every kernel is launched by itself."""
    deterministic: bool = False
    """The same request with the same `seed` has the same bits, whatever runs beside it."""

    grammar_fast_forward: bool = True
    """Whether engines append several tokens in one step where a grammar allows one continuation."""
    default_max_adapters: int = Field(default=10_000, ge=0, le=1 << 30)
    """Most adapters of a tenant without a limit of its own."""
    default_max_adapter_bytes: int = Field(default=16 * GIB, ge=0, le=1 << 50)
    """Most bytes of adapters of a tenant without a limit of its own."""
    default_max_keys: int = Field(default=10_000, ge=1, le=1 << 30)
    """Most API keys of a tenant without a limit of its own."""
    default_max_tokens: types.MaxTokens = 4096
    """Most tokens of a chat answer whose request names no maximum. 0: what the context leaves."""
    tier_default_max_tokens: types.TierMaxTokens = {}
    """The same by tier, such as `gold=8192,free=512`; a table in the TOML file."""
    unknown_parameters: UnknownParameters = "refuse"
    """What becomes of requests with a parameter that this server does not know."""
    max_requests_in_flight: int = Field(default=2048, ge=1, le=1 << 20)
    """Sequences (prompts times `n`) in progress in a gateway."""
    max_connections: int = Field(default=4096, ge=1, le=1 << 20)
    """Open client connections of a gateway."""
    queue_timeout_s: float = Field(default=120.0, gt=0, le=86_400)
    """Longest wait for a place in the batch; beyond it a request gets 503."""
    first_token_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Longest time from a request's arrival to the first token of each prompt; beyond it 504."""
    total_timeout_s: float = Field(default=1800.0, gt=0, le=86_400)
    """Longest duration of a request; beyond it 504."""

    currency: str = Field(default="USD", pattern=r"^[A-Z]{3}$")
    """Currency (ISO 4217) of the first rate card, and of tenants without one of their own."""
    price_prompt: int = Field(default=0, ge=0, le=MAX_PRICE)
    """Price of a million prompt tokens in the first rate card, in millionths of the currency."""
    price_cached_prompt: int | None = Field(default=None, ge=0, le=MAX_PRICE)
    """The same for cached prompt tokens. Default: `price_prompt`."""
    price_completion: int = Field(default=0, ge=0, le=MAX_PRICE)
    """The same for response tokens."""
    accelerator_price_per_hour: int | None = Field(default=None, ge=0, le=10**12)
    """What all accelerators cost per hour, in millionths of `currency`."""
    invoice_grace_hours: int = Field(default=24, ge=0, le=720)
    """Hours after a month until its invoices are final, for usage that arrives late."""
    journal_max_bytes: int = Field(default=256 << 20, ge=32 << 20, le=1 << 40)
    """Size of a gateway's journal of usage that PostgreSQL does not have yet."""
    ledger_retention_months: int = Field(default=24, ge=2, le=240)
    """Whole months before the current one whose usage records are kept. Rollups and totals stay."""
    audit_retention_days: int = Field(default=365, ge=2, le=3650)
    """Age at which audit entries are deleted, and ended keys."""
    webhook_allow_private: bool = False
    """Webhooks may lead to private networks, and use `http`."""
    meter_export: str | None = Field(default=None, min_length=1, max_length=MAX_URL_LENGTH)
    """Where hourly meter events go: the absolute path of a file, or a URL."""
    meter_export_secret: SecretStr | None = None
    """Signs what is sent to a URL: `whsec_` and at least 24 bytes in base64."""

    drain_grace_s: float = Field(default=5.0, ge=0, le=600)
    """After SIGTERM: how long `/readyz` fails while new requests are still taken."""
    drain_s: float = Field(default=30.0, ge=0, le=3600)
    """How long running requests may continue after that."""
    engine_start_timeout_s: float = Field(default=1800.0, gt=0, le=86_400)
    """Longest start of an engine; then it ends with the name of its stage."""
    engine_restart_s: float = Field(default=30.0, ge=0, le=3600)
    """How long a request whose engine was lost waits for one that goes on with it."""
    valkey_timeout_s: float = Field(default=0.05, gt=0, le=1)
    """Longest silence of Valkey that an admission waits for."""
    known_caller_s: float = Field(default=300.0, ge=0, le=86_400)
    """Without PostgreSQL: how long ago a key that is served on `/v1` may have been read. 0: none."""
    metrics_adapter_names: bool = False
    """Export `vllm:lora_requests_info`, which names the adapters of all tenants."""
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s?#]{1,500}$")
    """OpenTelemetry collector that gets a trace of every request. Needs the extra `otel`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged, to standard error."""
    fake_engine: Path | None = None
    """JSON script that replaces the model, for fault injection."""

    _without_effect: tuple[str, ...] = PrivateAttr(())

    @field_validator(*GIVEN_WITH)
    @classmethod
    def _both_or_neither(cls, value: object, info: ValidationInfo) -> object:
        other = GIVEN_WITH[str(info.field_name)]
        if other in info.data and (value is None) != (info.data[other] is None):
            raise ValueError(f"must be given exactly if `{other}` is")
        return value

    @field_validator("smtp_url")
    @classmethod
    def _links_in_mails_lead_here(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is not None and info.data.get("public_url") is None:
            raise ValueError("needs `public_url`, to which the links in mails lead")
        return value

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

    @model_validator(mode="wrap")
    @classmethod
    def _without_what_is_gone(cls, values: dict[str, Any], build: ModelWrapValidatorHandler[Self]) -> Self:
        """Take out settings of earlier releases; of the environment pydantic reads known names only."""
        settings = build({name: value for name, value in values.items() if name not in REMOVED})
        variables = {name: os.environ.get(f"LORAPLEX_{name.upper()}") for name in REMOVED}
        given = {name: value for name, value in variables.items() if value is not None}
        settings._without_effect = tuple(without_effect({**values, **given}))
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
    def exposures(self) -> tuple[str, ...]:
        """What other machines can read without being meant to, as warnings. A configured proxy is taken to end TLS."""
        if self.role == "engine" or self.is_local:
            return ()
        is_plain = self.tls_certificate is None and not self.trusted_proxies
        return (PLAIN_HTTP,) * is_plain + (OPEN_METRICS,) * (self.metrics_port is None)

    @property
    def without_effect(self) -> tuple[str, ...]:
        """A warning for each setting of an earlier release that was given, and is not what holds now."""
        return self._without_effect

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
        is_ray = bool(self.engine) and self.engine[0].startswith(types.RAY_ADDRESS_PREFIX)
        return self.engine[0].removeprefix(types.RAY_ADDRESS_PREFIX) if is_ray else None

    @property
    def readiness_grace_s(self) -> float:
        """How long PostgreSQL may be away before this gateway is not ready: as long as known callers are served."""
        return max(self.known_caller_s, MIN_GRACE_S)

    @property
    def default_limits(self) -> DefaultLimits:
        """The limits of tenants whose own are null."""
        return DefaultLimits(
            max_adapters=self.default_max_adapters,
            max_adapter_bytes=self.default_max_adapter_bytes,
            max_keys=self.default_max_keys,
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


def _explain(detail: ErrorDetails) -> str:
    name = str(detail["loc"][0]).lower().removeprefix("loraplex_")
    if detail["type"] == "extra_forbidden":
        return f"unknown setting `{name}`; allowed: {', '.join(sorted(Settings.model_fields))}"
    field = Settings.model_fields.get(name)
    private = field is not None and "SecretStr" in str(field.annotation)
    value = "(hidden)" if private else repr(detail["input"])
    allowed = detail["msg"].removeprefix("Value error, ").replace("Input should", "should")
    return f"setting `{name}` (LORAPLEX_{name.upper()}): {value}: {allowed}"
