"""The bodies of `/v1/responses` and `/v1/responses/input_tokens` (OpenAI Responses API, without what needs stored responses)."""

from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from loraplex.engine.sampling_params import MAX_TOP_LOGPROBS
from loraplex.grammar.constraints import JsonObject, JsonSchema, OutputFormat
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.request_models import (
    ACCEPTED,
    EFFORTS,
    MAX_TOKENS,
    CommonRequest,
    ModelRequest,
)
from loraplex.platform.parameters.request_object import ObjectOf, RequestObject
from loraplex.platform.parameters.response_format import NamedSchema
from loraplex.platform.parameters.responses_input import InputItem, InputItems
from loraplex.platform.parameters.responses_tools import (
    OneOf,
    ResponseToolChoice,
    ResponseToolChoices,
    ResponseTools,
    ToolSet,
)
from loraplex.platform.parameters.value_types import (
    AnyText,
    Boolean,
    Choice,
    Integer,
    ListOf,
    Metadata,
    Refused,
    Text,
)

INCLUDE_SEAL: Final = "reasoning.encrypted_content"
INCLUDE_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDABLE: Final = Choice((INCLUDE_SEAL, INCLUDE_LOGPROBS))
_FORMAT: Final = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", name, schema, description?, strict?}'
_STORED: Final = "responses are not stored; send the items of the conversation in `input`"
_NOT_OFFERED: Final = "not offered"
_INPUT: Final = "the conversation so far"
_CLIENT: Final = Metadata(64, Text(256), Text(16_384, min_bytes=0))
_COUNT: Final = Integer(1, MAX_TOKENS)


class TextFormatObject(RequestObject):
    """A format of the text."""

    allowed: ClassVar[str] = _FORMAT
    type: Annotated[str, Choice(("text", "json_object"))]

    def output_format(self) -> OutputFormat | None:
        """Return the constraint of the output; plain text is None."""
        return JsonObject() if self.type == "json_object" else None


class TextSchemaObject(NamedSchema):
    """A JSON value that satisfies a schema."""

    allowed: ClassVar[str] = _FORMAT
    type: Annotated[str, Choice(("json_schema",))]

    def output_format(self) -> OutputFormat:
        """Return the constraint of the output."""
        return JsonSchema(self.json_schema, self.strict, "text.format.schema")


TEXT_FORMATS: Final = OneOf(
    {"text": TextFormatObject, "json_object": TextFormatObject, "json_schema": TextSchemaObject}
)
_PLAIN: Final = TextFormatObject(type="text")


class TextOptions(RequestObject):
    """What the text is like. `verbosity` is accepted and not used."""

    allowed: ClassVar[str] = 'an object with `format` and `verbosity` ("low", "medium", "high")'
    format: Annotated[TextFormatObject | TextSchemaObject, TEXT_FORMATS] = _PLAIN
    verbosity: Annotated[str | None, Choice(("low", "medium", "high"))] = None


class ReasoningOptions(RequestObject):
    """How the model thinks. `context`: with current_turn, it does not see thought from before the newest message of the user.

    `summary` is accepted: thought is sent as it is, without a summary.
    """

    allowed: ClassVar[str] = "an object with `effort`, `summary` and `context`"
    mode: Annotated[None, Refused("there is one mode", ("standard",))] = None
    effort: Annotated[str | None, Choice(EFFORTS)] = None
    summary: Annotated[str | None, Choice(("auto", "concise", "detailed"))] = None
    generate_summary: Annotated[str | None, Choice(("auto", "concise", "detailed"))] = None
    context: Annotated[str | None, Choice(("auto", "current_turn", "all_turns"))] = None


class InputTokensRequest(ModelRequest):
    """The body of `/v1/responses/input_tokens`."""

    input: Annotated[tuple[InputItem, ...], InputItems()] = Field(
        (), description=f"{_INPUT}; optional with `instructions`"
    )
    instructions: Annotated[str | None, AnyText()] = Field(
        None, description="text of the system, before the conversation"
    )
    tools: Annotated[ToolSet, ResponseTools()] = Field(ToolSet(), description="tools the model may call")
    tool_choice: Annotated[ResponseToolChoice, ResponseToolChoices()] = Field(
        "auto", description="which of the tools; a named one is called once"
    )
    parallel_tool_calls: Annotated[bool, Boolean()] = Field(True, description="false: one call per response")
    text: Annotated[TextOptions, ObjectOf(TextOptions)] = Field(
        TextOptions(), description="format of the text; `verbosity` is accepted, not used"
    )
    reasoning: Annotated[ReasoningOptions, ObjectOf(ReasoningOptions)] = Field(
        ReasoningOptions(), description="how much the model thinks, and which earlier thought it sees"
    )
    truncation: Annotated[Literal["auto", "disabled"], Choice(("auto", "disabled"))] = Field(
        "disabled", description="auto: whole oldest turns are left out where the context is too short"
    )
    previous_response_id: Annotated[None, Refused(_STORED)] = Field(None, description=_NOT_OFFERED)
    conversation: Annotated[None, Refused(_STORED)] = Field(None, description=_NOT_OFFERED)
    personality: Annotated[None, Refused("use `instructions`")] = Field(None, description=_NOT_OFFERED)


class ResponsesRequest(InputTokensRequest, CommonRequest):
    """The body of `/v1/responses`."""

    input: Annotated[tuple[InputItem, ...], InputItems()] = Field(description=_INPUT)
    max_output_tokens: Annotated[int | None, _COUNT] = Field(
        None, description="most tokens, those of thought included; default `default_max_tokens`"
    )
    max_tool_calls: Annotated[int | None, _COUNT] = Field(
        None, description="accepted; only tools of a host count, and there are none"
    )
    top_logprobs: Annotated[int, Integer(0, MAX_TOP_LOGPROBS)] = Field(
        0, description=f"best alternatives; needs `{INCLUDE_LOGPROBS}` in `include`"
    )
    include: Annotated[list[str], ListOf(_INCLUDABLE, 0, 2, f"values: {_INCLUDABLE.allowed}")] = Field(
        default_factory=list, description="what the response has besides"
    )
    metadata: Annotated[dict[str, str], Metadata(16, Text(64), Text(512, min_bytes=0))] = Field(
        default_factory=dict, description="repeated in the response, not stored"
    )
    client_metadata: Annotated[dict[str, str] | None, _CLIENT] = Field(None, description=ACCEPTED)
    service_tier: Annotated[str | None, Choice(("auto", "default"))] = Field(
        None, description="accepted; there is one tier"
    )
    store: Annotated[None, Refused(_STORED, (False,))] = Field(None, description=_NOT_OFFERED)
    background: Annotated[None, Refused("responses run only while their client waits", (False,))] = Field(
        None, description=_NOT_OFFERED
    )
    prompt: Annotated[None, Refused("there are no templates of prompts; use `instructions`")] = Field(
        None, description=_NOT_OFFERED
    )
    context_management: Annotated[None, Refused("use `truncation`")] = Field(None, description=_NOT_OFFERED)
    moderation: Annotated[None, Refused("this server only generates text")] = Field(
        None, description=_NOT_OFFERED
    )

    @property
    def scores_tokens(self) -> bool:
        """The response has log-probabilities."""
        return INCLUDE_LOGPROBS in self.include

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs and not self.scores_tokens:
            raise InvalidParameter(
                f"`top_logprobs` needs `{INCLUDE_LOGPROBS}` in `include`.", param="top_logprobs"
            )
        return self
