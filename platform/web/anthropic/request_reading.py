"""Reads a body of the Messages API into the request that the pipeline knows."""

from typing import Any, Final

from loraplex.grammar.constraints import JsonSchema, Tool
from loraplex.platform.inference.admission import IGNORED_HEADER
from loraplex.platform.parameters.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
)
from loraplex.platform.parameters.request_models import ChatRequest
from loraplex.platform.parameters.tools import Mode, ToolChoice, differently_named
from loraplex.platform.parameters.unsupported_tools import hosted_of, leave_out
from loraplex.platform.web.anthropic.conversation import ConversationReader
from loraplex.platform.web.anthropic.errors import client_headers
from loraplex.platform.web.inference_plane import DialectContext

SESSION_HEADER: Final = "x-claude-code-session-id"
NAMES: Final = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "prompt_cache_key": SESSION_HEADER,
    "continue_final_message": "messages",
}
"""What errors call the fields of the pipeline's request."""
_MODES: Final[dict[str, Mode]] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def read_request(body: CountTokensRequest, context: DialectContext) -> ChatRequest:
    """Return the request. Raises `InvalidParameter`, `UnsupportedTool`."""
    context.response_headers.update(client_headers(context.request_headers, context.response_headers))
    reader = ConversationReader(body, context.seal)
    messages = reader.read()
    values: dict[str, Any] = {"model": body.model, "messages": messages, "tools": _tools(body, context)}
    if not body.thinks and body.effort is not None:
        context.response_headers[IGNORED_HEADER] = NAMES["reasoning_effort"]
    if (effort := body.effort if body.thinks else "none") is not None:
        values["reasoning_effort"] = effort
    if body.thinking is not None and body.thinking.budget_tokens:
        values["thinking_token_budget"] = body.thinking.budget_tokens
    if reader.continues(messages[-1]):
        values["continue_final_message"] = True
    if body.tool_choice is not None:
        values["tool_choice"] = _tool_choice(body.tool_choice)
    if body.output_config is not None and body.output_config.format is not None:
        wanted = body.output_config.format.json_schema
        values["response_format"] = JsonSchema(wanted, strict=True, param="output_config.format.schema")
    if isinstance(body, MessagesRequest):
        values |= _sampling(body) | _session(body, context)
    return ChatRequest.model_construct(set(values), **values)


def _tools(body: CountTokensRequest, context: DialectContext) -> tuple[Tool, ...]:
    """Return the tools that the prompt contains."""
    leave_out(hosted_of(body.tools, "tools"), context.request_headers, context.response_headers)
    placed = ((f"tools[{index}]", tool) for index, tool in enumerate(body.tools))
    return differently_named(
        (place, tool.tool(place)) for place, tool in placed if isinstance(tool, MessageTool)
    )


def _tool_choice(choice: MessageToolChoice) -> ToolChoice:
    names = None if choice.name is None else (choice.name,)
    single = choice.disable_parallel_tool_use or choice.type == "tool"
    return ToolChoice(_MODES[choice.type], names, single=single)


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    given = ("max_tokens", "temperature", "top_p", "top_k", "stream")
    values = {name: getattr(body, name) for name in given if name in body.model_fields_set}
    return values | ({"stop": body.stop_sequences} if body.stop_sequences else {})


def _session(body: MessagesRequest, context: DialectContext) -> dict[str, str]:
    user = None if body.metadata is None else body.metadata.user_id
    session = context.request_headers.get(SESSION_HEADER) or user
    values = {"user": user, "prompt_cache_key": session}
    return {name: value for name, value in values.items() if value}
