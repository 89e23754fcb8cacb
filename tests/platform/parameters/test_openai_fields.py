"""Every field that the installed `openai` package can send has a decision, so that a new field is one.

The package's types are the oracle: a field that it adds fails these tests until a line here says what becomes of it.
"""

import inspect
from typing import Any, Final, Literal, TypeAlias, get_args, get_origin, get_type_hints

import pytest
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from tests.platform.parameters.request_parts import CALL, USER, read_parameters, tool

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.parameter_table import PARAMETERS

Decision: TypeAlias = Literal["used", "dropped", "refused"]

CHAT: Final = chat_create_params.CompletionCreateParamsStreaming
COMPLETION: Final = completion_create_params.CompletionCreateParamsStreaming
TEXT: Final = {"type": "text", "text": "a"}
# name -> an accepted value that changes nothing
UNUSED: Final[dict[str, Any]] = {
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "auto",
    "verbosity": "low",
}
# name -> a value that asks for what is not offered
REFUSED: Final[dict[str, Any]] = {
    "audio": {"format": "mp3", "voice": "alloy"},
    "best_of": 2,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "a"},
    "store": True,
    "suffix": "a",
    "web_search_options": {},
}
Generationstr: TypeAlias = Literal["chat", "completions"]
USED: Final[dict[Generationstr, frozenset[str]]] = {
    "chat": frozenset(
        ("frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages")
        + ("model", "n", "parallel_tool_calls", "presence_penalty", "reasoning_effort", "response_format")
        + ("seed", "stop", "stream", "stream_options", "temperature", "tool_choice", "tools", "top_logprobs")
        + ("top_p", "user")
    ),
    "completions": frozenset(
        ("echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "model", "n")
        + ("presence_penalty", "prompt", "seed", "stop", "stream", "stream_options", "temperature", "top_p")
        + ("user",)
    ),
}
"""`user` chooses the version where an alias splits; `echo` is in the table with what it may be."""
BODIES: Final[dict[Generationstr, dict[str, Any]]] = {
    "chat": {"model": "m", "messages": [USER]},
    "completions": {"model": "m", "prompt": "a"},
}
TYPES: Final[dict[Generationstr, Any]] = {"chat": CHAT, "completions": COMPLETION}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_parameter_has_a_decision(endpoint: Generationstr) -> None:
    fields = get_type_hints(TYPES[endpoint]).keys()
    assert fields == USED[endpoint] | {name for name in UNUSED | REFUSED if name in fields}
    table = {row.name for row in PARAMETERS if endpoint in row.endpoints}
    assert USED[endpoint] <= table and fields & UNUSED.keys() <= table
    base = read_parameters(endpoint, BODIES[endpoint])
    for name in fields & UNUSED.keys():
        read = read_parameters(endpoint, {**BODIES[endpoint], name: UNUSED[name]})
        assert read.sampling_fields() == base.sampling_fields()
    for name in fields & REFUSED.keys():
        with pytest.raises(InvalidParameter) as refused:
            read_parameters(endpoint, {**BODIES[endpoint], name: REFUSED[name]})
        assert refused.value.param == name and name in str(refused.value)


def test_stream_options() -> None:
    names = get_type_hints(chat.ChatCompletionStreamOptionsParam).keys()
    assert names == {"include_usage", "include_obfuscation"}
    body = {**BODIES["chat"], "stream": True, "stream_options": dict.fromkeys(names, True)}
    assert read_parameters("chat", body).stream_options is not None


# type -> the decision for each of its fields, and a value
MESSAGES: Final[dict[Any, dict[str, tuple[Decision, Any]]]] = {
    chat.ChatCompletionAssistantMessageParam: {
        "role": ("used", "assistant"),
        "content": ("used", "a"),
        "name": ("used", "n"),
        "tool_calls": ("used", [CALL]),
        "refusal": ("dropped", "no"),
        "audio": ("refused", {"id": "a"}),
        "function_call": ("refused", {"name": "f", "arguments": ""}),
    },
    chat.ChatCompletionUserMessageParam: {
        "role": ("used", "user"),
        "content": ("used", "a"),
        "name": ("used", "n"),
    },
    chat.ChatCompletionSystemMessageParam: {
        "role": ("used", "system"),
        "content": ("used", "a"),
        "name": ("used", "n"),
    },
    chat.ChatCompletionDeveloperMessageParam: {
        "role": ("used", "developer"),
        "content": ("used", "a"),
        "name": ("used", "n"),
    },
    chat.ChatCompletionToolMessageParam: {
        "role": ("used", "tool"),
        "content": ("used", "a"),
        "tool_call_id": ("used", "c"),
    },
    # What `model_dump` of a response has, which clients append to the conversation.
    chat.ChatCompletionMessage: {
        "role": ("used", "assistant"),
        "content": ("used", "a"),
        "tool_calls": ("used", [CALL]),
        "refusal": ("dropped", "no"),
        "annotations": ("dropped", [{"type": "url_citation"}]),
        "audio": ("refused", {"id": "a", "data": "", "expires_at": 1, "transcript": ""}),
        "function_call": ("refused", {"name": "f", "arguments": ""}),
    },
}


def test_every_role_has_a_decision() -> None:
    roles = {get_type_hints(each)["role"] for each in get_args(chat.ChatCompletionMessageParam)}
    known = {get_type_hints(each)["role"] for each in MESSAGES if each is not chat.ChatCompletionMessage}
    (function,) = roles - known
    assert "function" in str(function)
    with pytest.raises(InvalidParameter) as refused:
        read_parameters(
            "chat", {"model": "m", "messages": [{"role": "function", "name": "f", "content": "a"}]}
        )
    assert refused.value.param == "messages[0].role"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: each.__name__)
