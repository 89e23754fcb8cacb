"""A client that a public generator makes of `/openapi.json` chats, calls a tool, and parses every chunk of a stream."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from openapi_python_client import generate
from openapi_python_client.config import Config, ConfigFile, MetaType
from tests.platform.web.openai.streams import STREAMS, chunks_of
from tests.platform.web.openai.test_tools import ONE, ROME, WEATHER

from loraplex.engine.fake_engine import FakeScript

MODEL = "demo/base"
PACKAGE = "loraplex_generated_client"
Generate = Callable[[bytes], ModuleType]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generate]:
    """Generates the client of a document, once for all tests of this file: their documents are equal."""
    folder = tmp_path_factory.mktemp("client")

    def package(document: bytes) -> ModuleType:
        written = folder / "openapi.json"
        if not written.exists():
            written.write_bytes(document)
            generate_client(written, folder / PACKAGE)
            sys.path.insert(0, str(folder))
        assert written.read_bytes() == document
        return importlib.import_module(f"{PACKAGE}.models")

    yield package
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def generate_client(document: Path, folder: Path) -> None:
    """Nothing of the document may be left out."""
    config = Config.from_sources(
        ConfigFile(post_hooks=[], literal_enums=True),
        MetaType.NONE,
        document_source=document,
        file_encoding="utf-8",
        overwrite=False,
        output_path=folder,
    )
    assert not generate(config=config, custom_template_path=None)


async def operation(gateway: Any, name: str, **arguments: Any) -> Any:
    """Call an operation of the generated client."""
    client = importlib.import_module(f"{PACKAGE}.client")
    function = importlib.import_module(f"{PACKAGE}.api.inference.{name}")
    async with client.AuthenticatedClient(base_url=gateway.url, token=gateway.key) as connection:
        return await function.asyncio(client=connection, **arguments)


async def document_of(gateway: Any) -> bytes:
    response = await gateway.get("/openapi.json", [])
    return bytes(response.content)


async def test_the_generated_client_chats_and_calls_a_tool(start_gateway: Any, generated: Generate) -> None:
    gateway = await start_gateway(FakeScript(answers=(ONE,)))
    models: Any = generated(await document_of(gateway))
    tools = [models.ToolDefinition.from_dict(WEATHER)]
    question = models.TextMessage(role="user", content="How warm is it in Rome?")
    body = models.ChatRequest(model=MODEL, messages=[question], tools=tools, tool_choice="required")
    response = await operation(gateway, "chat_completions_v1_chat_completions_post", body=body)
    [choice] = response.choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, call.function.arguments) == ("get_weather", ROME)

    function = models.MessageFunction(name=call.function.name, arguments=call.function.arguments)
    earlier = models.MessageToolCall(type_="function", id=call.id, function=function)
    messages = [
        question,
        models.AssistantMessage(role="assistant", tool_calls=[earlier]),
        models.ToolMessage(role="tool", tool_call_id=call.id, content="30 degrees"),
    ]
    body = models.ChatRequest(model=MODEL, messages=messages, max_tokens=5, temperature=0.5, stop=["x"])
    response = await operation(gateway, "chat_completions_v1_chat_completions_post", body=body)
    assert response.choices[0].message.content and response.usage.completion_tokens
    [first, second] = gateway.engine.requests
    assert len(second.prompt_token_ids) > 5 and second.sampling.temperature == 0.5
    # What is not set is not sent: the defaults of an adapter's profile apply.
    left = gateway.engine.info().max_model_len - len(first.prompt_token_ids)
    assert first.sampling.max_tokens == left and "temperature" not in models.ChatRequest(MODEL, []).to_dict()


async def test_the_generated_client_reads_errors_models_and_tokens(
    start_gateway: Any, generated: Generate
) -> None:
    gateway = await start_gateway()
    models: Any = generated(await document_of(gateway))
    question = models.TextMessage(role="user", content="hello")
    body = models.ChatRequest(model=MODEL, messages=[question], n=129)
    error = await operation(gateway, "chat_completions_v1_chat_completions_post", body=body)
    assert isinstance(error, models.ErrorDocument) and error.error.param == "n"
    listed = await operation(gateway, "models_v1_models_get")
    assert [card.id for card in listed.data] == [MODEL]
    tokenized = models.TokenizeRequest(model=MODEL, prompt="hello")
    counted = await operation(gateway, "tokenize_v1_tokenize_post", body=tokenized)
    assert counted.count == len(counted.tokens) > 0


@pytest.mark.parametrize("stream", STREAMS)
async def test_the_generated_client_parses_every_chunk(
    start_gateway: Any, generated: Generate, stream: str
) -> None:
    script, path, body = STREAMS[stream]
    gateway = await start_gateway(script)
    models: Any = generated(await document_of(gateway))
    chunk = models.ChatCompletionChunk if "chat" in path else models.Completion
    chunks = await chunks_of(gateway, path, body)
    for each in map(json.loads, chunks):
        assert chunk.from_dict(each).to_dict() == each
