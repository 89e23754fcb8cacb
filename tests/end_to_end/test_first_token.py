"""A prompt that is computed slowly: `loraplex serve` ends it once its first token is late, and is whole afterwards."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.end_to_end.live_server import LiveServer, serving, until

# 7,200 tokens in steps of 64 take seconds on any CPU.
SLOW = {"first_token_timeout_s": "0.5", "max_num_seqs": "4", "max_num_batched_tokens": "64"}
LONG = "Tell me about the sea. " * 1200


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(
        tmp_path_factory.mktemp("slow"), demo_model, "--port", "0", "--dtype", "float32", settings=SLOW
    ) as live:
        yield live
        live.stop()


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_without_a_first_token_in_time_ends_with_504_and_what_was_computed(
    server: LiveServer, stream: bool
) -> None:
    before = server.engine_stats()
    response = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": server.access.model, "prompt": f"{stream} {LONG}", "max_tokens": 5, "stream": stream},
        headers={"authorization": f"Bearer {server.access.tenants[0].api_key}"},
        timeout=300,
    )
    assert response.status_code == 504, response.text
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("timeout", "server_error")
    assert "`first_token_timeout_s`" in error["message"]
    until(lambda: not server.engine_stats().referenced_blocks, 60, "its blocks are given back")
    after = server.engine_stats()
    assert after.running == after.waiting == 0
    assert after.generation_tokens == before.generation_tokens
    assert after.step_tokens > before.step_tokens
