"""kill -9 of a gateway leaves neither the compile-check process nor a check."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.platform.process_table import alive, children

from loraplex.grammar.backends.vocabulary import byte_vocabulary

GATEWAY = """
import asyncio, os, sys
from loraplex.grammar.backends import emit_xgrammar
from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.tree import JsonValue
from loraplex.platform.inference.structured_output.compile_cache import CompileCache, CompileLimits, compile_check_task
from loraplex.platform.workers.pool import WorkerPool

async def main():
    assert not {"torch", "xgrammar", "transformers"} & set(sys.modules)
    schema = {"const": 0}
    for _ in range(14):
        branch = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
        schema = {"oneOf": [schema, branch]}
    spec = GrammarSpec(backend="xgrammar", source=emit_xgrammar.emit(JsonValue(schema)))
    limits = CompileLimits(deadline_s=60, cpu_s=60)
    task = compile_check_task(limits, sys.argv[1], 257, (256,), os.environ)
    await CompileCache(WorkerPool(), task, limits).check(b"a", spec)

asyncio.run(main())
"""


def test_nothing_outlives_a_killed_gateway(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(byte_vocabulary().tokenizer_json)
    gateway = subprocess.Popen([sys.executable, "-c", GATEWAY, str(tokenizer)])
    try:
        descendants = until_a_check_runs(gateway)
    finally:
        os.kill(gateway.pid, signal.SIGKILL)
        gateway.wait()
    deadline = time.monotonic() + 60
    while any(map(alive, descendants)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def until_a_check_runs(gateway: "subprocess.Popen[bytes]") -> list[int]:
    """Return the compile-check process and its forked checks."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and gateway.poll() is None:
        for process in children(gateway.pid):
            if checks := children(process):
                return [process, *checks]
        time.sleep(0.02)
    raise AssertionError("no check ever ran")
