"""`loraplex serve` as a process, with real PostgreSQL and Valkey and the scripted engine: it responds, drains and leaves no process."""

import asyncio
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import psycopg
import pytest
from structlog.testing import capture_logs
from tests.end_to_end.live_server import command_line, descendants, lives
from tests.platform.server.serve_process import Serve, make_key, model_folder, script, serving, stores, until
from tests.tenants.invoices.billed_tenant import make_billed_tenant
from typer.testing import CliRunner

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript, Fault
from loraplex.engine.messages import EngineRequest, Failed
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.cli import user
from loraplex.platform.config import EVERY_ORIGIN, OPEN_METRICS, PLAIN_HTTP, load_settings
from loraplex.platform.datastores.embedded.orphans import program_of
from loraplex.platform.engines import startup
from loraplex.platform.engines.event_buffer import EventBufferConfig
from loraplex.platform.engines.remote_client import RemoteEngine
from loraplex.platform.server.listening import bind
from loraplex.platform.server.process_signals import Shutdown
from loraplex.platform.server.serve import _serve_engine, _serve_gateway, serve
from loraplex.platform.startup_errors import EngineStartFailed, PortTaken, SettingsError
from loraplex.tenants.admission.recovery import ship_left_behind
from loraplex.tenants.database import Database
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.ledger.journal.folder import JOURNAL_FOLDER

__all__ = ["model_folder", "stores"]

# Longer than a busy machine stands still.
GRACE_S, DRAIN_S = 8, 8


def module(pid: int) -> str:
    """The module that a process runs and its arguments, from its command line `python -P -m MODULE ...`."""
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return " ".join(arguments[arguments.index("-m") + 1 :]).strip()


def chat(url: str, key: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, **fields}
    return httpx.post(
        f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120
    )


def test_answers_probes_metrics_and_drains(
    tmp_path: Path, model_folder: Path, stores: dict[str, str]
) -> None:
    with serving(
        tmp_path / "s", model_folder, script(token_interval_s=0.05), settings={"drain_s": "60", **stores}
    ) as serve:
        until(lambda: len(descendants(serve.process.pid)) == 2)
        pids = descendants(serve.process.pid)
        assert sorted(module(pid) for pid in pids) == [
            "loraplex.platform.engines.main",
            "loraplex.platform.workers.main request_analysis",
        ]
        assert "libtorch" not in Path(f"/proc/{serve.process.pid}/maps").read_text()
        until(lambda: httpx.get(f"{serve.url}/readyz").status_code == 200)
        key = make_key(stores["database_url"])
        answer = chat(serve.url, key)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
        metrics = httpx.get(f"{serve.url}/metrics").text
        assert (
            'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0' in metrics
        )
        facts = json.loads((tmp_path / "s" / "data" / "base_model.json").read_text())
        assert facts["served_name"] == "tiny" and facts["path"] == str(model_folder)
        check_drain(serve, key)
        until(lambda: not any(lives(pid) for pid in pids))
        with psycopg.connect(stores["database_url"]) as connection:
            row = connection.execute("SELECT last_used_at > created_at FROM api_keys").fetchone()
        assert row == (True,)


def check_drain(serve: Serve, key: str) -> None:
    """A running stream finishes after SIGTERM while new requests and readiness are refused."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 200,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream(
        "POST", f"{serve.url}/v1/chat/completions", json=body, headers=headers, timeout=120
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        serve.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{serve.url}/readyz").status_code == 503)
        assert httpx.get(f"{serve.url}/livez").status_code == 200
        refused = chat(serve.url, key)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert serve.process.wait(60) == 0


async def read_stream(
    client: httpx.AsyncClient, max_tokens: int, begun: asyncio.Semaphore
) -> tuple[str, int]:
    """The last event of a stream, and how many its response had. Releases `begun` at the fifth."""
    body = {"model": "tiny", "prompt": "hi", "max_tokens": max_tokens, "stream": True}
    last, count = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        async for line in stream.aiter_lines():
            if line:
                last, count = line, count + 1
                if count == 5:
                    begun.release()
    return last, count


async def refused_or_answered(url: str, key: str) -> httpx.Response:
    """The response to a request of a new connection."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
        return await client.post("/v1/completions", json=body)