def test_every_field_of_a_message_has_a_decision(message: Any) -> None:
    decisions = MESSAGES[message]
    fields = message.model_fields if hasattr(message, "model_fields") else get_type_hints(message)
    assert fields.keys() == decisions.keys()
    earlier: list[Any] = [{"role": "assistant", "tool_calls": [CALL]}]
    whole = {name: value for name, (decision, value) in decisions.items() if decision == "used"}
    kept = read_parameters("chat", {"model": "m", "messages": [*earlier, whole]}).messages[-1]
    for name, (decision, value) in decisions.items():
        body = {"model": "m", "messages": [*earlier, {**whole, name: value}]}
        if decision == "refused":
            with pytest.raises(InvalidParameter) as refused:
                read_parameters("chat", body)
            assert refused.value.param == f"messages[1].{name}"
        else:
            assert read_parameters("chat", body).messages[-1] == kept
    optional = {name: None for name, (decision, _) in decisions.items() if decision != "used"}
    assert (
        read_parameters("chat", {"model": "m", "messages": [*earlier, {**whole, **optional}]}).messages[-1]
        == kept
    )


def test_every_type_of_part_has_a_decision() -> None:
    """Of an assistant's and a user's content: text is used, refusals of an assistant are dropped, all others refused."""
    assistants = get_type_hints(chat.ChatCompletionAssistantMessageParam)["content"]
    names = {kind for part in typed_dicts(assistants) for kind in get_args(get_type_hints(part)["type"])}
    assert names == {"text", "refusal"}
    others = get_args(chat.ChatCompletionContentPartParam)
    kinds = {kind for part in others for kind in get_args(get_type_hints(part)["type"])}
    assert kinds == {"text", "image_url", "input_audio", "file"}
    for role, kind, value in (("assistant", "refusal", {"refusal": "no"}), ("user", "text", {"text": "a"})):
        body = {"model": "m", "messages": [{"role": role, "content": [TEXT, {"type": kind, **value}]}]}
        assert read_parameters("chat", body).messages[0].content in ("a", "aa")
    for kind in kinds - {"text"}:
        with pytest.raises(InvalidParameter):
            read_parameters(
                "chat", {"model": "m", "messages": [{"role": "user", "content": [{"type": kind}]}]}
            )
    text = get_type_hints(chat.ChatCompletionContentPartTextParam).keys()
    assert text == {"type", "text", "prompt_cache_breakpoint"}
    marked = {**TEXT, "prompt_cache_breakpoint": {"mode": "explicit"}}
    read = read_parameters("chat", {"model": "m", "messages": [{"role": "user", "content": [marked]}]})
    assert read.messages[0].content == "a"


def typed_dicts(hint: Any) -> list[Any]:
    """The types of objects that a hint names."""
    if get_origin(hint) is None:
        return [hint] if inspect.isclass(hint) and hasattr(hint, "__total__") else []
    return [each for inner in get_args(hint) for each in typed_dicts(inner)]


def test_calls_and_tools_have_the_fields_that_are_known() -> None:
    calls = get_args(chat.ChatCompletionMessageToolCallUnionParam)
    assert {name for each in calls for name in get_type_hints(each)} == {"id", "type", "function", "custom"}
    tools = get_args(chat.ChatCompletionToolUnionParam)
    assert {name for each in tools for name in get_type_hints(each)} == {"type", "function", "custom"}
    function = get_type_hints(get_type_hints(chat.ChatCompletionFunctionToolParam)["function"])
    assert function.keys() == tool(description="", parameters={}, strict=True)["function"].keys()
    for wrong in ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, {"messages": [custom()]}):
        with pytest.raises(InvalidParameter):
            read_parameters("chat", {**BODIES["chat"], **wrong})


def custom() -> dict[str, Any]:
    call = {"id": "c", "type": "custom", "custom": {"name": "f", "input": ""}}
    return {"role": "assistant", "tool_calls": [call]}
