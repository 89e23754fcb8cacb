"""Which test files a worker of pytest-xdist runs in one go: those that share what is costly to start."""

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


class SharedServers(LoadFileScheduling):  # type: ignore[misc]
    """File by file, but all files that ask the live demo go to one worker: a run starts it once."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        shared = "tests/end_to_end"
        return shared if file.startswith(f"{shared}/") and file not in APART else file
