"""The objects of the Responses API as they are sent: the response, its output items, and the events of a stream.

Invariant: an item in an event has the same fields as in the response.
"""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict

from loraplex.platform.web.openai.response_models import ChosenTokenLogprob
from loraplex.platform.web.responses import ResponseModel


class OutputPart(TypedDict):
    """Text of a message, or of a thought. `annotations` are always empty."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[ChosenTokenLogprob]]


class OutputItem(TypedDict):
    """A message, a thought, or a call of a function or custom tool, which has `arguments` or `input`.

    `encrypted_content`: a thought for later requests, sealed for this tenant and model. `summary` is always empty.
    """

    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputPart]]
    summary: NotRequired[list[Any]]
    encrypted_content: NotRequired[str]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]


class ResponseUsage(TypedDict):
    """Tokens of a response. The details: `cached_tokens` and `cache_write_tokens`, which a decision alone counts; `reasoning_tokens`."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseFailure(TypedDict):
    """Why a stream broke off. `type` and `param` are those of the error object."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    type: str
    param: str | None


class ResponseObject(ResponseModel):
    """A response. Its other fields repeat the request, with what applied where it named nothing."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None


class ResponseEvent(ResponseModel):
    """The data of one event, whose name is its `type`; other fields depend on it. The last one of a stream has the whole response."""

    model_config = ConfigDict(extra="allow")
    type: str
    sequence_number: int


class InputTokenCount(ResponseModel):
    """The tokens that the prompt of a request has."""

    object: Literal["response.input_tokens"]
    input_tokens: int
