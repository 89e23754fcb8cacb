"""The responses of the Messages API as pydantic models (Anthropic)."""

from typing import Any, Literal, TypeAlias

from loraplex.platform.web.responses import ResponseModel
from loraplex.tenants.records import UtcTime

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(ResponseModel):
    type: Literal["text"] = "text"
    text: str


class ThinkingContent(ResponseModel):
    """`signature` is the sealed thought; with `display` omitted, `thinking` is empty."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseContent(ResponseModel):
    """A call that the client is asked to carry out. `input` has the members that were complete before `max_tokens`."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class OutputTokensDetails(ResponseModel):
    """`thinking_tokens`: the part of the output that is thought."""

    thinking_tokens: int


class MessageUsage(ResponseModel):
    """Tokens of a response. The prompt's are the sum of the first three: of those that were computed, all count as written to
    the cache if the request marks what to cache, else none.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageDocument(ResponseModel):
    """A whole response of `/v1/messages`; as a stream begins, without content and `stop_reason`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ThinkingContent | TextContent | ToolUseContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageError(ResponseModel):
    """`details` is only there where a client reads it."""

    type: str
    message: str
    details: dict[str, str] | None = None


class MessageErrorDocument(ResponseModel):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: MessageError
    request_id: str


class InputTokens(ResponseModel):
    input_tokens: int


class ModelInfo(ResponseModel):
    """`created_at`: when the adapter version was uploaded; of the base model, when this gateway started."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: UtcTime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(ResponseModel):
    """The base model and the adapters of the caller's tenant, all on one page."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str
    last_id: str