async def drain_with_streams(serve: Serve, key: str) -> tuple[list[str], list[httpx.Response], float]:
    """SIGTERM beside 20 streams at their fifth token, half of which end within the drain.

    Returns the last event of each, the first responses after the signal until one is refused, and the seconds to the exit.
    """
    headers, begun = {"authorization": f"Bearer {key}"}, asyncio.Semaphore(0)
    async with httpx.AsyncClient(base_url=serve.url, headers=headers, timeout=60) as client:
        streams = [
            asyncio.create_task(read_stream(client, 30 if number % 2 else 3000, begun))
            for number in range(20)
        ]
        for _ in streams:
            await begun.acquire()
        serve.process.send_signal(signal.SIGTERM)
        signalled = time.monotonic()
        while (await client.get("/readyz")).status_code == 200:
            await asyncio.sleep(0.02)
        responses = [await refused_or_answered(serve.url, key)]
        while responses[-1].status_code == 200:
            await asyncio.sleep(GRACE_S / 20)
            responses.append(await refused_or_answered(serve.url, key))
        ends = [last for last, _ in await asyncio.gather(*streams)]
    assert await asyncio.to_thread(serve.process.wait, 60) == 0
    return ends, responses, time.monotonic() - signalled


async def ship_what_is_left(database_url: str, folder: Path) -> None:
    """Ship what a server on a slow machine leaves in its journal, as its next start does."""
    database = Database(database_url)
    await ship_left_behind(database, folder, max_bytes=1 << 30, lease_s=45.0)
    await database.close()


def test_sigterm_drains_twenty_streams(tmp_path: Path, model_folder: Path, stores: dict[str, str]) -> None:
    """Not ready at once, taking requests for the grace, then refusing; streams end, or with an error, and all is settled."""
    settings = {"drain_grace_s": str(GRACE_S), "drain_s": str(DRAIN_S), **stores}
    with serving(tmp_path / "s", model_folder, script(token_interval_s=0.05), settings=settings) as serve:
        key = make_key(stores["database_url"])
        ends, responses, took_s = asyncio.run(drain_with_streams(serve, key))
    asyncio.run(ship_what_is_left(stores["database_url"], tmp_path / "s" / "data" / JOURNAL_FOLDER))
    assert ends[1::2] == ["data: [DONE]"] * 10
    for end in ends[::2]:
        assert json.loads(end.removeprefix("data: "))["error"]["code"] == "server_shutting_down"
    *answered, refused = responses
    assert answered, "no request was taken after the signal"
    assert {each.status_code for each in answered} == {200}
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "server_shutting_down"
    assert {each.headers["connection"] for each in responses} == {"close"}
    assert took_s >= GRACE_S + DRAIN_S
    with psycopg.connect(stores["database_url"]) as connection:
        outcomes = connection.execute(
            "SELECT outcome, count(*) FROM usage_records GROUP BY outcome"
        ).fetchall()
        open_reservations = connection.execute("SELECT count(*) FROM reservations").fetchall()
    assert dict(outcomes) == {"completed": 10 + len(answered), "failed": 10}
    assert open_reservations == [(0,)]


def metrics(serve: Serve) -> str:
    return httpx.get(f"{serve.url}/metrics").text


def test_a_killed_engine_restarts_and_a_killed_serve_leaves_no_process(
    tmp_path: Path, model_folder: Path
) -> None:
    with (
        serving(tmp_path / "s", model_folder, script(token_interval_s=0.05, start_delay_s=6.0)) as serve,
        ThreadPoolExecutor() as threads,
    ):
        facts = json.loads((tmp_path / "s" / "data" / "embedded" / "services.json").read_text())
        key = make_key(facts["database_url"])
        pids = descendants(serve.process.pid)
        assert len(pids) >= 3
        (engine,) = (pid for pid in pids if "engines.main" in command_line(pid))
        waiting = threads.submit(chat, serve.url, key)
        until(lambda: 'requests_running{engine="0",model_name="tiny"} 1.0' in metrics(serve))
        os.kill(engine, signal.SIGKILL)
        assert waiting.result().json()["usage"]["completion_tokens"] == 5
        assert 'loraplex_engine_deaths_total{engine="0",model_name="tiny"} 1.0' in metrics(serve)
        until(
            lambda: (
                httpx.get(f"{serve.url}/metrics").text.find(
                    'restarts_total{engine="0",model_name="tiny"} 1.0'
                )
                > 0
            )
        )
        until(lambda: httpx.get(f"{serve.url}/readyz").status_code == 200)
        assert chat(serve.url, key).status_code == 200
        pids |= descendants(serve.process.pid)
        serve.process.kill()
        serve.process.wait()
        until(lambda: not any(lives(pid) for pid in pids))


