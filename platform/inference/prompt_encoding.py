"""`PromptEncoder`: the token ids of a request's prompt, checked against the model's context.

Invariant: a large prompt is encoded on a thread, after a check whether it can fit at all.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from uuid import UUID

from loraplex.engine.errors import overflow_message
from loraplex.grammar.constraints import Tool
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.errors import ContextSizes, ContextTooLong, InvalidParameter, UnsupportedParameter
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.inference.prompting.chat_template import LengthCheck
from loraplex.platform.inference.thought import ThoughtRules
from loraplex.platform.inference.truncation import ConversationRequest, fitted
from loraplex.platform.parameters.json_object import size_of
from loraplex.platform.parameters.request_models import (
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    PromptRequest,
    TokenizeRequest,
    messages_of,
    prompts_of,
    tools_of,
)
from loraplex.platform.parameters.request_object import MAX_NAME
from loraplex.platform.tenant_limiter import AT_ONCE, MAX_WAITING, TenantLimiter

T = TypeVar("T")
INLINE_CHARACTERS = 8_192
PART_CHARACTERS = 16
"""What a message or call costs besides its texts, in characters: the template writes around it."""
# Half of the processors: large prompts are encoded before admission, which needs their size.
MAX_ENCODING = max(1, len(os.sched_getaffinity(0)) // 2)


class PromptEncoder:
    """Encodes prompts. `thought`: what a request's wish to think writes at a prompt's end."""

    def __init__(self, dependencies: GatewayDependencies, thought: ThoughtRules) -> None:
        self._dependencies = dependencies
        self._thought = thought
        self._limiter = TenantLimiter("requests", total=MAX_ENCODING, per_tenant=AT_ONCE, waiting=MAX_WAITING)

    @property
    def context_tokens(self) -> int:
        """The most tokens of prompt and answer, as the engine bounds a sequence."""
        info = self._dependencies.engine.info()
        # `max_model_len` may be set larger than the KV cache.
        return min(info.max_model_len, info.num_blocks * info.block_size)

    async def encode(
        self, values: PromptRequest, model: ResolvedModel, tenant_id: UUID, *, only_counted: bool = False
    ) -> list[list[int]]:
        """Return the token ids of `messages` or of every `prompt`; `only_counted`: they may be more than the context has.

        Large prompts are counted and encoded on a thread, `AT_ONCE` of a tenant and `MAX_ENCODING` of all at a time. Raises
        `Overloaded` when too many of the tenant's requests wait.
        """
        check = None
        if not only_counted and not isinstance(values, TokenizeRequest):
            check = partial(self.left, values, bound="at least ")
        has_cuts = isinstance(values, ConversationRequest) and bool(values.cuts)
        if not has_cuts and _characters(values, INLINE_CHARACTERS, PART_CHARACTERS) <= INLINE_CHARACTERS:
            return self._encode(values, model, check)
        return await self.on_thread(tenant_id, partial(self._encode_large, values, model, check))

    async def encode_behind(
        self, values: ChatRequest, texts: Sequence[str], model: ResolvedModel, tenant_id: UUID
    ) -> tuple[list[int], list[list[int]]]:
        """Return the ids of `messages` up to the end of the last one, which is a user's, and those of each of `texts` behind it, with
        the beginning of an answer. Raises as `encode`, and as `PromptRenderer.split_chat_ids`.
        """
        encode = partial(self._encode_behind, values, texts, model)
        if (
            _characters(values, INLINE_CHARACTERS, PART_CHARACTERS) + sum(map(len, texts))
            <= INLINE_CHARACTERS
        ):
            return encode()
        return await self.on_thread(tenant_id, encode)

    async def on_thread(self, tenant_id: UUID, encode: Callable[[], T]) -> T:
        """Run what encodes a lot, in turn with what else the tenant encodes."""
        async with self._limiter.slot(tenant_id):
            encoding = asyncio.create_task(asyncio.to_thread(encode))
            try:
                return await asyncio.shield(encoding)
            except asyncio.CancelledError:
                # A thread cannot be stopped: the slot of a client that left is free when the thread ends, also with an error.
                await asyncio.gather(encoding, return_exceptions=True)
                raise

    def _encode_behind(
        self, values: ChatRequest, texts: Sequence[str], model: ResolvedModel
    ) -> tuple[list[int], list[list[int]]]:
        self._check_characters(values, sum(map(len, texts)))
        options, style = self._template_options(values, model), self.style(model)
        check = partial(self.left, values, bound="at least ")
        begin, ends = self._dependencies.prompts.split_chat_ids(values.messages, texts, options, style, check)
        markers = self._thought.markers(model.reasoning_style)
        if markers is not None:
            ends = [ids + self._thought.ending(values, markers, ids) for ids in ends]
        return begin, ends

    def _encode_large(
        self, values: PromptRequest, model: ResolvedModel, check: LengthCheck | None
    ) -> list[list[int]]:
        if isinstance(values, ConversationRequest) and values.cuts:
            return fitted(values, partial(self._encode_fitting, model), self._spare_tokens(values))
        self._check_characters(values)
        return self._encode(values, model, check)

    def _check_characters(self, values: PromptRequest, behind: int = 0) -> None:
        """Raise `ContextTooLong` for more characters than are read of one request, with those `behind` its prompt."""
        limit = self._dependencies.config.max_prompt_characters
        size = behind + _characters(values, limit)
        if size > limit:
            context, name = self._dependencies.engine.info().max_model_len, prompt_name(values)
            raise ContextTooLong(
                f"This model's maximum context length is {context} tokens. However, you requested {size} "
                f"characters in the {name}, of which at most {limit} are read.",
                name,
                ContextSizes(values.model, context, context + 1, 1),
            )

    def _encode(
        self, values: PromptRequest, model: ResolvedModel, check: LengthCheck | None
    ) -> list[list[int]]:
        """Return the ids of every prompt. `check` raises `ContextTooLong` early for one that cannot fit."""
        prompts = self._dependencies.prompts
        if isinstance(values, CompletionRequest) or values.messages is None:
            special = not isinstance(values, TokenizeRequest) or values.add_special_tokens is not False
            return [
                prompts.text_ids(each, check, special=special) if isinstance(each, str) else each
                for each in prompts_of(values)
            ]
        options, style = self._template_options(values, model), self.style(model)
        ids = prompts.chat_ids(values.messages, options, self._prompt_tools(values, style), style, check)
        markers = self._thought.markers(model.reasoning_style)
        if markers is not None and isinstance(values, ChatRequest):
            ids += self._thought.ending(values, markers, ids)
        return [ids]

    def _encode_fitting(
        self, model: ResolvedModel, values: ConversationRequest, spare: int
    ) -> list[list[int]]:
        prompts = self._encode_large(values, model, partial(self.left, values, bound="at least "))
        self.left(values, len(prompts[0]) + spare)
        return prompts

    def _spare_tokens(self, values: ConversationRequest) -> int:
        """Return how many tokens a shortened conversation leaves to an answer whose request names no maximum."""
        if values.requested_tokens is not None:
            return 0
        default = values.max_tokens or self._dependencies.database.limits.default_max_tokens
        most = self.context_tokens // 4
        return min(default or most, most)

    def _template_options(
        self, values: ChatRequest | TokenizeRequest, model: ResolvedModel
    ) -> dict[str, object]:
        """Return what the template is given. Raises `UnsupportedParameter` for what it does not read."""
        prompts, options = self._dependencies.prompts, values.template_values()
        for name in values.chat_template_kwargs or ():
            if name not in prompts.option_names:
                where, names = f"chat_template_kwargs.{name[:MAX_NAME]}", sorted(prompts.option_names)
                known = ", ".join(names) or "no such name"
                message = f"`{where}` is not supported: the model's chat template reads {known}."
                raise UnsupportedParameter(message, param=where)
        if not isinstance(values, ChatRequest):
            return options
        markers = self._thought.markers(model.reasoning_style)
        if markers is not None:
            options |= self._thought.template_values(values, options)
        effort = values.reasoning_effort if prompts.knows("reasoning_effort") else None
        if effort is not None and options.setdefault("reasoning_effort", effort) != effort:
            message = "`reasoning_effort` and `chat_template_kwargs.reasoning_effort` differ; give one."
            raise InvalidParameter(message, param="reasoning_effort")
        return options

    def _prompt_tools(self, values: PromptRequest, style: ToolStyle) -> tuple[Tool, ...]:
        """Return all tools, whichever of them may be called, so that the prompt's prefix stays the same.

        Where tools are written as text, that text explains how to call, so it is omitted when no call is allowed.
        """
        choice = values.tool_choice if isinstance(values, ChatRequest) else None
        forbidden = choice is not None and choice.mode == "none"
        as_text = self._dependencies.prompts.writes_tools_as_text(style)
        return () if forbidden and as_text else tools_of(values)

    def style(self, model: ResolvedModel) -> ToolStyle:
        """Return how the model writes calls."""
        return self._dependencies.prompts.style if model.tool_style is None else ToolStyle(model.tool_style)

    def check_vocabulary(self, ids: Sequence[int], name: str) -> None:
        """Raise `InvalidParameter` for a token id that the model does not have."""
        vocab_size = self._dependencies.engine.info().vocab_size
        if max(ids, default=0) >= vocab_size:
            raise InvalidParameter(f"`{name}` must hold token ids in 0..{vocab_size - 1}.", param=name)

    def left(self, values: GenerationBody, tokens: int, bound: str = "") -> int:
        """Return what the context leaves next to a prompt of `tokens`. Raises `ContextTooLong` if fewer than requested.

        Beside a `bound` of its tokens the prompt alone is checked: what is left for its answer is told exactly.
        """
        context, requested = self.context_tokens, values.requested_tokens
        requested = 1 if requested is None or bound else requested
        if requested > context - tokens:
            raise ContextTooLong(
                overflow_message(context, tokens, requested, prompt_name(values), bound),
                prompt_name(values),
                ContextSizes(values.model, context, tokens, requested),
            )
        return context - tokens


def prompt_name(values: PromptRequest) -> str:
    return "prompt" if messages_of(values) is None else "messages"


def _characters(values: PromptRequest, limit: int, part: int = 0) -> int:
    """Return the characters of a prompt, with `part` more for each message and call."""
    messages = messages_of(values)
    if messages is None:
        return sum(len(each) for each in prompts_of(values))
    size = 0
    for message in messages:
        size += part + len(message.content) + len(message.reasoning)
        size += sum(part + len(call.arguments) for call in message.tool_calls)
    if not isinstance(values, CompletionRequest) and values.chat_template_kwargs:
        # A template may write a value for each message.
        size += size_of(values.chat_template_kwargs, limit) * len(messages)
    tools = [(tool.description, tool.parameters) for tool in tools_of(values)]
    return size + size_of(tools, limit) if tools else size
