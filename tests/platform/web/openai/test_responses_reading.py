"""Bodies of `/v1/responses` as they are read: chosen tools, custom tools, sealed thought, instructions."""

from functools import partial
from typing import Any
from uuid import UUID

import pytest
from starlette.datastructures import Headers
from tests.platform.parameters.request_parts import read_parameters
from tests.platform.web.gateway import SECRET
from tests.platform.web.openai.responses_events import MODEL
from tests.platform.web.openai.test_responses import CRM, NOTE, TOOLS

from loraplex.grammar.constraints import ContextFreeGrammar, Regex
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.inference.thought_seal import ThoughtSeal
from loraplex.platform.inference.truncation import ConversationRequest
from loraplex.platform.server.secret import derive
from loraplex.platform.web.inference_plane import DialectContext
from loraplex.platform.web.openai.responses.reader import read_responses

TENANT = UUID(int=1)


@pytest.mark.parametrize(
    ("choice", "names", "mode"),
    [
        ("none", None, "none"),
        ("required", None, "required"),
        ({"type": "function", "name": "get_weather"}, ("get_weather",), "required"),
        ({"type": "custom", "name": "note"}, ("note",), "required"),
        ({"type": "custom", "name": "write", "namespace": "crm"}, ("crm__write",), "required"),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "namespace", "name": "crm"}, {"type": "custom", "name": "note"}],
            },
            ("crm__find", "crm__write", "note"),
            "auto",
        ),
    ],
)
def test_choices_of_tools(choice: Any, names: tuple[str, ...] | None, mode: str) -> None:
    values = read({"tools": TOOLS, "tool_choice": choice})
    assert values.tool_choice is not None
    assert (values.tool_choice.names, values.tool_choice.mode) == (names, mode)
    assert [tool.name for tool in values.tools] == ["get_weather", "note", "crm__find", "crm__write"]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "note"},
        {"type": "custom", "name": "write"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "erp"}]},
    ],
)
def test_a_choice_that_is_not_offered(choice: Any) -> None:
    with pytest.raises(InvalidParameter, match="which is not in `tools`") as refused:
        read({"tools": TOOLS, "tool_choice": choice})
    assert refused.value.param == "tool_choice"


def test_a_namespace_is_chosen_in_a_list_alone() -> None:
    """The official types have it nowhere else."""
    with pytest.raises(InvalidParameter, match="`tool_choice`") as refused:
        read({"tools": TOOLS, "tool_choice": {"type": "namespace", "name": "crm"}})
    assert refused.value.param == "tool_choice"


def test_the_description_of_a_namespace_is_read() -> None:
    find, write = read({"tools": [CRM]}).tools
    assert (find.description, write.description) == ("Customers", "Customers")
    described = {**CRM, "tools": [{**NOTE, "name": "write"}]}
    [write] = read({"tools": [described]}).tools
    assert write.description == "Customers\n\nKeeps a note"


def test_custom_tools_are_held_by_their_grammar() -> None:
    formats: list[Any] = [
        {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"},
        {"type": "grammar", "syntax": "regex", "definition": "a+"},
        {"type": "text"},
    ]
    tools = [{"type": "custom", "name": f"t{index}", "format": each} for index, each in enumerate(formats)]
    held = [tool.input for tool in read({"tools": tools}).tools]
    assert held == [ContextFreeGrammar("start: /a+/"), Regex("a+"), None]


def read(fields: dict[str, Any], headers: dict[str, str] | None = None) -> ConversationRequest:
    body = read_parameters("responses", {"model": MODEL, "input": "hello", **fields})
    return read_responses(body, context(headers))


def context(headers: dict[str, str] | None = None, tenant: UUID = TENANT) -> DialectContext:
    seal = ThoughtSeal(partial(derive, SECRET), tenant)
    return DialectContext(request_headers=Headers(headers or {}), response_headers={}, seal=seal, text=None)  # type: ignore[arg-type]


def test_thought_comes_back_sealed_or_plain() -> None:
    seal = context().seal.seal(MODEL, "I think.")
    items: list[Any] = [
        {"role": "user", "content": "a"},
        {
            "type": "reasoning",
            "content": [{"type": "reasoning_text", "text": "other"}],
            "encrypted_content": seal,
        },
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "plain"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": "r"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    messages = read({"input": items}).messages
    written = [(each.role, each.content, each.reasoning, len(each.tool_calls)) for each in messages]
    assert written == [
        ("user", "a", "", 0),
        ("assistant", "b", "I think.", 0),
        ("user", "c", "", 0),
        ("assistant", "", "plain", 2),
        ("tool", "r", "", 0),
        ("tool", "r", "", 0),
        ("assistant", "d", "", 0),
        ("assistant", "e", "", 0),
    ]
    current = read({"input": items, "reasoning": {"context": "current_turn"}}).messages
    assert [each.reasoning for each in current if each.role == "assistant"] == ["", "plain", "", ""]


def test_a_seal_makes_the_key_of_a_model_once() -> None:
    purposes: list[bytes] = []

    def derive_key(*parts: bytes) -> bytes:
        purposes.append(parts[-1])
        return derive(SECRET, *parts)

    seal = ThoughtSeal(derive_key, TENANT)
    for number in range(3):
        for model in ("a", "a@1", "b"):
            assert seal.open(model, seal.seal(model, f"{number}"), "input") == f"{number}"
    assert purposes == [b"a", b"b"]


def test_instructions_come_first() -> None:
    """As codex sends them: several messages of the developer before the user's."""
    items = [{"role": role, "content": role} for role in ("developer", "system", "user", "developer")]
    messages = read({"input": items, "instructions": "first"}).messages
    assert [(each.role, each.content) for each in messages] == [
        ("system", "first"),
        *((role, role) for role in ("developer", "system", "user", "developer")),
    ]
