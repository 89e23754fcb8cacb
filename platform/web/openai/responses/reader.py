"""Reads the body of `/v1/responses` into the conversation that the pipeline knows.

Invariant: what is left out of a request is named in a header of its response.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.inference.truncation import ConversationRequest
from loraplex.platform.parameters.responses_input import MessageItem, ReasoningItem
from loraplex.platform.parameters.responses_request import InputTokensRequest, ResponsesRequest
from loraplex.platform.parameters.responses_tools import ToolName, ToolSet
from loraplex.platform.parameters.tools import ToolChoice
from loraplex.platform.parameters.unsupported_tools import leave_out
from loraplex.platform.web.inference_plane import DialectContext
from loraplex.platform.web.openai.responses.conversation import Conversation

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


def read_counted(body: InputTokensRequest, context: DialectContext) -> ConversationRequest:
    """Return the request whose prompt is only counted. Raises as `read_responses`."""
    return _conversation(body, context, {"only_counted": True})


def _conversation(
    body: InputTokensRequest, context: DialectContext, given: dict[str, Any]
) -> ConversationRequest:
    def open_thought(item: ReasoningItem, place: str) -> str:
        if not item.encrypted_content:
            return "".join(part.text for part in item.content)
        return context.seal.open(body.model, item.encrypted_content, f"{place}.encrypted_content")

    conversation = Conversation(body.instructions, open_thought)
    conversation.add(body.input, thoughts_from=_thoughts_from(body))
    given |= {"model": body.model, "messages": conversation.messages}
    given |= _tools(body, context)
    if body.text.format is not None:
        given["response_format"] = body.text.format
    if body.reasoning.effort is not None:
        given["reasoning_effort"] = body.reasoning.effort
    if body.truncation == "auto":

        def tell(items: int) -> None:
            context.response_headers[TRUNCATED_HEADER] = str(items)

        given |= {"cuts": conversation.cuts(), "on_cut": tell}
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
    offered, choice = body.tools, body.tool_choice
    leave_out([*offered.hosted, *choice.hosted], context.request_headers, context.response_headers)
    if choice.names == ():
        # Only a host could make this choice.
        leave_out(choice.hosted, {}, {})
    names = None if choice.names is None else _call_names(choice.names, offered)
    fields = {
        "tools": offered.tools,
        "tool_choice": ToolChoice(choice.mode, names, choice.single),
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    return {name: each for name, each in fields.items() if name in body.model_fields_set}


def _call_names(chosen: Iterable[ToolName], offered: ToolSet) -> tuple[str, ...]:
    names: list[str] = []
    for each in chosen:
        of = [
            call_name
            for call_name, name in offered.names.items()
            if name == each or (each.kind == "namespace" and name.namespace == each.name)
        ]
        if not of:
            message = f"`tool_choice` names the {each.kind} {each.call_name!r}, which is not in `tools`."
            raise InvalidParameter(message, param="tool_choice")
        names += of
    return tuple(dict.fromkeys(names))