async def test_keys_in_the_open_and_pages_of_any_origin_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    anyone, page = {"allowed_origins": ["*"]}, {"allowed_origins": ["https://app.example.com"]}
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"host": "0.0.0.0"}, [PLAIN_HTTP, OPEN_METRICS]),
        ({"host": "0.0.0.0", "metrics_port": 0}, [PLAIN_HTTP]),
        ({"host": "0.0.0.0", "trusted_proxies": ["10.1.2.3/32"]}, [OPEN_METRICS]),
        ({"host": "127.0.0.1"}, []),
        (anyone, [EVERY_ORIGIN]),
        (page, []),
    ]
    for given, warnings in cases:
        flags = {**given, "port": 0, "data_dir": tmp_path / "file", "model": "tiny"}
        with capture_logs() as logs, pytest.raises(FileExistsError):
            await _serve_gateway(load_settings(flags), Shutdown())
        assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == warnings


@pytest.mark.parametrize("role", ["all", "engine"])
async def test_a_start_warns_of_settings_that_are_gone(role: str, tmp_path: Path) -> None:
    given = {"role": role, "engine": ["ipc:///tmp/e"] if role == "engine" else [], "chunked_prefill": False}
    settings = load_settings({**given, "model": str(tmp_path), "data_dir": tmp_path})
    with capture_logs() as logs, pytest.raises(SettingsError, match="setting `model`"):
        await serve(settings)
    assert [entry["event"] for entry in logs] == list(settings.without_effect)
    assert len(logs) == 1 and logs[0]["log_level"] == "warning"


def children_running(serve: Serve, program: str) -> list[int]:
    """The processes that `serve` itself has started from the file `program`."""
    children = psutil.Process(serve.process.pid).children()
    return [each.pid for each in children if program_of(each).name == program]


def served(serve: Serve, key: str) -> bool:
    """Whether inference and a call that reads the database succeed."""
    headers = {"authorization": f"Bearer {key}"}
    me = httpx.get(f"{serve.url}/tenant/v1/me", headers=headers, timeout=120)
    ready = httpx.get(f"{serve.url}/readyz")
    return [chat(serve.url, key).status_code, me.status_code, ready.status_code] == [200] * 3


def test_killed_stores_are_restarted_with_their_data(tmp_path: Path, model_folder: Path) -> None:
    with serving(tmp_path / "s", model_folder, script()) as serve:
        facts = json.loads((tmp_path / "s" / "data" / "embedded" / "services.json").read_text())
        key = make_key(facts["database_url"])
        assert served(serve, key)
        for program in ("valkey-server", "postgres"):
            (before,) = children_running(serve, program)
            os.kill(before, signal.SIGKILL)
            until(lambda before=before: not lives(before))  # type: ignore[misc]
            until(lambda: served(serve, key))
        with psycopg.connect(facts["database_url"], autocommit=True) as connection:
            connection.execute("SET ROLE app_operator")
            count = "SELECT count(*) >= 3 FROM usage_records"
            until(lambda: connection.execute(count).fetchone() == (True,))


@pytest.mark.long
def test_a_second_server_takes_the_stores_over(tmp_path: Path, model_folder: Path) -> None:
    with serving(tmp_path / "s", model_folder, script()) as owner:
        facts = json.loads((tmp_path / "s" / "data" / "embedded" / "services.json").read_text())
        key = make_key(facts["database_url"])
        with serving(tmp_path / "s", model_folder, script()) as second:
            assert served(second, key)
            owner.process.kill()
            owner.process.wait()
            until(lambda: children_running(second, "postgres"))
            until(lambda: served(second, key))
            pids = descendants(second.process.pid)
            second.process.send_signal(signal.SIGTERM)
            assert second.process.wait(60) == 0
            until(lambda: not any(lives(pid) for pid in pids))


@pytest.mark.long
def test_stores_that_cannot_be_restarted_end_the_process_by_name(tmp_path: Path, model_folder: Path) -> None:
    with serving(tmp_path / "s", model_folder, script()) as serve:
        configuration = tmp_path / "s" / "data" / "embedded" / "postgres" / "postgresql.conf"
        configuration.write_text(configuration.read_text() + "\nno_such_setting = 1\n")
        os.kill(children_running(serve, "postgres")[0], signal.SIGKILL)
        assert serve.process.wait(90) == 1
        errors = (serve.folder / "stderr").read_text()
    assert "the embedded servers could not be kept running: PostgreSQL" in errors
    assert "no_such_setting" in errors


