"""The bodies of `/v1` as pydantic models: names, types, bounds and defaults of all parameters, with what they mean.

Invariant: this is their only definition. Checks, error texts, the OpenAPI document and the table in the docs come from it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias

from pydantic import Field, model_validator

from loraplex.engine.sampling_params import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS
from loraplex.grammar.constraints import OutputFormat, Tool
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.chat_messages import ChatMessage, Messages
from loraplex.platform.parameters.request_object import ObjectOf, RequestObject
from loraplex.platform.parameters.response_format import ResponseFormat, Structure, StructuredOutputs
from loraplex.platform.parameters.tools import ToolChoice, ToolChoices, ToolDefinitions
from loraplex.platform.parameters.value_types import (
    Boolean,
    Choice,
    Integer,
    ListOf,
    LogitBias,
    Metadata,
    Number,
    Prompt,
    Prompts,
    Refused,
    Scalar,
    Scalars,
    StopStrings,
    Text,
    TokenIds,
)
from loraplex.tenants.default_limits import MAX_DEFAULT_TOKENS

MAX_TOKENS: Final = MAX_DEFAULT_TOKENS
"""A default may be as large as what a request names."""
COMPLETION_DEFAULT_TOKENS: Final = 16
"""The most tokens of a completion whose request names no maximum, as in the OpenAI API."""
MAX_STOP_BYTES: Final = 1024
MAX_STOP_TOKENS: Final = 64
MAX_SALT_BYTES: Final = 256
MAX_DETOKENIZED: Final = 131_072
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THOUGHT_FIELDS: Final = frozenset({"reasoning_effort", "thinking_token_budget"})
THOUGHT_SWITCHES: Final = frozenset({"enable_thinking", "thinking"})
"""The names by which templates are told whether the model is to think."""
ACCEPTED: Final = "accepted, not used"
_LABEL: Final = Text(512, min_bytes=0)
_RETENTIONS: Final = ("in_memory", "in-memory", "24h")
_COUNT: Final = Integer(1, MAX_TOKENS)
_PENALTY: Final = Number(-2, 2)
_NEWER: Final = "newer name of `max_tokens`; not another number beside it"
_CHOICES: Final = "choices per prompt; prompts x `n` is at most `concurrent_requests`, where it is set"
_TOKEN_IDS: Final = "add `prompt_token_ids`, and `token_ids` of each choice, to the response"
_NUMBERED: Final = "write tokens in log-probabilities as `token_id:N`"
_BEGUN: Final = "end the prompt with the beginning of an answer; false with `continue_final_message`"
_OPEN: Final = "leave the last message open, so that the model continues it"
_SPECIAL: Final = "of a `prompt`, default true; the template writes those of `messages`"
_ONE_TEXT: Final = ListOf(Choice(("text",)), 1, 1, 'item: "text"')
_MESSAGES: Final = "the conversation so far"
_PROMPT: Final = "text or token ids, or several of them"
_TOOLS: Final = "functions the model may call"
_SAMPLING: Final = (
    *("n", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)
"""Fields of `SamplingParams` that have the value of the parameter of their name."""


class ModelRequest(RequestObject):
    """A request that names a model."""

    allowed: ClassVar[str] = "a JSON object"
    model: Annotated[str, Text(256)] = Field(
        description="base model, `adapter`, `adapter:alias` or `adapter@version`"
    )

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """Apply other defaults to parameters that the request omits; names that are no parameters here are ignored."""
        if not defaults:
            return self
        given, names = self.model_fields_set, type(self).model_fields
        silent = {name: each for name, each in defaults.items() if name in names and name not in given}
        if not silent:
            return self
        # The names that the request gave stay: a default is not given.
        return self.model_construct(given, **{**self.__dict__, **silent})


class StreamOptions(RequestObject):
    """What a stream contains besides the text. `continuous_usage_stats` has an effect with `include_usage` only, as in vLLM.

    `include_obfuscation` is accepted and not used.
    """

    allowed: ClassVar[str] = (
        "an object with the booleans `include_usage`, `continuous_usage_stats`, `include_obfuscation`"
    )
    include_usage: Annotated[bool, Boolean()] = False
    continuous_usage_stats: Annotated[bool, Boolean()] = False
    include_obfuscation: Annotated[bool, Boolean()] = False


class PromptCacheOptions(RequestObject):
    """How the OpenAI API caches prompts."""

    allowed: ClassVar[str] = 'an object with `mode` ("implicit", "explicit") and `ttl` (such as "30m")'
    mode: Annotated[str | None, Choice(("implicit", "explicit"))] = None
    ttl: Annotated[str | None, Text(16)] = None
    prewarm: Annotated[None, Refused("nothing is computed before a request", (False,))] = None
    comparison_response_id: Annotated[None, Refused("responses are not stored")] = None


_CACHE: Final = ObjectOf(PromptCacheOptions)


class CommonRequest(ModelRequest):
    """The parameters that chat, completions and responses share."""

    temperature: Annotated[float, Number(0, 2)] = Field(1.0, description="0 is greedy")
    top_p: Annotated[float, Number(0, 1)] = Field(1.0, description="nucleus sampling; 0 is greedy")
    presence_penalty: Annotated[float, _PENALTY] = Field(
        0.0, description="penalty on tokens that were generated before"
    )
    frequency_penalty: Annotated[float, _PENALTY] = Field(
        0.0, description="penalty per earlier occurrence of the token"
    )
    seed: Annotated[int | None, Integer(-(2**63), 2**63 - 1)] = Field(
        None,
        description="same seed, same random numbers; the same text where the logits have the same bits: with `deterministic` always, else see the engine's README, decision 10",
    )
    stream: Annotated[bool, Boolean()] = Field(False, description="send the response as server-sent events")
    stream_options: Annotated[StreamOptions | None, ObjectOf(StreamOptions)] = Field(
        None, description="needs `stream`"
    )
    prompt_cache_key: Annotated[str | None, _LABEL] = Field(
        None,
        description="names the session of the request, for usage and `tokens_per_session`; prefixes are cached without it",
    )
    prompt_cache_retention: Annotated[str | None, Choice(_RETENTIONS)] = Field(None, description=ACCEPTED)
    prompt_cache_options: Annotated[PromptCacheOptions | None, _CACHE] = Field(None, description=ACCEPTED)
    user: Annotated[str | None, _LABEL] = Field(None, description=ACCEPTED)
    safety_identifier: Annotated[str | None, _LABEL] = Field(None, description=ACCEPTED)

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("`stream_options` needs `stream` to be true.", param="stream_options")
        return self


class GenerationRequest(CommonRequest):
    """The parameters that chat and completions have besides. Most are fields of `SamplingParams`."""

    max_tokens: Annotated[int | None, _COUNT] = Field(
        None, description="most tokens per choice; default `default_max_tokens`"
    )
    max_completion_tokens: Annotated[int | None, _COUNT] = Field(None, description=_NEWER)
    n: Annotated[int, Integer(1, MAX_CHOICES)] = Field(1, description=_CHOICES)
    top_k: Annotated[int, Integer(-1, 2**20)] = Field(
        0, description="most likely tokens kept; 0 and -1 keep all"
    )
    min_p: Annotated[float, Number(0, 1)] = Field(
        0.0, description="least probability relative to the best token"
    )
    repetition_penalty: Annotated[float, Number(0.01, 10)] = Field(
        1.0, description="factor on tokens that occurred before; 1 is off"
    )
    logit_bias: Annotated[dict[int, float], LogitBias(MAX_LOGIT_BIAS, Number(-100, 100))] = Field(
        default_factory=dict, description="added to logits"
    )
    min_tokens: Annotated[int, Integer(0, MAX_TOKENS)] = Field(
        0, description="tokens before a choice may end; at most `max_tokens`"
    )
    stop: Annotated[tuple[str, ...], StopStrings(MAX_STOP_STRINGS, MAX_STOP_BYTES)] = Field(
        (), description='the text ends before the first of these strings; "" is none'
    )
    stop_token_ids: Annotated[tuple[int, ...], TokenIds(MAX_STOP_TOKENS)] = Field(
        (), description="tokens that end a choice"
    )
    ignore_eos: Annotated[bool, Boolean()] = Field(False, description="continue after the end token")
    include_stop_str_in_output: Annotated[bool, Boolean()] = Field(False, description="keep the stop string")
    skip_special_tokens: Annotated[bool, Boolean()] = Field(
        True, description="leave special tokens out of the text"
    )
    cache_salt: Annotated[str | None, Text(MAX_SALT_BYTES)] = Field(
        None, description="separates cached prefixes within the tenant"
    )
    return_token_ids: Annotated[bool, Boolean()] = Field(False, description=_TOKEN_IDS)
    return_tokens_as_token_ids: Annotated[bool, Boolean()] = Field(False, description=_NUMBERED)
    structured_outputs: Annotated[Structure | None, StructuredOutputs()] = Field(
        None,
        description="the same with vLLM's names; `close` ends the document within `max_tokens`; "
        "`probabilities` adds the probability of each `choice`",
    )
    prompt_logprobs: Annotated[int | None, Integer(0, MAX_TOP_LOGPROBS)] = Field(
        None, description="log-probability of each prompt token and of so many best ones; not with `stream`"
    )

    @property
    def requested_tokens(self) -> int | None:
        """The number of tokens that the request itself names: `max_tokens` may be a default of a profile."""
        given = self.max_tokens if "max_tokens" in self.model_fields_set else None
        return self.max_completion_tokens if given is None else given

    @property
    def scored_alternatives(self) -> int | None:
        """Alternatives for each token of the prompt in the response; None: the prompt is not scored."""
        return self.prompt_logprobs

    def sampling_fields(self) -> dict[str, Any]:
        """Return the values of all `SamplingParams` fields except `max_tokens`."""
        fields = {name: getattr(self, name) for name in _SAMPLING} | {"top_k": max(self.top_k, 0)}
        # Of `top_p` 0 the likeliest token is left, which the engine calls greedy.
        return fields if self.top_p else fields | {"temperature": 0.0, "top_p": 1.0}

    @model_validator(mode="after")
    def _check_maximum(self) -> Self:
        newer = self.max_completion_tokens
        if newer is not None and self.max_tokens not in (None, newer):
            raise InvalidParameter(
                "`max_tokens` and `max_completion_tokens` differ; give one.", param="max_completion_tokens"
            )
        if self.stream:
            self._check_streamed()
        return self

    def _check_streamed(self) -> None:
        structure = self.structured_outputs
        if self.prompt_logprobs is not None:
            name = "prompt_logprobs"
        elif structure is not None and structure.probabilities:
            name = "structured_outputs.probabilities"
        else:
            return
        raise InvalidParameter(f"`{name}` needs `stream` to be false.", param=name)


class TemplateRequest(ModelRequest):
    """How the chat template renders the messages."""

    add_generation_prompt: Annotated[bool, Boolean()] = Field(True, description=_BEGUN)
    continue_final_message: Annotated[bool, Boolean()] = Field(False, description=_OPEN)
    chat_template_kwargs: Annotated[dict[str, Scalar] | None, Scalars(16, 256, 999_999)] = Field(
        None, description="values of names that the model's chat template reads, such as `enable_thinking`"
    )

    def template_values(self) -> dict[str, object]:
        """Return what the template is given besides messages and tools. Raises `InvalidParameter` for a contradiction."""
        values: dict[str, object] = dict(self.chat_template_kwargs or {})
        if self.continue_final_message:
            if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
                message = "`continue_final_message` and `add_generation_prompt` exclude each other; give one."
                raise InvalidParameter(message, param="continue_final_message")
            values["continue_final_message"] = True
        if self.continue_final_message or not self.add_generation_prompt:
            values["add_generation_prompt"] = False
        return values


class ChatRequest(TemplateRequest, GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Messages()] = Field(description=_MESSAGES)
    logprobs: Annotated[bool, Boolean()] = Field(False, description="log-probabilities of the chosen tokens")
    top_logprobs: Annotated[int | None, Integer(0, MAX_TOP_LOGPROBS)] = Field(
        None, description="best alternatives; needs `logprobs`"
    )
    metadata: Annotated[dict[str, str] | None, Metadata(16, Text(64), Text(512, min_bytes=0))] = Field(
        None, description="accepted, not stored"
    )
    store: Annotated[bool, Boolean(only=False)] = Field(False, description="responses are never stored")
    modalities: Annotated[list[str] | None, _ONE_TEXT] = Field(None, description=ACCEPTED)
    verbosity: Annotated[str | None, Choice(("low", "medium", "high"))] = Field(None, description=ACCEPTED)
    service_tier: Annotated[str | None, Choice(("auto", "default"))] = Field(
        None, description="accepted; there is one tier"
    )
    reasoning_effort: Annotated[str | None, Choice(EFFORTS)] = Field(
        None,
        description="bounds the thought, and is given to a chat template that knows it; `none`: no thought",
    )
    thinking_token_budget: Annotated[int | None, Integer(0, MAX_TOKENS)] = Field(
        None, description="most tokens of the thought; at most `max_tokens`"
    )
    response_format: Annotated[OutputFormat | None, ResponseFormat()] = Field(
        None, description="format of the text; not together with a format in `structured_outputs`"
    )
    tools: Annotated[tuple[Tool, ...], ToolDefinitions()] = Field((), description=_TOOLS)
    tool_choice: Annotated[ToolChoice | None, ToolChoices()] = Field(
        None, description="default auto with `tools`; a named tool is called once"
    )
    parallel_tool_calls: Annotated[bool, Boolean()] = Field(True, description="false: one call per response")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """Apply other defaults; none of thought where the request itself says how much it thinks, or continues an answer."""
        switched = not THOUGHT_SWITCHES.isdisjoint(self.chat_template_kwargs or ())
        own = switched or self.continue_final_message or not THOUGHT_FIELDS.isdisjoint(self.model_fields_set)
        if own:
            defaults = {name: each for name, each in defaults.items() if name not in THOUGHT_FIELDS}
        return super().with_defaults(defaults)

    def sampling_fields(self) -> dict[str, Any]:
        alternatives = (self.top_logprobs or 0) if self.logprobs else None
        return super().sampling_fields() | {"logprobs": alternatives}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameter("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        budget, most = self.thinking_token_budget, self.requested_tokens
        if budget is not None and most is not None and budget > most:
            raise InvalidParameter(
                f"`thinking_token_budget` is {budget}, but must be at most `max_tokens`, which is {most}.",
                param="thinking_token_budget",
            )
        return self


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: Annotated[list[Prompt], Prompts()] = Field(description=_PROMPT)
    logprobs: Annotated[int | None, Integer(0, 5)] = Field(
        None, description="log-probability of the chosen token and of so many best ones"
    )
    max_tokens: Annotated[int | None, Integer(0, MAX_TOKENS)] = Field(
        None,
        description="most tokens per choice; 0 with `echo` or `prompt_logprobs`: only the prompt; default 16",
    )
    echo: Annotated[bool, Boolean()] = Field(
        False, description="begin each choice with the prompt; with `logprobs` also theirs"
    )
    suffix: Annotated[None, Refused("the model does not insert text", ("",))] = Field(
        None, description="not offered"
    )
    best_of: Annotated[None, Refused("use `n`", (1,))] = Field(None, description="not offered")

    @property
    def scored_alternatives(self) -> int | None:
        wanted = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((each for each in wanted if each is not None), default=None)

    def sampling_fields(self) -> dict[str, Any]:
        return super().sampling_fields() | {"logprobs": self.logprobs}

    @model_validator(mode="after")
    def _check_prompt_only(self) -> Self:
        if self.max_tokens == 0:
            if not self.echo and self.prompt_logprobs is None:
                raise InvalidParameter(
                    "`max_tokens` must be at least 1 without `echo` and `prompt_logprobs`.",
                    param="max_tokens",
                )
            if self.n != 1 or self.structured_outputs is not None:
                name = "n" if self.n != 1 else "structured_outputs"
                raise InvalidParameter(f"With `max_tokens` 0, `{name}` must be absent.", param=name)
        return self


class TokenizeRequest(TemplateRequest):
    """The body of `/v1/tokenize`: `messages` or `prompt`."""

    messages: Annotated[list[ChatMessage] | None, Messages()] = Field(None, description=_MESSAGES)
    prompt: Annotated[list[Prompt] | None, Prompts()] = Field(None, description=_PROMPT)
    tools: Annotated[tuple[Tool, ...], ToolDefinitions()] = Field((), description=_TOOLS)
    add_special_tokens: Annotated[bool | None, Boolean()] = Field(None, description=_SPECIAL)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.messages is None) == (self.prompt is None):
            raise InvalidParameter("Give `messages` or `prompt`, not both.", param="prompt")
        for name in ("tools", "chat_template_kwargs", "continue_final_message"):
            if self.messages is None and getattr(self, name):
                raise InvalidParameter(f"`{name}` needs `messages`.", param=name)
        if self.add_special_tokens and self.messages is not None:
            raise InvalidParameter("`add_special_tokens` needs `prompt`.", param="add_special_tokens")
        return self


class DetokenizeRequest(ModelRequest):
    """The body of `/v1/detokenize`."""

    tokens: Annotated[tuple[int, ...], TokenIds(MAX_DETOKENIZED)] = Field(description="token ids of a text")


GenerationBody: TypeAlias = ChatRequest | CompletionRequest
PromptRequest: TypeAlias = GenerationBody | TokenizeRequest


def messages_of(request: PromptRequest) -> list[ChatMessage] | None:
    """Return the messages of a request; None for one with a `prompt`."""
    return None if isinstance(request, CompletionRequest) else request.messages


def prompts_of(request: PromptRequest) -> list[Prompt]:
    """Return the prompts of a request without messages."""
    return [] if isinstance(request, ChatRequest) else request.prompt or []


def tools_of(request: PromptRequest) -> tuple[Tool, ...]:
    """Return the tools that the prompt of a request contains."""
    return () if isinstance(request, CompletionRequest) else request.tools
