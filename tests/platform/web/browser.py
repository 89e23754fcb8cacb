"""The console at the application's level: a real database, a scripted engine, people with roles, and their browsers."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import httpx
import pytest
from fastapi import FastAPI
from selectolax.lexbor import LexborHTMLParser, LexborNode
from tests.platform.fake_admissions import FakeAdmissions
from tests.platform.web.gateway import (
    BASE_MODEL,
    SECRET,
    FakeCompileChecks,
    Recorder,
    blob_path,
    namespace_of,
)
from tests.platform.web.upload_server import UploadHome
from tests.tenants.people.people_world import (
    ADDRESS,
    AGENT,
    PASSWORD,
    add_person,
)

from loraplex.engine.fake_engine import FakeEngine
from loraplex.platform.evaluations.suite_check import SuiteChecks
from loraplex.platform.inference.dependencies import GatewayDependencies, ServingConfig
from loraplex.platform.inference.prompting.chat_template import PromptRenderer
from loraplex.platform.inference.prompting.token_text import TokenText
from loraplex.platform.inference.structured_output.build_task import AnalysisSetup
from loraplex.platform.inference.structured_output.request_analysis import (
    RequestAnalysis,
    request_analysis_task,
)
from loraplex.platform.inference.structured_output.value_validation import (
    ValueValidation,
    value_validation_task,
)
from loraplex.platform.server.secret import derive
from loraplex.platform.web.app import create_app
from loraplex.platform.web.console.cookies import SESSION_COOKIE
from loraplex.platform.web.console_app import ConsoleOptions, add_console
from loraplex.platform.workers.pool import WorkerPool
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.people.sessions import Client
from loraplex.tenants.people.sign_in import sign_in

ORIGIN = "http://console.test"


class Page:
    """A page that was answered with status 200, parsed."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.tree = LexborHTMLParser(response.text)

    def find(self, selector: str) -> LexborNode:
        """The first element that a CSS selector finds."""
        found = self.tree.css_first(selector)
        assert found is not None, f"{selector} is not in:\n{self.response.text}"
        return found

    def all(self, selector: str) -> list[LexborNode]:
        return self.tree.css(selector)

    def texts(self, selector: str) -> list[str]:
        """The texts of all found elements, each with its white space collapsed."""
        return [" ".join(node.text().split()) for node in self.all(selector)]

    @property
    def text(self) -> str:
        """The visible text of the page's main part."""
        return " ".join(self.find("main").text().split())

    def form(self, action: str) -> dict[str, str]:
        """The fields of the form with this action as they are sent unchanged."""
        form = self.find(f'form[action="{action}"]')
        fields = {
            str(node.attributes["name"]): node.attributes.get("value") or ""
            for node in form.css("input[name]")
            if node.attributes.get("type") not in ("checkbox", "radio") or "checked" in node.attributes
        }
        fields |= {str(node.attributes["name"]): node.text() for node in form.css("textarea[name]")}
        for select in form.css("select[name]"):
            chosen = select.css_first("option[selected]") or select.css_first("option")
            fields[str(select.attributes["name"])] = (
                "" if chosen is None else chosen.attributes.get("value") or ""
            )
        return fields


@dataclass
class Browser:
    """A person's browser. `session` is who it is signed in as."""

    http: httpx.AsyncClient
    session: ConsoleSession

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.http.get(path, headers=headers)

    async def page(self, path: str) -> Page:
        """The page at `path`, which must be answered with 200."""
        response = await self.http.get(path)
        assert response.status_code == 200, f"{response.status_code}: {response.text}"
        return Page(response)

    async def submit(
        self, path: str, action: str, fields: Mapping[str, str | list[str]] | None = None, **headers: str
    ) -> httpx.Response:
        """Open the page at `path`, fill in its form with `action` and send it."""
        sent = (await self.page(path)).form(action)
        return await self.post(action, {**sent, **(fields or {})}, **headers)

    async def post(self, path: str, fields: Mapping[str, str | list[str]], **headers: str) -> httpx.Response:
        """Send a form as a page of this origin does; without what is not among `fields`."""
        return await self.http.post(path, data=dict(fields), headers={"origin": ORIGIN, **headers})


@dataclass
class Console:
    """A running console and its gateway."""

    app: FastAPI
    dependencies: GatewayDependencies
    engine: FakeEngine
    database: Database
    stack: AsyncExitStack

    async def browser(self, cookies: Mapping[str, str] | None = None) -> httpx.AsyncClient:
        """A browser's connection, closed at the end of the test."""
        client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url=ORIGIN)
        for name, value in (cookies or {}).items():
            client.cookies.set(name, value, domain="console.test")
        return await self.stack.enter_async_context(client)

    async def tenant(self, name: str) -> UUID:
        """The tenant of this name, made where it does not exist."""
        async with self.database.as_operator() as session:
            tenants = {each.name: each.id for each in await TenantRepository(session).list()}
            return tenants[name] if name in tenants else (await TenantRepository(session).create(name)).id

    async def signed_in(
        self, role: str = "admin", tenant: str = "harbor", email: str | None = None
    ) -> Browser:
        """The browser of a new person with `role` in `tenant`; the role `operator` is signed in to the operator area."""
        operator = role == "operator"
        address = email or f"{role}-{uuid4().hex[:8]}@{tenant}.example"
        roles = {} if operator else {await self.tenant(tenant): role}
        await add_person(self.database, address, operator=operator, roles=roles)
        client, derive_key = Client(ADDRESS, AGENT), self.dependencies.derive_key
        signed_in = await sign_in(self.database, address, PASSWORD, None, client, derive_key=derive_key)
        cookie = SESSION_COOKIE["operator" if operator else "tenant"]
        return Browser(await self.browser({cookie: signed_in.token}), signed_in.session)


SignedIn: TypeAlias = Callable[..., Awaitable[Browser]]


@pytest.fixture
async def console(
    database: Database, chat_tokenizer: Any, tmp_path: Path, cheap_passwords: None
) -> AsyncIterator[Console]:
    """The console of a gateway without tenants."""
    async with AsyncExitStack() as stack:
        pool, engine = WorkerPool(), FakeEngine()
        stack.push_async_callback(pool.close)
        prompts, limits = PromptRenderer(chat_tokenizer), ServingConfig(key_cache_s=0.0)
        setup = AnalysisSetup(limits.body, limits.grammar, frozenset(prompts.special_tokens))
        admissions: Any = FakeAdmissions()
        dependencies = GatewayDependencies(
            served_model_name=BASE_MODEL,
            database=database,
            engine=engine,
            prompts=prompts,
            token_text=TokenText(chat_tokenizer),
            recorder=Recorder(),
            request_analysis=RequestAnalysis(pool, request_analysis_task(setup, os.environ)),
            compile_checks=FakeCompileChecks(),
            value_validation=ValueValidation(pool, value_validation_task(os.environ)),
            suite_checks=SuiteChecks(pool, os.environ),
            admission_controller=admissions,
            policy_publisher=admissions,
            namespace_of=namespace_of,
            derive_key=partial(derive, SECRET),
            adapter_path=blob_path,
            config=limits,
            uploads=UploadHome(database, tmp_path / "gateway").uploads,
        )
        app = create_app(dependencies)
        console = Console(app, dependencies, engine, database, stack)
        add_console(app, dependencies, ConsoleOptions())
        yield console


@pytest.fixture
def signed_in(console: Console) -> SignedIn:
    """`await signed_in("viewer")`: the browser of a person with that role in the tenant `harbor`."""
    return console.signed_in
