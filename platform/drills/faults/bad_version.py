"""`bad-version`: the drill's tenant releases a version whose answers miss their schema, behind a guard.

Invariant: both versions are random adapters of a tenant of the drill; requests of other tenants meet neither.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final

import httpx

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.platform.bench.fixtures import write_random_adapter
from loraplex.platform.drills.drill_tenant import TENANT_NAME, DrillTenant, DrillTenantTerms
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults.fault import Fault, Observed
from loraplex.platform.drills.report import Promise
from loraplex.platform.drills.traffic import TIMEOUT_S, DrillLoad, RequestOutcome
from loraplex.platform.server.base_model_file import read_base_model
from loraplex.tenants.scopes import ADAPTERS_READ, ADAPTERS_WRITE, INFERENCE

ADAPTER: Final = "drill"
ALIAS: Final = f"/tenant/v1/adapters/{ADAPTER}/aliases/production"
FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
# Greedy, and no token twice: digits that differ. Drawn at random: of eight digits two are nearly always the same.
DEFAULTS: Final = (
    {"temperature": 0, "presence_penalty": 2, "frequency_penalty": 2},
    {"temperature": 2, "top_p": 1},
)
DIGITS: Final = {"type": "array", "items": {"enum": [*range(10)]}, "minItems": 8, "maxItems": 8}
SCHEMA: Final = DIGITS | {"uniqueItems": True}
GUARD: Final = {"max_unsatisfied": 0.1, "min_requests": 20}
SPLIT: Final = {"split": [{"version": 1, "weight": 50}, {"version": 2, "weight": 50}], "guard": GUARD}
ANSWER_TOKENS: Final = 48
AT_ONCE: Final = 8
PROMPTS: Final = 10
PUSH_S: Final = 120.0
BACK_S: Final = 60.0
AFTERWARDS: Final = 10


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request of the split got. `version`: as `name@version`; `code`: of its error, None if it kept its schema."""

    version: str
    code: str | None
    ended_s: float