async def use_last_month(url: str) -> None:
    """Make a tenant whose invoice of last month is due."""
    database = Database(url)
    tenant = await make_billed_tenant(database, "billed")
    await tenant.use(Month.of(datetime.now(UTC)).previous.begin, 1000)
    await database.close()


def invoices_of(url: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT name, state FROM invoices JOIN tenants t ON t.id = tenant_id"
        ).fetchall()


def test_two_gateways_share_one_engine(tmp_path: Path, model_folder: Path, stores: dict[str, str]) -> None:
    """They share the stores too: one of them closes last month."""
    asyncio.run(use_last_month(stores["database_url"]))
    address = f"ipc://{tmp_path}/shared/e.sock"
    fake = script(token_interval_s=0.02)
    with serving(
        tmp_path / "e", model_folder, fake, "--role", "engine", "--engine", address, wait=False
    ) as engine:
        arguments = ("--role", "gateway", "--engine", address, "--served-model-name", "tiny")
        with serving(tmp_path / "g", None, fake, *arguments, "--metrics-port", "0", settings=stores) as one:
            key = make_key(stores["database_url"])
            check_metrics_listener(one)
            with serving(tmp_path / "g", None, fake, *arguments, settings=stores) as two:
                assert chat(one.url, key).status_code == 200
                assert chat(two.url, key).status_code == 200
                assert link_of_a_command(one, stores).startswith((one.url, two.url))
                two.process.kill()
                two.process.wait()
                assert chat(one.url, key).status_code == 200
                assert link_of_a_command(one, stores).startswith(f"{one.url}/operator/console/sign-in?token=")
                engine.process.send_signal(signal.SIGTERM)
                assert engine.process.wait(60) == 0
                until(lambda: httpx.get(f"{one.url}/readyz").status_code == 503)
                assert chat(one.url, key).status_code == 503
                until(lambda: invoices_of(stores["database_url"]) == [("billed", "draft")])
        assert link_of_a_command(one, stores) == "", "no gateway runs any more"


def link_of_a_command(serve: Serve, stores: dict[str, str]) -> str:
    """The link that `loraplex user create --operator` prints beside a server; none where it fails."""
    environment = {name.upper(): value for name, value in stores.items()}
    options = ("create", "--operator", "--data-dir", str(serve.folder / "data"))
    return CliRunner().invoke(user.app, options, env=environment).stdout


def frozen_engine(serve: Serve) -> int:
    """The engine's process, stopped while it starts."""

    def engines() -> list[int]:
        return [pid for pid in descendants(serve.process.pid) if "engines.main" in command_line(pid)]

    until(engines)
    (engine,) = engines()
    os.kill(engine, signal.SIGSTOP)
    return engine


def test_an_engine_that_does_not_start_ends_serve_by_the_name_of_its_stage(
    tmp_path: Path, model_folder: Path
) -> None:
    arguments = ("--role", "engine", "--engine", f"ipc://{tmp_path}/run/e.sock")
    settings = {"engine_start_timeout_s": "8"}
    with serving(tmp_path / "s", model_folder, script(), *arguments, wait=False, settings=settings) as serve:
        engine = frozen_engine(serve)
        assert serve.process.wait(60) == 1
        errors = (serve.folder / "stderr").read_text()
        assert "not ready within 8 s; it stopped at: starting Python" in errors
        assert not lives(engine)


@pytest.mark.parametrize("role", ["all", "engine"])
def test_a_signal_ends_a_start_that_hangs(
    tmp_path: Path, model_folder: Path, stores: dict[str, str], role: str
) -> None:
    address = ("--engine", f"ipc://{tmp_path}/run/e.sock") if role == "engine" else ()
    with serving(
        tmp_path / "s", model_folder, script(), "--role", role, *address, wait=False, settings=stores
    ) as serve:
        engine = frozen_engine(serve)
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(60) == 0
        assert not lives(engine)


