"""Settings: the order of sources, and errors that name the setting, its value and what is allowed."""

from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from loraplex.adapters.limits import UploadConfig
from loraplex.platform.config import load_settings
from loraplex.platform.engines.engine_config import engine_config
from loraplex.platform.engines.event_buffer import READER_STALL_S, EventBufferConfig
from loraplex.platform.engines.process import EngineProcessOptions, WatchdogConfig
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.inference.structured_output.compile_cache import CompileLimits
from loraplex.platform.observability.health import READY_STALL_S
from loraplex.platform.removed_settings import REMOVED
from loraplex.platform.server.serve_gateway import MAX_CONNECTIONS_PER_ADDRESS
from loraplex.platform.startup_errors import SettingsError
from loraplex.platform.web.runner import IDEMPOTENCY_LIFETIME
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.ledger.partitions import LedgerRetention
from loraplex.tenants.retention import Retention


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DATABASE_URL", "REDIS_URL", "LORAPLEX_PORT", "LORAPLEX_SECRET"):
        monkeypatch.delenv(name, raising=False)


def test_order_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().port == 8000
    (tmp_path / "loraplex.toml").write_text('port = 1111\nhost = "0.0.0.0"\n')
    assert load_settings().port == 1111
    monkeypatch.setenv("LORAPLEX_PORT", "2222")
    assert load_settings().port == 2222
    settings = load_settings({"port": 3333, "host": None})
    assert (settings.port, settings.host) == (3333, "0.0.0.0")


def test_urls_and_secret_come_from_the_environment_and_stay_out_of_sight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:hush@h/d")
    monkeypatch.setenv("REDIS_URL", "redis://h")
    monkeypatch.setenv("LORAPLEX_SECRET", "hushhush")
    settings = load_settings()
    assert (
        settings.database_url is not None and settings.redis_url is not None and settings.secret is not None
    )
    assert settings.database_url.get_secret_value() == "postgresql://u:hush@h/d"
    assert "hush" not in repr(settings)


def test_urls_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text('database_url = "postgresql://h/d"\n')
    settings = load_settings(config_file=file)
    assert settings.database_url is not None
    assert settings.database_url.get_secret_value() == "postgresql://h/d"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"dtype": "float8"}, ["dtype", "float8", "bfloat16"]),
        ({"port": 70000}, ["port", "70000", "65535"]),
        ({"max_model_len": 1}, ["max_model_len", "1", "16"]),
        ({"quantization": "gguf"}, ["quantization", "gguf", "int8"]),
        ({"kv_cache_dtype": "int3"}, ["kv_cache_dtype", "int3", "auto", "fp8"]),
        ({"engine": ("tcp://0.0.0.0:1",)}, ["engine", "tcp://0.0.0.0:1", "ipc://"]),
        ({"engine": ("ipc://relative",)}, ["engine", "ipc://relative", "absolute"]),
        ({"engine": ("ray://a", "ray://b")}, ["engine", "ray://a", "one ray://APP"]),
        ({"engine": ("ray://a b",)}, ["engine", "ray://a b", "one ray://APP"]),
        ({"max_model_len": "many"}, ["max_model_len", "many", "integer"]),
        ({"colour": "red"}, ["colour", "max_num_seqs"]),
        ({"port": 70000, "dtype": "x"}, ["port", "dtype"]),
    ],
)
def test_wrong_values_are_named(flags: dict[str, object], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


def test_wrong_environment_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(SettingsError, match="LORAPLEX_PORT.*tcp://10.0.0.1:8000"):
        load_settings()


def test_wrong_secret_is_not_shown() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"database_url": 12345})
    assert "12345" not in str(caught.value) and "database_url" in str(caught.value)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not exist"):
        load_settings(config_file=tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("port = = 1")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load_settings(config_file=broken)
    broken.write_text("prot = 1")
    with pytest.raises(SettingsError, match="unknown setting `prot`"):
        load_settings(config_file=broken)


def test_prices_and_times_are_checked() -> None:
    price = load_settings({"price_prompt": 7, "price_completion": 9}).price
    assert (price.prompt, price.cached_prompt, price.completion) == (7, 7, 9)
    assert load_settings({"price_prompt": 7, "price_cached_prompt": 0}).price.cached_prompt == 0
    wrong: list[tuple[dict[str, object], str]] = [
        ({"price_prompt": 7, "price_cached_prompt": 8}, "price_cached_prompt.*at most `price_prompt`"),
        ({"currency": "euro"}, "currency"),
        ({"valkey_timeout_s": 2.0}, "valkey_timeout_s"),
    ]
    for flags, message in wrong:
        with pytest.raises(SettingsError, match=message):
            load_settings(flags)


def test_the_meter_export_goes_to_a_file_or_signed_to_a_url() -> None:
    url, secret = "https://meter.example.com/in", "whsec_" + "A" * 32
    settings = load_settings({"meter_export": url, "meter_export_secret": secret})
    assert settings.meter_export_secret is not None and "A" * 32 not in repr(settings)
    assert load_settings({"meter_export": "/var/meter.jsonl"}).meter_export_secret is None
    inside: dict[str, object] = {"meter_export": "http://10.0.0.1:8080/", "meter_export_secret": secret}
    assert load_settings(inside | {"webhook_allow_private": True}).meter_export == "http://10.0.0.1:8080/"
    wrong: list[tuple[dict[str, object], str]] = [
        ({"meter_export": "meter.jsonl"}, "meter_export.*absolute path"),
        ({"meter_export": url}, "meter_export_secret.*exactly if `meter_export` is a URL"),
        ({"meter_export": "/m", "meter_export_secret": secret}, "meter_export_secret.*exactly if"),
        ({"meter_export": url, "meter_export_secret": "whsec_short"}, "meter_export_secret.*24 bytes"),
        (inside, "meter_export.*must begin with https"),
        ({"meter_export": "https://10.0.0.1/", "meter_export_secret": secret}, "meter_export.*private"),
    ]
    for flags, message in wrong:
        with pytest.raises(SettingsError, match=message):
            load_settings(flags)


@pytest.mark.parametrize(
    ("flags", "grace_s"),
    [({}, 300), ({"known_caller_s": 600}, 600), ({"known_caller_s": 0}, 30)],
)
def test_a_gateway_is_ready_without_postgresql_as_long_as_it_serves_known_callers(
    flags: dict[str, object], grace_s: float
) -> None:
    assert load_settings(flags).readiness_grace_s == grace_s


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        load_settings().port = 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("https://LLM.Example.com:443", "https://llm.example.com"),
        ("http://llm.example.com:80", "http://llm.example.com"),
        ("https://llm.example.com:8443", "https://llm.example.com:8443"),
        ("http://[2001:DB8::1]:443", "http://[2001:db8::1]:443"),
        ("https://xn--bcher-kva.example", "https://xn--bcher-kva.example"),
    ],
)
def test_a_public_url_is_kept_as_browsers_write_an_origin(given: str, kept: str) -> None:
    assert load_settings({"public_url": given}).public_url == kept


