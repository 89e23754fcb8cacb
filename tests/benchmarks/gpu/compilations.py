"""How many Triton kernels and launchers a timed process compiles: none, if the stage `build` has made all that it launches."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.benchmarks.gpu.sizes import Line, line


def counted_compilations(job: str, work: Callable[[], Iterable[Line]]) -> Iterator[Line]:
    """The lines of `work`, then one with what was compiled meanwhile, by name: what `build` lacks."""
    with compilations() as compiled:
        try:
            yield from work()
        except Exception:
            yield compiled_line(job, compiled)
            raise
        yield compiled_line(job, compiled)


@contextmanager
def compilations() -> Iterator[Counter[str]]:
    """Counts what Triton compiles within: kernels by their names, and launchers by that of their C module.

    What comes from its cache does not count.
    """
    from triton import knobs
    from triton.runtime import build

    compiled: Counter[str] = Counter()
    compile_module: Callable[..., str] = build._build

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled[src.name] += 1

    def counted(name: str, *arguments: Any) -> str:
        compiled[name] += 1
        return compile_module(name, *arguments)

    with (
        patch.object(knobs.compilation, "listener", listen),
        patch.object(build, "_build", counted),
    ):
        yield compiled


def compiled_line(job: str, compiled: Counter[str]) -> Line:
    """One line of a job. It fails for more than 0: they took of the job's time, and maybe of what it measured."""
    found = line(f"compiled in job/{job}", compiled.total(), "compilations")
    if not compiled:
        return found
    names = ", ".join(f"{name} {count}" for name, count in compiled.most_common())
    return found | {"ok": False, "error": f"compiled in a timed process: {names}"}