async def test_a_lone_engine_in_a_crash_loop_ends_its_process_with_an_error(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor restarts it. A gateway restarts its engine for ever."""
    monkeypatch.setattr(startup, "MAX_RESTARTS", 0)
    address = f"ipc://{tmp_path}/run/e.sock"
    (tmp_path / "script.json").write_bytes(msgspec.json.encode(script(faults=(Fault(kind="crash"),))))
    settings = load_settings(
        {
            "role": "engine",
            "engine": (address,),
            "model": str(model_folder),
            "fake_engine": tmp_path / "script.json",
        }
    )
    serving = asyncio.create_task(_serve_engine(settings, Shutdown()))
    engine = RemoteEngine(address, EventBufferConfig())
    engine.start()
    sampling = SamplingParams(max_tokens=1)
    try:
        async with asyncio.timeout(60):
            await engine.wait_ready()
            stream = engine.submit(
                EngineRequest(request_id="r", namespace=bytes(32), prompt_token_ids=[1], sampling=sampling)
            )
            assert [type(event) async for event in stream] == [Failed]
            # It may die before its own supervisor has seen it ready.
            reasons = "keeps failing and is not restarted|ended with status"
            with pytest.raises(EngineStartFailed, match=reasons) as error:
                await serving
    finally:
        await engine.close()
    assert error.value.exit_code == 1


def test_nothing_is_imported_from_the_working_directory(
    tmp_path: Path, model_folder: Path, stores: dict[str, str]
) -> None:
    """Engine, request analysis, compile checks and value validation, with modules that each of them would import."""
    folder, trace = tmp_path / "s", tmp_path / "trace"
    folder.mkdir()
    for name in ("gguf", "numpy", "msgspec", "torch"):
        (folder / f"{name}.py").write_text(f"open({str(trace)!r}, 'a').write({name!r})\n")
    info = msgspec.structs.replace(DEFAULT_INFO, vocab_size=400, eos_token_ids=[2])
    text = ('{"a"', ": 1}")
    with serving(folder, model_folder, FakeScript(info=info, answers=(text,)), settings=stores) as serve:
        schema = {"type": "object", "properties": {"a": {"not": {"const": 2}}}}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        answer = chat(serve.url, make_key(stores["database_url"]), response_format=form)
        assert answer.status_code == 200, answer.text
        started = {module(pid).rpartition("loraplex.")[2] for pid in descendants(serve.process.pid)}
    assert started == {
        "platform.engines.main",
        "platform.workers.main request_analysis",
        "platform.workers.main compile_check",
        "platform.workers.main value_validation",
    }
    assert not trace.exists(), trace.read_text()


def check_metrics_listener(serve: Serve) -> None:
    """With a port of their own, metrics are on that port only, and nothing else is there."""
    assert serve.process.stdout is not None
    address = re.search(r"http://\S+", serve.process.stdout.readline())
    assert address is not None
    assert "loraplex_dependency_up" in httpx.get(address[0]).text
    assert httpx.head(address[0]).status_code == 200
    assert httpx.get(f"{serve.url}/metrics").status_code == 404
    assert httpx.get(address[0].replace("/metrics", "/readyz")).status_code == 404


def test_a_signal_during_the_start_ends_it_cleanly(tmp_path: Path, model_folder: Path) -> None:
    with serving(tmp_path / "s", model_folder, script(), wait=False) as serve:
        until(lambda: descendants(serve.process.pid))
        pids = descendants(serve.process.pid)
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(60) == 0
        until(lambda: not any(lives(pid) for pid in pids))


async def test_one_port_for_the_api_and_the_metrics_is_refused(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    settings = load_settings(
        {
            "role": "gateway",
            "engine": (f"ipc://{tmp_path}/e",),
            "data_dir": tmp_path,
            "port": port,
            "metrics_port": port,
        }
    )
    with pytest.raises(PortTaken, match="--metrics-port"):
        await _serve_gateway(settings, Shutdown())


@pytest.mark.parametrize("setting", ["database_url", "redis_url"])
def test_a_malformed_address_is_a_wrong_setting(
    tmp_path: Path, model_folder: Path, stores: dict[str, str], setting: str
) -> None:
    settings = {**stores, setting: "mysql://user:canary@host/name"}
    with serving(tmp_path / "s", model_folder, script(), wait=False, settings=settings) as serve:
        assert serve.process.wait(180) == 2
        errors = (serve.folder / "stderr").read_text()
    assert f"{setting.upper()} begins with 'mysql'" in errors
    assert "Traceback" not in errors and "canary" not in errors