@pytest.mark.parametrize(
    "given",
    [
        *("https://:8000", "https://user:secret@llm.example.com", "https://user@llm.example.com"),
        *("https://bücher.example", "https://llm.example.com:x", "https://[::1", "https://llm.example.com/"),
    ],
)
def test_a_public_url_that_is_no_origin_is_refused(given: str) -> None:
    with pytest.raises(SettingsError, match="public_url"):
        load_settings({"public_url": given})


def test_engine_config_carries_the_limits() -> None:
    given = {"max_num_seqs": 3, "kv_cache_bytes": 1 << 21, "kv_cache_dtype": "fp8", "adapter_bytes": 0}
    given |= {"prefix_caching": False, "cuda_graphs": "off", "deterministic": True}
    config = engine_config(load_settings(given), "/m")
    assert (config.cache.prefix_caching, config.cuda_graphs, config.deterministic) == (False, "off", True)
    assert (config.model, config.scheduler.max_num_seqs, config.cache.kv_bytes) == ("/m", 3, 1 << 21)
    assert (config.cache.kv_dtype, config.lora.max_bytes) == ("fp8", 0)
    assert [config.scheduler.max_tokens(is_cuda=is_cuda) for is_cuda in (False, True)] == [256, 1024]
    scheduler = engine_config(load_settings({"max_num_batched_tokens": 512}), "/m").scheduler
    assert scheduler.max_tokens(is_cuda=False) == scheduler.max_tokens(is_cuda=True) == 512


def test_allowed_origins_are_what_browsers_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_ALLOWED_ORIGINS", "HTTPS://App.example.com:443/, http://localhost:3000,")
    assert load_settings().allowed_origins == ("https://app.example.com", "http://localhost:3000")
    monkeypatch.delenv("LORAPLEX_ALLOWED_ORIGINS")
    assert load_settings().allowed_origins == ()
    for origin in (
        "*",
        "tauri://localhost",
        "http://[::1]:80",
        "https://a.example:80",
        "http://a.example:443",
    ):
        (kept,) = load_settings({"allowed_origins": [origin]}).allowed_origins
        assert kept == origin.removesuffix(":80") if origin.startswith("http:") else kept == origin
    for wrong in (
        "null",
        "app.example.com",
        "https://*.example.com",
        "https://a.example/page",
        "https://u@a.example",
    ):
        with pytest.raises(SettingsError, match="allowed_origins"):
            load_settings({"allowed_origins": [wrong]})


