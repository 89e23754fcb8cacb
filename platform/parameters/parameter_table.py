"""The closed table of request parameters: name, allowed values, default, endpoints, and sampling field.

An unknown name is refused. The documentation is generated from the table, and tests check every row.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from loraplex.engine.sampling_params import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS
from loraplex.platform.errors import InvalidParameter, MissingParameter, UnknownParameter
from loraplex.platform.parameters.chat_messages import Messages
from loraplex.platform.parameters.response_format import ResponseFormat, StructuredOutputs
from loraplex.platform.parameters.tools import ToolChoices, ToolDefinitions
from loraplex.platform.parameters.value_types import (
    Boolean,
    Choice,
    Flags,
    Integer,
    Kind,
    LogitBias,
    Metadata,
    Number,
    Prompts,
    Refused,
    StopStrings,
    Text,
    TokenIds,
)

Endpoint: TypeAlias = Literal["chat", "completions", "tokenize"]

CHAT: Final = frozenset[Endpoint]({"chat"})
COMPLETIONS: Final = frozenset[Endpoint]({"completions"})
GENERATE: Final = CHAT | COMPLETIONS
ALL: Final = GENERATE | frozenset[Endpoint]({"tokenize"})

MAX_TOKENS: Final = 1_000_000
MAX_STOP_BYTES: Final = 1024
MAX_STOP_TOKENS: Final = 64
MAX_SALT_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row. `sampling` names the field of `SamplingParams` that gets the value; null counts as absent."""

    name: str
    kind: Kind
    endpoints: frozenset[Endpoint]
    meaning: str
    default: Any = None
    sampling: str | None = None
    required: frozenset[Endpoint] = frozenset()


class Values(dict[str, Any]):
    """The checked value or default of every parameter. `given`: the names to which the request gave a value."""

    def __init__(self, values: Mapping[str, Any], given: frozenset[str]) -> None:
        super().__init__(values)
        self.given = given

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Values":
        """Apply other defaults to parameters that the request omits; names that are no parameters here are ignored."""
        if not defaults:
            return self
        silent = {name: each for name, each in defaults.items() if name in self and name not in self.given}
        return Values({**self, **silent}, self.given)


_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
_COUNT: Final = Integer(1, MAX_TOKENS)

PARAMETERS: Final[tuple[Parameter, ...]] = (
    Parameter(
        "model", Text(256), ALL, "base model, `adapter`, `adapter:alias` or `adapter@version`", required=ALL
    ),
    Parameter("messages", Messages(), ALL - COMPLETIONS, "the conversation so far", required=CHAT),
    Parameter("prompt", Prompts(), ALL - CHAT, "text or token ids, or several of them", required=COMPLETIONS),
    Parameter(
        "max_tokens", _COUNT, GENERATE, "most tokens per choice; default 1024 or what the context leaves"
    ),
    Parameter("max_completion_tokens", _COUNT, CHAT, "newer name of `max_tokens`"),
    Parameter("n", Integer(1, MAX_CHOICES), GENERATE, "choices per prompt", 1, "n"),
    Parameter("temperature", Number(0, 2), GENERATE, "0 is greedy", 1.0, "temperature"),
    Parameter("top_p", Number(0, 1, low_allowed=False), GENERATE, "nucleus sampling", 1.0, "top_p"),
    Parameter(
        "top_k", Integer(-1, 2**20), GENERATE, "most likely tokens kept; 0 and -1 keep all", 0, "top_k"
    ),
    Parameter("min_p", Number(0, 1), GENERATE, "least probability relative to the best token", 0.0, "min_p"),
    Parameter(
        "presence_penalty",
        Number(-2, 2),
        GENERATE,
        "penalty on tokens that were generated before",
        0.0,
        "presence_penalty",
    ),
    Parameter(
        "frequency_penalty",
        Number(-2, 2),
        GENERATE,
        "penalty per earlier occurrence of the token",
        0.0,
        "frequency_penalty",
    ),
    Parameter(
        "repetition_penalty",
        Number(0.01, 10),
        GENERATE,
        "factor on tokens that occurred before; 1 is off",
        1.0,
        "repetition_penalty",
    ),
    Parameter(
        "logit_bias",
        LogitBias(MAX_LOGIT_BIAS, Number(-100, 100)),
        GENERATE,
        "added to logits",
        {},
        "logit_bias",
    ),
    Parameter(
        "min_tokens",
        Integer(0, MAX_TOKENS),
        GENERATE,
        "tokens before a choice may end; at most `max_tokens`",
        0,
        "min_tokens",
    ),
    Parameter(
        "stop",
        StopStrings(MAX_STOP_STRINGS, MAX_STOP_BYTES),
        GENERATE,
        "the text ends before the first of these strings",
        (),
        "stop",
    ),
    Parameter(
        "stop_token_ids",
        TokenIds(MAX_STOP_TOKENS),
        GENERATE,
        "tokens that end a choice",
        (),
        "stop_token_ids",
    ),
    Parameter("ignore_eos", Boolean(), GENERATE, "continue after the end token", False, "ignore_eos"),
    Parameter(
        "include_stop_str_in_output",
        Boolean(),
        GENERATE,
        "keep the stop string",
        False,
        "include_stop_str_in_output",
    ),
    Parameter(
        "skip_special_tokens",
        Boolean(),
        GENERATE,
        "leave special tokens out of the text",
        True,
        "skip_special_tokens",
    ),
    Parameter("seed", Integer(-(2**63), 2**63 - 1), GENERATE, "same seed, same sampling", None, "seed"),
    Parameter("logprobs", Boolean(), CHAT, "log-probabilities of the chosen tokens", False),
    Parameter("top_logprobs", Integer(0, MAX_TOP_LOGPROBS), CHAT, "best alternatives; needs `logprobs`"),
    Parameter(
        "logprobs", Integer(0, 5), COMPLETIONS, "log-probabilities and best alternatives", None, "logprobs"
    ),
    Parameter("stream", Boolean(), GENERATE, "send the response as server-sent events", False),
    Parameter("stream_options", Flags(("include_usage",)), GENERATE, "needs `stream`"),
    Parameter("cache_salt", Text(MAX_SALT_BYTES), GENERATE, "separates cached prefixes within the tenant"),
    Parameter("prompt_cache_key", Text(512), GENERATE, "accepted; prefixes are cached without it"),
    Parameter("user", Text(512), GENERATE, "accepted, not used"),
    Parameter("metadata", Metadata(16, Text(64), Text(512, min_bytes=0)), CHAT, "accepted, not stored"),
    Parameter("store", Boolean(only=False), CHAT, "responses are never stored", False),
    Parameter("service_tier", Choice(("auto", "default")), CHAT, "accepted; there is one tier"),
    Parameter("reasoning_effort", Choice(_EFFORTS), CHAT, "only where the model's chat template knows it"),
    Parameter(
        "response_format",
        ResponseFormat(),
        CHAT,
        "format of the text; not together with a format in `structured_outputs`",
    ),
    Parameter(
        "structured_outputs",
        StructuredOutputs(),
        GENERATE,
        "the same with vLLM's names; `close` ends the document within `max_tokens`",
    ),
    Parameter("tools", ToolDefinitions(), ALL - COMPLETIONS, "functions the model may call", ()),
    Parameter("tool_choice", ToolChoices(), CHAT, "default auto with `tools`; a named tool is called once"),
    Parameter("parallel_tool_calls", Boolean(), CHAT, "false: one call per response", True),
    Parameter("echo", Refused("prompts are not repeated", (False,)), COMPLETIONS, "not offered"),
    Parameter("suffix", Refused("the model does not insert text", ("",)), COMPLETIONS, "not offered"),
    Parameter("best_of", Refused("use `n`", (1,)), COMPLETIONS, "not offered"),
)


