"""Which test files a worker of pytest-xdist runs in one go: those that share what is costly to start."""

from functools import cached_property

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

# They start engines of their own.
APART = frozenset(
    f"tests/end_to_end/test_{name}.py"
    for name in (
        "admission",
        "cancellation",
        "grammar_engine",
        "killed_gateway",
        "never_lose",
        "parity",
        "processes",
        "soak",
    )
)


# What the test of a file is called that lets the file be interpreted.
INTERPRETED = "::test_interpreted"


class SharedServers(LoadFileScheduling):  # type: ignore[misc]
    """File by file, but all files that ask the live demo go to one worker: a run starts it once.

    So do all files that Triton's interpreter runs: its process takes eight seconds to import what they test.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        shared = "tests/end_to_end"
        if file.startswith(f"{shared}/") and file not in APART:
            return shared
        return "interpreted" if file in self._interpreted else file

    @cached_property
    def _interpreted(self) -> frozenset[str]:
        """First asked for when all workers have collected."""
        return frozenset(
            each.removesuffix(INTERPRETED) for each in self.collection if each.endswith(INTERPRETED)
        )