def test_trusted_proxies_are_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LORAPLEX_TRUSTED_PROXIES", "10.0.0.0/8, ::ffff:192.168.0.0/112,")
    assert load_settings().trusted_proxies == ("10.0.0.0/8", "192.168.0.0/16")
    monkeypatch.delenv("LORAPLEX_TRUSTED_PROXIES")
    (tmp_path / "loraplex.toml").write_text('trusted_proxies = ["fd00::/8"]')
    assert load_settings().trusted_proxies == ("fd00::/8",)
    for wrong in ("proxy.example", "10.0.0.1/8"):
        with pytest.raises(SettingsError, match="trusted_proxies"):
            load_settings({"trusted_proxies": [wrong]})


def test_tiers_have_default_maxima(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LORAPLEX_TIER_DEFAULT_MAX_TOKENS", "gold=8192, free = 0")
    limits = load_settings({"default_max_tokens": 100}).default_limits
    assert [limits.max_tokens(tier, None) for tier in ("gold", "free", "other")] == [8192, None, 100]
    monkeypatch.delenv("LORAPLEX_TIER_DEFAULT_MAX_TOKENS")
    (tmp_path / "loraplex.toml").write_text("[tier_default_max_tokens]\ngold = 5")
    assert load_settings().tier_default_max_tokens == {"gold": 5}
    with pytest.raises(SettingsError, match="must be tier=tokens"):
        load_settings({"tier_default_max_tokens": "gold"})
    for wrong in ("gold=many", "gold=-1", "gold=1000001", "Gold=1", "=1"):
        with pytest.raises(SettingsError, match="tier_default_max_tokens"):
            load_settings({"tier_default_max_tokens": wrong})


def test_the_engines_are_sockets_or_one_application_of_ray() -> None:
    assert load_settings({"engine": ("ray://loraplex",)}).ray_application == "loraplex"
    assert load_settings({"engine": ("ipc:///a", "ipc:///b")}).ray_application is None
    assert load_settings().ray_application is None


def test_a_setting_of_an_earlier_release_is_named_with_what_holds_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "loraplex.toml"
    gone = "setting `chunked_prefill` is gone: {} has no effect, true holds; remove it"
    file.write_text("chunked_prefill = false")
    assert load_settings(config_file=file).without_effect == (gone.format("False"),)
    file.write_text("chunked_prefill = true")
    assert load_settings(config_file=file).without_effect == ()
    monkeypatch.setenv("LORAPLEX_CHUNKED_PREFILL", "off")
    settings = load_settings().model_copy(update={"port": 1})
    assert settings.without_effect == (gone.format("off"),)


def test_what_is_said_to_hold_instead_of_a_setting_that_is_gone_does() -> None:
    engine, uploads = engine_config(load_settings(), "/m"), UploadConfig()
    admission, compiling, serving = AdmissionConfig(), CompileLimits(), ServingConfig()
    held = {
        "adapter_page_error": engine.lora.max_page_error,
        "admission_heartbeat_s": admission.heartbeat_s,
        "admission_lease_s": admission.lease_s,
        "chunked_prefill": True,
        "database_grace_s": "known_caller_s",
        "engine_hang_timeout_s": WatchdogConfig().hang_s,
        "engine_start_silence_s": EngineProcessOptions(address="", config=engine).start_silence_s,
        "engine_step_warning_s": engine.step_warning_s,
        "engine_unresponsive_s": WatchdogConfig().unresponsive_s,
        "grammar_deadline_s": compiling.deadline_s,
        "grammar_memory_bytes": compiling.memory_bytes,
        "idempotency_hours": IDEMPOTENCY_LIFETIME / timedelta(hours=1),
        "kv_block_size": engine.cache.block_size,
        "max_body_bytes": serving.body.max_bytes,
        "max_buffered_body_bytes": serving.max_buffered_body_bytes,
        "max_buffered_tokens": EventBufferConfig().tokens,
        "max_connections_per_address": MAX_CONNECTIONS_PER_ADDRESS,
        "max_lora_rank": engine.lora.max_rank,
        "max_open_uploads": uploads.max_open,
        "max_uploads_in_flight": uploads.max_in_flight,
        "overlap": engine.scheduler.overlap,
        "phases_retention_days": LedgerRetention().phases_days,
        "quota_event_retention_days": Retention(audit=timedelta(1)).quota_events / timedelta(days=1),
        "reader_stall_s": READER_STALL_S,
        "ready_stall_s": READY_STALL_S,
        "upload_body_s": uploads.body_s,
        "upload_expiry_s": uploads.expiry_s,
        "upload_part_bytes": uploads.part_bytes,
        "upload_stall_s": uploads.stall_s,
    }
    assert held.keys() == REMOVED.keys()
    assert load_settings(held).without_effect == ()
    assert len(load_settings(dict.fromkeys(REMOVED, "1")).without_effect) == len(REMOVED)
    assert admission.lease_s >= 3 * admission.heartbeat_s
    assert serving.max_buffered_body_bytes >= 4 * serving.body.max_bytes
    assert uploads.max_in_flight_per_tenant * 4 == uploads.max_in_flight
