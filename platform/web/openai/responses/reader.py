"""Reads the body of `/v1/responses` into the conversation that the pipeline knows.

Invariant: what is left out of a request is named in a header of its response.
"""

from collections.abc import Mapping
from typing import Any, Final

from loraplex.platform.errors import MissingParameter, UnsupportedTool
from loraplex.platform.inference.truncation import ConversationRequest, cuts_of
from loraplex.platform.parameters.responses_input import MessageItem, ReasoningItem
from loraplex.platform.parameters.responses_request import InputTokensRequest, ResponsesRequest
from loraplex.platform.parameters.responses_tools import (
    ChosenTool,
    ChosenTools,
    ResponseToolChoice,
    ToolSet,
)
from loraplex.platform.parameters.tools import ToolChoice
from loraplex.platform.parameters.unsupported_tools import HostTool, hosted_of, leave_out
from loraplex.platform.web.inference_plane import DialectContext
from loraplex.platform.web.openai.responses.conversation import read_items

TRUNCATED_HEADER: Final = "x-loraplex-truncated-items"
NAMES: Final[Mapping[str, str]] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""The fields of the pipeline's request that errors name."""
_COMMON: Final = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"),
    *("stream", "user", "prompt_cache_key"),
)


def read_responses(body: ResponsesRequest, context: DialectContext) -> ConversationRequest:
    """Return the request to generate. Raises `InvalidParameter` and `UnsupportedTool`."""
    given: dict[str, Any] = {name: getattr(body, name) for name in _COMMON if name in body.model_fields_set}
    if body.max_output_tokens is not None:
        given["max_tokens"] = body.max_output_tokens
    if body.scores_tokens:
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return _conversation(body, context, given)


def read_conversation(body: InputTokensRequest, context: DialectContext) -> ConversationRequest:
    """Return the request without what only generating needs. Raises as `read_responses`."""
    return _conversation(body, context, {})


def _conversation(
    body: InputTokensRequest, context: DialectContext, given: dict[str, Any]
) -> ConversationRequest:
    thoughts_from = _thoughts_from(body)

    def thought_of(index: int, item: ReasoningItem) -> str:
        if index < thoughts_from:
            return ""
        if not item.encrypted_content:
            return "".join(part.text for part in item.content)
        return context.seal.open(body.model, item.encrypted_content, f"input[{index}].encrypted_content")

    messages, items_before = read_items(body.instructions, body.input, thought_of)
    if not messages:
        raise MissingParameter("`input` is required without `instructions`.", param="input")
    given |= {"model": body.model, "messages": messages} | _tools(body, context)
    held = body.text.format.output_format()
    if held is not None:
        given["response_format"] = held
    if body.reasoning.effort is not None:
        given["reasoning_effort"] = body.reasoning.effort
    if body.truncation == "auto":

        def tell(items: int) -> None:
            context.response_headers[TRUNCATED_HEADER] = str(items)

        given |= {"cuts": cuts_of(messages, items_before), "on_cut": tell}
    return ConversationRequest.model_construct(set(given), **given)


def _thoughts_from(body: InputTokensRequest) -> int:
    """Return the item from which on the model sees thought."""
    if body.reasoning.context != "current_turn":
        return 0
    users = (
        index
        for index, item in enumerate(body.input)
        if isinstance(item, MessageItem) and item.role == "user"
    )
    return max(users, default=0)


def _tools(body: InputTokensRequest, context: DialectContext) -> dict[str, Any]:
    """Return the fields of tools. Tools of a host are refused, or left out and named in a header."""
    offered, choice, hosted = body.tools, body.tool_choice, body.tools.hosted
    if isinstance(choice, ChosenTools):
        hosted += hosted_of(choice.tools, "tool_choice.tools")
    elif isinstance(choice, HostTool):
        hosted += (("tool_choice", choice),)
    leave_out(hosted, context.request_headers, context.response_headers)
    fields = {
        "tools": offered.tools,
        "tool_choice": _choice(choice, offered),
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    return {name: each for name, each in fields.items() if name in body.model_fields_set}


def _choice(choice: ResponseToolChoice, offered: ToolSet) -> ToolChoice:
    if isinstance(choice, ChosenTool):
        return ToolChoice("required", tuple(choice.among(offered)), single=True)
    if isinstance(choice, str):
        return ToolChoice(choice)
    chosen = choice.tools if isinstance(choice, ChosenTools) else []
    names = [name for each in chosen if isinstance(each, ChosenTool) for name in each.among(offered)]
    if not names or isinstance(choice, HostTool):
        message = (
            "`tool_choice` names only tools that this server does not run; name another, or leave it out."
        )
        raise UnsupportedTool(message, param="tool_choice")
    return ToolChoice(choice.mode, tuple(dict.fromkeys(names)))
