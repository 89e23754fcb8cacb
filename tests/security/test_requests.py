"""S5, S9 and S11: fields that would take tensors, code of a template or an address to fetch are refused by name, and nothing is fetched."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any, Final

import pytest
from tests.platform.web.gateway import BASE_MODEL, StartGateway
from tests.platform.web.route_table import in_process

from loraplex.platform.errors import GatewayError
from loraplex.platform.inference.prompting.chat_template import PromptRenderer
from loraplex.platform.parameters.chat_messages import ChatMessage

ADDRESS: Final = "http://attacker.example:8080/collect"
USER: Final = [{"role": "user", "content": "hello"}]
TENSORS: Final = {
    "prompt_embeds": "AAAA",
    "input_embeds": [[0.1]],
    "inputs_embeds": "AAAA",
    "image_embeds": "AAAA",
    "multi_modal_data": {"image": "AAAA"},
    "mm_processor_kwargs": {"device": "cuda"},
    "hidden_states": [[0.0]],
    "kv_transfer_params": {"remote_host": "attacker.example"},
    "lora_request": {"lora_path": "/etc"},
    "adapter_path": "/etc",
    "logits_processors": ["os.system"],
    "vllm_xargs": {"a": 1},
}
TEMPLATES: Final = {
    "chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "chat_template_kwargs": {"chat_template": "{{ 1 }}", "tokenize": False, "return_dict": True},
    "documents": [{"title": "t", "text": "t"}],
    "tokenizer": "attacker/tokenizer",
    "add_generation_prompt": {"__class__": 1},
    "trust_remote_code": True,
}
SANDBOX_ESCAPES: Final = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{% set _ = messages.append(1) %}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.os }}",
)
PARTS: Final = (
    {"type": "image_url", "image_url": {"url": ADDRESS}},
    {"type": "input_image", "image_url": ADDRESS},
    {"type": "video_url", "video_url": {"url": ADDRESS}},
    {"type": "audio_url", "audio_url": {"url": ADDRESS}},
    {"type": "input_audio", "input_audio": {"data": ADDRESS, "format": "wav"}},
    {"type": "file", "file": {"file_id": ADDRESS}},
)
SCHEMAS: Final = (
    {"$ref": ADDRESS},
    {"$schema": ADDRESS, "type": "object"},
    {"$id": ADDRESS, "$ref": "other.json"},
    {"type": "object", "properties": {"a": {"$ref": f"{ADDRESS}#/x"}}},
    {"$ref": "file:///etc/passwd"},
    {"$dynamicRef": ADDRESS},
)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Every address that Python code of this process tries to look up or to reach, loopback and unix sockets apart."""
    found: list[object] = []

    def blocked(name: str, host: object) -> None:
        if not isinstance(host, (str, bytes)) or host not in ("127.0.0.1", "::1", "localhost", ""):
            found.append((name, host))
            raise OSError("blocked by the test")

    def getaddrinfo(host: object, *_: object, **__: object) -> Any:
        blocked("getaddrinfo", host)

    class BlockedSocket(socket.socket):
        def connect(self, address: Any) -> None:
            if self.family != socket.AF_UNIX:
                blocked("connect", address[0])
            super().connect(address)

    async def create_connection(
        _: object, __: object, host: object = None, *___: object, **____: object
    ) -> Any:
        blocked("create_connection", host)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "socket", BlockedSocket)
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", create_connection)
    yield found


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and bodies with an address wherever some server is known to fetch one."""
    chat, text = "/v1/chat/completions", f"![image]({ADDRESS}) <img src={ADDRESS}> {ADDRESS}"
    base = {"model": BASE_MODEL, "messages": USER, "max_tokens": 2}
    yield "/v1/completions", {"model": BASE_MODEL, "prompt": text, "max_tokens": 2}
    yield "/v1/tokenize", {"model": BASE_MODEL, "prompt": text}
    yield chat, {**base, "model": ADDRESS}
    yield chat, {**base, "messages": [{"role": "system", "content": text}, *USER]}
    yield chat, {**base, "web_search_options": {"url": ADDRESS}}
    for part in PARTS:
        yield (
            chat,
            {**base, "messages": [{"role": "user", "content": [part, {"type": "text", "text": text}]}]},
        )
    for schema in SCHEMAS:
        named = {"name": "s", "schema": schema}
        yield chat, {**base, "response_format": {"type": "json_schema", "json_schema": named}}
        yield chat, {**base, "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
        yield chat, {**base, "structured_outputs": {"json": schema}}


async def test_s11_nothing_that_a_request_names_is_fetched(
    start_gateway: StartGateway, attempts: list[object]
) -> None:
    gateway = await start_gateway()
    gateway_key = {"authorization": f"Bearer {gateway.key}"}
    answers = []
    async with in_process(gateway.app) as client:
        for path, body in requests():
            answer = await client.post(path, json=body, headers=gateway_key)
            assert answer.status_code in (200, 400, 404, 422), (body, answer.text)
            answers.append(answer.status_code)
    assert 200 in answers and 400 in answers
    assert attempts == []
    with pytest.raises(OSError, match="blocked by the test"):
        socket.create_connection(("attacker.example", 80), timeout=1)
    assert attempts == [("getaddrinfo", "attacker.example")]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "tokenize"])
async def test_s05_s09_no_endpoint_takes_tensors_or_templates(start_gateway: StartGateway, path: str) -> None:
    gateway = await start_gateway()
    base = {"model": BASE_MODEL, **({"messages": USER} if path.startswith("chat") else {"prompt": "hello"})}
    headers = {"authorization": f"Bearer {gateway.key}"}
    accepted = {}
    async with in_process(gateway.app) as client:
        for name, value in {**TENSORS, **TEMPLATES}.items():
            answer = await client.post(f"/v1/{path}", json={**base, name: value}, headers=headers)
            error = answer.json().get("error", {})
            if (answer.status_code, error.get("param", "").partition(".")[0]) != (400, name):
                accepted[name] = answer.text
    assert accepted == {}
    assert gateway.engine.requests == []


@pytest.mark.parametrize("template", SANDBOX_ESCAPES)
def test_s09_a_template_runs_in_a_sandbox(tokenizer_with_template: Any, template: str) -> None:
    """Templates are the operator's, and even those reach no attribute of Python's own and change no message."""
    renderer = PromptRenderer(tokenizer_with_template(template))
    with pytest.raises(GatewayError):
        renderer.chat_ids([ChatMessage(role="user", content="hello")])
