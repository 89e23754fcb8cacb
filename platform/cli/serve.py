"""`loraplex serve`: gateway and engine in one command, or either alone. Exit codes: 0 stopped, 1 failed, 2 wrong setting."""

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from loraplex.platform.config import Settings, load_settings
from loraplex.platform.processes.gc_tuning import paused_gc
from loraplex.platform.processes.logs import configure_logs
from loraplex.platform.startup_errors import StartError


def serve_command(
    demo: Annotated[
        bool | None, typer.Option("--demo", help="Serve the demo model, with tenants and adapters.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A folder, a .gguf file or a hub id.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The base model's name in requests.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    quantization: Annotated[str | None, typer.Option(help="none, int8, int4 or fp8.")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="auto or fp8.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and response together, in tokens.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Default 8000; 0 takes a free one.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve /metrics on this port only; default: on --port.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Default ./.loraplex.")] = None,
    config: Annotated[Path | None, typer.Option(help="Default ./loraplex.toml, if it exists.")] = None,
    role: Annotated[str | None, typer.Option(help="all, engine or gateway.")] = None,
    engines: Annotated[
        int | None, typer.Option(help="Engines of role all; default: one per visible GPU, else 1.")
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="ipc:///path of an engine's socket, or ray://APP.")
    ] = None,
    accept_new_secret: Annotated[
        bool,
        typer.Option(
            "--accept-new-secret",
            help="Take another server secret than the database knows, and void what the old one sealed.",
        ),
    ] = False,
) -> None:
    """Serve one base model and its tenants' adapters behind the OpenAI API."""
    flags = {name: value for name, value in locals().items() if name in Settings.model_fields}
    try:
        settings = load_settings(flags, config)
        configure_logs(settings.log_level)
        _run(settings, accept_new_secret)
    except StartError as error:
        _report(error)
        raise typer.Exit(error.exit_code) from None


def _report(error: StartError) -> None:
    line = "; ".join(each.strip() for each in str(error).splitlines() if each.strip())
    Console(stderr=True, soft_wrap=True).print(f"error: {line}", style="red", markup=False, highlight=False)


def _run(settings: Settings, accept_new_secret: bool) -> None:
    """Run the server. A signal during the start cancels it, which is a normal end."""
    with paused_gc():
        from loraplex.platform.server.serve import serve

    before = {*threading.enumerate()}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve(settings, accept_new_secret=accept_new_secret))
        except (StartError, asyncio.CancelledError, KeyboardInterrupt) as error:
            if isinstance(error, StartError):
                _report(error)
            status = error.exit_code if isinstance(error, StartError) else 0
            if any(not each.daemon for each in threading.enumerate() if each not in before):
                # A thread that waits for a silent server would keep the process; the kernel ends the children with it.
                sys.stdout.flush()
                os._exit(status)
            raise typer.Exit(status) from None
