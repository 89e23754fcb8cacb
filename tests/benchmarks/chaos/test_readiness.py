"""What `/readyz` said is compared with what requests got by the second in which they began, gateway by gateway."""

import asyncio
from contextlib import suppress

import pytest
from tests.benchmarks.chaos.readiness import ReadinessFigures, ReadinessWatch, readiness_figures

from loraplex.platform.drills.traffic import RequestOutcome

A, B = "http://a", "http://b"


def outcome(url: str, started_s: float, status: int, *, complete: bool | None = None) -> RequestOutcome:
    whole = status == 200 if complete is None else complete
    code = None if whole else "error"
    return RequestOutcome("id", started_s, started_s + 30, status, code, whole, None, 0, base_url=url)


@pytest.mark.parametrize(
    ("outcomes", "figures"),
    [
        # Gateway A says ready until 102, then unready until 105; B says ready all the time.
        ([outcome(A, 100.5, 200), outcome(A, 103.5, 503), outcome(B, 103.5, 200)], (0, 0)),
        ([outcome(A, 101.2, 507), outcome(A, 101.3, 200), outcome(B, 103.5, 0)], (2, 0)),
        ([outcome(A, 103.0, 200), outcome(A, 103.9, 200), outcome(A, 104.0, 200)], (0, 2)),
        # Before the fault; and a response that began, which was taken.
        ([outcome(A, 99.5, 503), outcome(A, 101.5, 200, complete=False)], (0, 0)),
    ],
)
def test_seconds_are_compared_with_the_requests_that_began_in_them(
    outcomes: list[RequestOutcome], figures: tuple[int, int]
) -> None:
    said = [(99.0 + n / 4, not 102.0 <= 99.0 + n / 4 < 105.0) for n in range(28)]
    samples = {A: said, B: [(at, True) for at, _ in said]}
    assert readiness_figures(samples, outcomes, 100.0) == ReadinessFigures(*figures, 3)


def test_a_second_in_which_the_state_changes_is_neither_and_one_without_a_probe_is_as_the_last() -> None:
    samples = {A: [(100.0, True), (100.9, False), (103.5, True)]}
    outcomes = [outcome(A, at, 200) for at in (100.5, 101.5, 102.5, 103.9)]
    assert readiness_figures(samples, outcomes, 100.0) == ReadinessFigures(0, 2, 2)


async def test_a_gateway_that_is_away_or_silent_says_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.benchmarks.chaos.readiness.PROBE_TIMEOUT_S", 0.2)
    answers = [
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n",
        b"",
    ]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while answers and await reader.readuntil(b"\r\n\r\n"):
                writer.write(answers.pop(0))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with ReadinessWatch([url]) as watch, asyncio.timeout(30):
        while len(watch.samples[url]) < 5:
            await asyncio.sleep(0.05)
    server.close()
    assert [is_ready for _, is_ready in watch.samples[url]][:5] == [True, False, False, False, False]
