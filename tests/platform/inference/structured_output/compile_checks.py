"""Compile checks on a vocabulary of bytes, with a worker pool of their own."""

import asyncio
import os
from pathlib import Path

from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.spec import GrammarSpec
from loraplex.platform.errors import WorkersUnavailable
from loraplex.platform.inference.structured_output.compile_cache import (
    CompileCache,
    CompileLimits,
    CompileResult,
    compile_check_task,
)
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import TaskStats


class ByteChecks(CompileCache):
    """Compile checks; their process starts in the background. `ended`: those that ran to their end."""

    def __init__(self, tokenizer: Path, limits: CompileLimits) -> None:
        vocabulary = byte_vocabulary()
        self.task = compile_check_task(
            limits, str(tokenizer), vocabulary.vocab_size, tuple(vocabulary.end_token_ids), os.environ
        )
        self.pool = WorkerPool()
        super().__init__(self.pool, self.task, limits)
        self.ended = 0
        self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            await self.pool.start(self.task)
        except WorkersUnavailable:
            return  # every check says so

    @property
    def work(self) -> TaskStats:
        return self.pool.stats(self.task)

    @property
    def pid(self) -> int | None:
        """The process that forks; None while there is none."""
        return next(iter(self.work.pids), None)

    async def _run(self, namespace: bytes, digest: bytes, spec: GrammarSpec) -> CompileResult:
        result = await super()._run(namespace, digest, spec)
        self.ended += 1
        return result

    async def close(self) -> None:
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        await self.pool.close()


def write_tokenizer(folder: Path) -> Path:
    """The `tokenizer.json` of the byte vocabulary."""
    file = folder / "tokenizer.json"
    file.write_text(byte_vocabulary().tokenizer_json)
    return file