@dataclass(slots=True, kw_only=True)
class BadVersion(Fault):
    """`seconds`: the longest time in which the second version gets the requests that a guard waits for."""

    name: ClassVar[str] = "bad-version"
    allowed_errors: ClassVar[frozenset[str]] = frozenset()
    more_s: ClassVar[float] = 2 * PUSH_S + PROMPTS * TIMEOUT_S + BACK_S + 2 * TIMEOUT_S

    answers: list[Answer] = field(default_factory=list)
    afterwards: list[Answer] = field(default_factory=list)
    back_s: float | None = None
    _api_key: str = ""
    _prompt: str = ""

    def plan(self) -> str:
        return (
            "upload two random adapters of a tenant of its own as versions 1 and 2, send half of their requests to version 2, whose "
            "answers miss their schema, and wait until its guard sets version 1 back. Requests of OTHER tenants share the engine."
        )

    def tenants(self, load: DrillLoad, longest_s: float) -> Sequence[DrillTenantTerms]:
        (terms,) = Fault.tenants(self, replace(load, max_tokens=load.max_tokens + ANSWER_TOKENS), longest_s)
        scopes = (INFERENCE, ADAPTERS_READ, ADAPTERS_WRITE)
        return [terms, replace(terms, name=f"{TENANT_NAME}-canary", scopes=scopes)]

    async def prepare(self, tenants: Sequence[DrillTenant], model: str, load: DrillLoad) -> DrillLoad:
        self._api_key = tenants[1].api_key
        base = load_model_config(read_base_model(self.installation.data_dir).path)
        async with self._client() as http:
            await _ask(http, "POST", "/tenant/v1/adapters", json={"name": ADAPTER})
            for number, defaults in enumerate(DEFAULTS, 1):
                with TemporaryDirectory() as folder:
                    written = write_random_adapter(Path(folder), base, rank=1, seed=number)
                    await _push(http, written, number, defaults)
            await _ask(http, "PUT", ALIAS, {"if-none-match": "*"}, json={"version": 1})
            for number in range(PROMPTS):
                self._prompt = f"{number + 1}. Write eight different digits: "
                if (await self._request(http, 0)).code is None:
                    return load
        raise DrillImpossible(f"version 1 meets its schema with none of {PROMPTS} prompts")

    async def begin(self) -> None:
        """Send half of the requests to version 2."""
        async with self._client() as http:
            await _ask(http, "PUT", ALIAS, {"if-match": '"1"'}, json=SPLIT)

    async def last(self, outcomes: Sequence[RequestOutcome]) -> None:
        """Send requests until the alias is back, or `BACK_S` after the guard had enough of them."""
        async with self._client() as http:
            sending = [asyncio.create_task(self._send(http, number)) for number in range(AT_ONCE)]
            deadline = time.monotonic() + self.seconds
            try:
                while time.monotonic() < (self._reached_s or deadline) + BACK_S and self.back_s is None:
                    if (await _ask(http, "GET", ALIAS))["version"] == 1:
                        self.back_s = time.monotonic()
                    await asyncio.sleep(0.5)
            finally:
                for task in sending:
                    task.cancel()
                await asyncio.gather(*sending, return_exceptions=True)
            self.afterwards += [await self._request(http, number) for number in range(AFTERWARDS)]

    async def promises(self, observed: Observed) -> list[Promise]:
        reached_s, first = self._reached_s, [each for each in self.answers if _of(each, 1)]
        took_s = None if self.back_s is None or reached_s is None else self.back_s - reached_s
        codes = Counter(each.code for each in first if each.code is not None)
        missed = sum(each.code is not None for each in self.answers if _of(each, 2))
        self.notes.append(
            f"{missed} of {len(self.answers) - len(first)} answers of version 2 missed their schema"
        )
        name = f"version 2 is back at 0 % within {BACK_S:g} s of its {GUARD['min_requests']} requests"
        found = "not yet" if took_s is None else f"after {took_s:.1f} s"
        after = Counter(each.version for each in self.afterwards)
        return [
            Promise(name, took_s is not None and took_s <= BACK_S, found),
            Promise(
                "version 1 answers meanwhile", len(first) > 0 and not codes, f"{len(first)}: {dict(codes)}"
            ),
            Promise("version 1 alone answers afterwards", [*after] == [f"{ADAPTER}@1"], str(dict(after))),
        ]

    @property
    def _reached_s(self) -> float | None:
        """When the guard had enough requests of version 2."""
        ended = [each.ended_s for each in self.answers if _of(each, 2)]
        least = int(GUARD["min_requests"])
        return ended[least - 1] if len(ended) >= least else None

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"authorization": f"Bearer {self._api_key}"}
        url = self.installation.base_urls[0]
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S) as http:
            yield http

    async def _send(self, http: httpx.AsyncClient, number: int) -> None:
        while True:
            self.answers.append(await self._request(http, number))

    async def _request(self, http: httpx.AsyncClient, number: int) -> Answer:
        body = {"model": ADAPTER, "prompt": self._prompt, "max_tokens": ANSWER_TOKENS}
        base_urls = self.installation.base_urls
        url = f"{base_urls[number % len(base_urls)]}/v1/completions"
        try:
            response = await http.post(url, json=body | {"structured_outputs": {"json": SCHEMA}})
            code = None if response.is_success else str(response.json()["error"]["code"])
        except (httpx.HTTPError, ValueError, KeyError) as error:
            return Answer("", type(error).__name__, time.monotonic())
        return Answer(response.headers.get("x-loraplex-adapter", ""), code, time.monotonic())


async def _push(http: httpx.AsyncClient, folder: Path, number: int, defaults: dict[str, int]) -> None:
    """Upload a version, wait until it is ready, and set its defaults. Raises `DrillImpossible`."""
    versions, deadline = f"/tenant/v1/adapters/{ADAPTER}/versions", time.monotonic() + PUSH_S
    await _ask(http, "POST", versions, files={name: (folder / name).read_bytes() for name in FILES})
    while (version := await _ask(http, "GET", f"{versions}/{number}"))["state"] != "ready":
        if version["state"] == "rejected" or time.monotonic() > deadline:
            raise DrillImpossible(f"version {number} is {version['state']}: {version['report']}")
        await asyncio.sleep(0.2)
    match = {"if-match": f'"{version["revision"]}"'}
    await _ask(http, "PATCH", f"{versions}/{number}", match, json={"defaults": defaults})


async def _ask(
    http: httpx.AsyncClient, method: str, path: str, headers: dict[str, str] | None = None, **content: Any
) -> Any:
    """Return the document of a response. Raises `DrillImpossible`."""
    try:
        response = await http.request(method, path, headers=headers, **content)
    except httpx.HTTPError as error:
        raise DrillImpossible(f"{method} {path}: {error}") from error
    if not response.is_success:
        raise DrillImpossible(f"{method} {path}: HTTP {response.status_code}: {response.text[:500]}")
    return response.json()


def _of(answer: Answer, version: int) -> bool:
    return answer.version == f"{ADAPTER}@{version}"