def table(endpoint: Endpoint) -> dict[str, Parameter]:
    """Return the rows of one endpoint by name."""
    return {row.name: row for row in PARAMETERS if endpoint in row.endpoints}


_TABLES: Final[Mapping[Endpoint, Mapping[str, Parameter]]] = {
    endpoint: table(endpoint) for endpoint in ("chat", "completions", "tokenize")
}


def read_parameters(endpoint: Endpoint, body: Mapping[str, object]) -> Values:
    """Return every parameter of the endpoint with its checked value or default. Raises `InvalidParameter`."""
    rows = _TABLES[endpoint]
    for name in body:
        if name not in rows:
            raise UnknownParameter(f"Unknown parameter `{name[:64]}`.", param=name[:64])
    given = frozenset(name for name, value in body.items() if value is not None)
    read = {row.name: _value(row, endpoint, body.get(row.name)) for row in rows.values()}
    values = Values(read, given)
    _check_together(endpoint, values)
    return values


def _value(row: Parameter, endpoint: Endpoint, value: object) -> Any:
    if value is not None:
        return row.kind.read(row.name, value)
    if endpoint in row.required:
        raise MissingParameter(f"`{row.name}` is required: {row.kind.allowed}.", param=row.name)
    return row.default


def _check_together(endpoint: Endpoint, values: Values) -> None:
    if values.get("stream_options") is not None and not values["stream"]:
        raise InvalidParameter("`stream_options` needs `stream` to be true.", param="stream_options")
    if values.get("top_logprobs") is not None and not values["logprobs"]:
        raise InvalidParameter("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    older, newer = values.get("max_tokens"), values.get("max_completion_tokens")
    if older is not None and newer is not None and older != newer:
        raise InvalidParameter(
            "`max_tokens` and `max_completion_tokens` differ; give one.", param="max_completion_tokens"
        )
    if endpoint == "tokenize" and (values["messages"] is None) == (values["prompt"] is None):
        raise InvalidParameter("Give `messages` or `prompt`, not both.", param="prompt")
    if endpoint == "tokenize" and values["tools"] and values["messages"] is None:
        raise InvalidParameter("`tools` needs `messages`.", param="tools")


def sampling_fields(endpoint: Endpoint, values: Values) -> dict[str, Any]:
    """Return the values of all `SamplingParams` fields except `max_tokens`."""
    fields = {
        row.sampling: values[row.name] for row in _TABLES[endpoint].values() if row.sampling is not None
    }
    fields["top_k"] = max(fields["top_k"], 0)
    if endpoint == "chat":
        fields["logprobs"] = (values["top_logprobs"] or 0) if values["logprobs"] else None
    return fields


def render_markdown(rows: Iterable[Parameter] = PARAMETERS) -> str:
    """Render the table as Markdown, one line per row."""
    lines = ["| Parameter | Endpoints | Must be | Default | Meaning |", "|---|---|---|---|---|"]
    for row in rows:
        endpoints = ", ".join(sorted(row.endpoints))
        default = "required" if row.required == row.endpoints else _default_text(row.default)
        cells = (f"`{row.name}`", endpoints, row.kind.allowed, default, row.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default_text(default: Any) -> str:
    if default is None or default == () or default == {}:
        return ""
    return str(default).lower() if isinstance(default, bool) else f"{default:g}"
