"""What `loraplex serve` writes while it starts: stages for people on a terminal, stages and JSON lines without one."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.platform.server.terminal import screen_lines
from transformers import LlamaConfig, LlamaForCausalLM

RUN = "from loraplex.platform.cli.main import main; main()"
START_S = 180.0
STAGES = ("checking the database's schema", "loading the model tiny", "memory: ", "Serving tiny at ")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, chat_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = LlamaConfig(
        vocab_size=len(chat_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=chat_tokenizer.bos_token_id,
        eos_token_id=chat_tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def environment(database_url: str, valkey_url: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LORAPLEX_")}
    small = {"LORAPLEX_KV_CACHE_BYTES": "1048576", "LORAPLEX_ADAPTER_BYTES": "0", "TERM": "xterm-256color"}
    small["LORAPLEX_DRAIN_GRACE_S"] = "0"
    return kept | small | {"DATABASE_URL": database_url, "REDIS_URL": valkey_url}


def command(folder: Path, model: Path) -> list[str]:
    return [
        sys.executable,
        "-c",
        RUN,
        "serve",
        "--port",
        "0",
        "--data-dir",
        str(folder),
        "--model",
        str(model),
    ]


def read_terminal(arguments: Sequence[str], environment: dict[str, str]) -> str:
    """Run the command on a pseudo-terminal, stop it by SIGTERM once it serves, and return all that it wrote."""
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        arguments,
        env=environment,
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        start_new_session=True,
    )
    os.close(other_end)
    written = b""
    deadline = time.monotonic() + START_S
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                written += os.read(terminal, 1 << 16)
            except OSError:  # EIO: the last process on the terminal has ended
                break
            if b"Serving " in written and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0, written.decode()
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return written.decode()


def test_a_terminal_gets_one_line_per_stage_and_no_json(
    tmp_path: Path, model_folder: Path, environment: dict[str, str]
) -> None:
    lines = screen_lines(read_terminal(command(tmp_path, model_folder), environment))
    assert not [line for line in lines if line.startswith("{") or '"event"' in line]
    for stage in STAGES:
        assert len([line for line in lines if line.startswith(stage)]) == 1, lines
    start = lines[: next(number for number, line in enumerate(lines) if line.startswith(STAGES[-1])) + 1]
    # A busy machine may log that a store answers late, and again in time; this model's tokenizer lacks labels of decisions.
    logged = [line for line in start if re.match(r"\d\d:\d\d:\d\d \[", line)]
    assert all("dependency" in line or "labels without a token" in line for line in logged)
    assert len(start) - len(logged) == len(STAGES), start
    # Its shutdown is logged in readable lines.
    draining = next(line for line in lines if "draining" in line)
    assert re.match(r"\d\d:\d\d:\d\d \[info +\] draining +requests=0 ", draining)
    assert sum("[info     ] drained" in line for line in lines) == 1


def test_without_a_terminal_stages_are_plain_lines_and_logs_are_json(
    tmp_path: Path, model_folder: Path, environment: dict[str, str]
) -> None:
    with (tmp_path / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command(tmp_path / "data", model_folder),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(STAGES[-1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0
    finally:
        process.kill()
        process.wait()
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert sorted(line for line in lines if not line.startswith("{")) == sorted(STAGES[:2])
    events = [json.loads(line) for line in lines if line.startswith("{")]
    levels = {event["event"]: event["level"] for event in events}
    assert levels["memory"] == levels["draining"] == "info"
    # A busy machine's late store is a warning.
    assert set(levels.values()) <= {"info", "warning"}, levels
    assert all(event["timestamp"].endswith("Z") for event in events)
