"""Child processes of a benchmark: started with data on their standard input, which ends them, and read at their end."""

import asyncio

from tests.benchmarks.checkout import CHECKOUT

from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.processes.child_process import module_command
from loraplex.platform.processes.environment import foreign_environment


async def start_child(module: str, data: bytes) -> asyncio.subprocess.Process:
    """Run a module of the checkout; its standard input begins with `data` and stays open."""
    process = await asyncio.create_subprocess_exec(
        *module_command(module),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=foreign_environment() | {"PYTHONPATH": str(CHECKOUT)},
    )
    assert process.stdin is not None
    process.stdin.write(data)
    await process.stdin.drain()
    return process


async def end_child(process: asyncio.subprocess.Process, within_s: float) -> bytes:
    """Close the child's standard input, wait for its end and return what it printed. Raises `BenchFailed`."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(within_s):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise BenchFailed(f"a process of the benchmark did not end within {within_s:g} s") from None
    if process.returncode:
        raise BenchFailed(f"a process of the benchmark ended with {process.returncode}")
    return output
