"""The responses of `/v1` as pydantic models: whole objects, the chunks of streams, models and tokens (OpenAI API).

Invariant: a field that is not set is not sent, as in `tool_calls` of a message without calls.
"""

from typing import Any, Final, Literal, TypeAlias

import msgspec
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from loraplex.platform.inference.choice_probabilities import ChoiceProbability
from loraplex.platform.web.responses import ResponseModel

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


def _set_fields(document: BaseModel) -> dict[str, Any]:
    names = document.model_fields_set
    return {name: value for name, value in document.__dict__.items() if name in names}


# Faster than pydantic's own for log-probabilities, of which a response has one for each token and alternative.
_ENCODER: Final = msgspec.json.Encoder(enc_hook=_set_fields)


def encoded(document: BaseModel) -> bytes:
    """Encode the fields of a response that are set as JSON."""
    return _ENCODER.encode(document)


class PromptTokensDetails(ResponseModel):
    """`cached_tokens`: the part of the prompt that was read from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    """`reasoning_tokens`: the part of the completion that is thought."""

    reasoning_tokens: int


class Usage(ResponseModel):
    """Tokens of a response. A prompt counts once, however many choices it has. The details of the completion are those of thought."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


# There is one entry for each token and alternative: as models, they would take most of the time of a response.
class TokenLogprob(TypedDict):
    """`bytes` of the token in UTF-8; a character may be spread over several tokens."""

    token: str
    logprob: float
    bytes: list[int]


class RankedLogprob(TypedDict):
    """Of a token of the prompt, or a likely one in its place. `rank` 1: none is likelier."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[int, RankedLogprob] | None]


class ChosenTokenLogprob(TokenLogprob):
    """A token of the text, and the likeliest tokens in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseModel):
    """Log-probabilities of the tokens of a choice or delta."""

    content: list[ChosenTokenLogprob]
    refusal: None


class CalledFunction(ResponseModel):
    """`arguments`: the text of a JSON object, unless it was truncated."""

    name: str
    arguments: str


class ToolCall(ResponseModel):
    """A call that the client is asked to carry out."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ResponseMessage(ResponseModel):
    """`content` is null where the response consists of calls. `reasoning` and `reasoning_content` are the thought, if any."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)


class ChatChoice(ResponseModel):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    choice_probabilities: list[ChoiceProbability] = Field(default_factory=list)
    token_ids: list[int] = Field(default_factory=list)


class ChatCompletion(ResponseModel):
    """A whole response of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] = Field(default_factory=list)


class FunctionDelta(ResponseModel):
    """`name` comes once, with the first delta of a call; `arguments` are appended."""

    name: str = ""
    arguments: str


class ToolCallDelta(ResponseModel):
    """A part of call number `index`. `id` and `type` come once."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class MessageDelta(ResponseModel):
    """What a chunk adds to the message. The first one has the role. `reasoning` and `reasoning_content` are equal."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)


class ChunkChoice(ResponseModel):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] = Field(default_factory=list)


class ChatCompletionChunk(ResponseModel):
    """The `data` of one event of a chat stream. With `stream_options.include_usage`, `usage` is null but in the last chunk, unless
    `continuous_usage_stats` is set.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = Field(default_factory=list)


class LogprobLists(ResponseModel):
    """Log-probabilities as parallel lists, one item for each token; null for the first of a prompt.

    `text_offset` counts characters of the tokens' texts.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """`finish_reason` is null in a chunk that is not the last one of its choice."""

    index: int
    text: str
    logprobs: LogprobLists | None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptLogprobs | None = None
    choice_probabilities: list[ChoiceProbability] = Field(default_factory=list)
    token_ids: list[int] = Field(default_factory=list)
    prompt_token_ids: list[int] = Field(default_factory=list)


class Completion(ResponseModel):
    """A whole response of `/v1/completions`, or the `data` of one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(ResponseModel):
    """`root`: `adapter@version`, or the base model itself. `parent`: the base model of an adapter.

    `system_fingerprint`: what its responses have now.
    `created`: when the adapter version was uploaded; of the base model, when this gateway started.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    system_fingerprint: str | None
    max_model_len: int


class ModelList(ResponseModel):
    """The base model and the adapters of the caller's tenant."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenCount(ResponseModel):
    """`tokens` of the prompt, or a list of them for each of several prompts."""

    count: int
    max_model_len: int
    tokens: list[int] | list[list[int]]


class DetokenizedText(ResponseModel):
    """`prompt`: the text of the tokens, as vLLM names it."""

    prompt: str
