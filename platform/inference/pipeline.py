"""Processes one inference request: resolve the model, check the sizes, render the prompt, admit, submit.

Invariant: the model is resolved, every size checked and the request provisionally admitted before it is sent to the engine.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID, uuid4

from msgspec.structs import replace

from loraplex.engine.errors import GrammarFailed, overflow_message
from loraplex.engine.messages import AdapterRef, EngineRequest, ScoreRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.grammar.constraints import OutputConstraints, Tool
from loraplex.grammar.errors import GrammarRefused
from loraplex.grammar.spec import encode_spec
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.auth.failure_buckets import BURST, FailureBuckets
from loraplex.platform.errors import (
    ContextSizes,
    ContextTooLong,
    EngineFailed,
    InvalidParameter,
    ModelNotFound,
    TooManyFailedChecks,
    UnsupportedParameter,
)
from loraplex.platform.inference.admission import (
    InferenceAdmission,
    PolicyMoved,
    RequestContext,
    RequestSizes,
)
from loraplex.platform.inference.choice_probabilities import ScoredChoices, scored_choices
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.inference.generation import Generation, PromptOutput
from loraplex.platform.inference.in_flight import InFlightRequests
from loraplex.platform.inference.model_resolution import KnownModels, ResolvedModel
from loraplex.platform.inference.prompting.chat_template import LengthCheck
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput
from loraplex.platform.inference.thought import ThoughtRules
from loraplex.platform.inference.truncation import ConversationRequest, fitted
from loraplex.platform.parameters.json_object import size_of
from loraplex.platform.parameters.output_constraints import build_output_constraints
from loraplex.platform.parameters.request_models import (
    COMPLETION_DEFAULT_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    PromptRequest,
    TokenizeRequest,
    messages_of,
    prompts_of,
    tools_of,
)
from loraplex.platform.parameters.request_object import MAX_NAME, UnknownNames
from loraplex.platform.tenant_limiter import AT_ONCE, MAX_WAITING, TenantLimiter
from loraplex.tenants.errors import QuotaExhausted

INLINE_CHARACTERS = 8_192
PART_CHARACTERS = 16
"""What a message or call costs besides its texts, in characters: the template writes around it."""
# Half of the processors: large prompts are encoded before admission, which needs their size.
MAX_ENCODING = max(1, len(os.sched_getaffinity(0)) // 2)


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """A request with checked sizes: `values` with the model's defaults, token ids and sampling of every prompt."""

    values: GenerationBody
    prompts: list[list[int]]
    samplings: list[SamplingParams]
    choices: ScoredChoices | None = None

    @property
    def sizes(self) -> RequestSizes:
        """The most that it may use."""
        return RequestSizes(
            prompt_tokens=_prompt_tokens(self.prompts, self.choices),
            completion_tokens=sum(each.max_tokens * each.n for each in self.samplings),
            sequences=sum(each.n for each in self.samplings),
        )


class InferencePipeline:
    """Starts a `Generation` from checked parameters."""

    def __init__(self, dependencies: GatewayDependencies) -> None:
        self._dependencies = dependencies
        self._planner = dependencies.output_planner()
        self._admission = InferenceAdmission(dependencies.admission_controller, dependencies.background_tasks)
        self._encoding_limiter = TenantLimiter(
            "requests", total=MAX_ENCODING, per_tenant=AT_ONCE, waiting=MAX_WAITING
        )
        self._failed_checks = FailureBuckets()
        self._thought = ThoughtRules(dependencies.prompts, dependencies.token_text)
        self.models = KnownModels(dependencies)
        self._in_flight = InFlightRequests(dependencies.config.max_in_flight)
        dependencies.admission_controller.on_ended = self._in_flight.end

    @property
    def context_tokens(self) -> int:
        """The most tokens of prompt and answer, as the engine bounds a sequence."""
        info = self._dependencies.engine.info()
        # `max_model_len` may be set larger than the KV cache.
        return min(info.max_model_len, info.num_blocks * info.block_size)

    def repeat_refusal(self, context: RequestContext) -> None:
        """Raise what an earlier request of this caller raised, if it certainly still holds. Call it before the body is read."""
        self._admission.repeat_refusal(context)

    async def begin(self, context: RequestContext, values: GenerationBody) -> "Generation":
        """Start a generation and wait for its first event. The caller must `close` it. Raises the error of the request."""
        arrival, tenant_id = time.monotonic(), context.caller.tenant_id
        constraints = build_output_constraints(values, fast_forward=self._dependencies.config.fast_forward)
        if constraints is not None and self._failed_checks.is_empty(tenant_id):
            raise TooManyFailedChecks(
                f"More than {BURST} schemas or grammars of this tenant were refused in a minute; the next one is checked in a second."
            )
        headers = dict(context.headers)
        while True:
            try:
                return await self._begin(context, values, constraints, arrival)
            except PolicyMoved:
                context.headers.clear()
                context.headers.update(headers)
            except (GrammarRefused, EngineFailed) as error:
                if isinstance(error, GrammarRefused) or error.code == GrammarFailed.code:
                    self._failed_checks.take(tenant_id)
                raise

    async def _begin(
        self,
        context: RequestContext,
        values: GenerationBody,
        constraints: OutputConstraints | None,
        arrival: float,
    ) -> "Generation":
        """Start a generation. Raises `PolicyMoved` when another policy of the caller changes the request meanwhile."""
        prompts = len(values.prompt) if isinstance(values, CompletionRequest) else 1
        request = self._in_flight.add(context, prompts * values.n)
        async with request.until_started():
            generation = await self._admit(context, values, constraints, arrival, request.release)
            try:
                await generation.start()
                request.started(generation.stop)
            except BaseException as error:
                await generation.close(request.ended or error, charged=not request.was_shed)
                raise
            finally:
                context.is_recorded = generation.is_recorded
        return generation

    async def _admit(
        self,
        context: RequestContext,
        values: GenerationBody,
        constraints: OutputConstraints | None,
        arrival: float,
        free_slots: Callable[[], None],
    ) -> Generation:
        """Admit the request once its sizes are known; only then build its grammar and submit it to the engine."""
        model = await self._resolve(context, values)
        context.model, context.record.adapter_id = model, model.adapter_id
        context.headers.update(model.headers())
        if context.unknown is not None:
            await self._report(context, model, context.unknown)
        values = values.with_defaults(model.defaults)
        if isinstance(values, ChatRequest) and (values.reasoning_effort or values.thinking_token_budget):
            markers = self._thought.markers(model.reasoning_style)
            self._thought.check(values, markers)
            if self._thought.is_ignored(values, markers):
                context.ignore(context.names.get("reasoning_effort", "reasoning_effort"))
        prompts = await self.prompt_ids(values, model, context.caller.tenant_id)
        choices = self._checked_scores(values, prompts)
        most_tokens = partial(self._most_tokens, context, values, prompts, choices, model)
        most = await most_tokens()
        is_unchanged = partial(self._is_unchanged, context, values, model, most_tokens, most)
        prepared, headers = self._prepared(values, prompts, choices, most), dict(context.headers)
        try:
            pending = await self._admission.admit(context, model, prepared.sizes, is_unchanged)
        except QuotaExhausted:
            # Less than the default is left of a day or a month: then the answer may have what is left.
            left = await most_tokens(unused=True)
            if left == most:
                raise
            context.headers.clear()
            context.headers.update(headers)
            prepared = self._prepared(values, prompts, choices, left)
            pending = await self._admission.admit(context, model, prepared.sizes, is_unchanged)
        try:
            requests, output = await self._engine_requests(context, prepared, model, constraints, arrival)
            generation = Generation(
                self._dependencies,
                free_slots,
                model,
                requests,
                pending,
                arrival,
                output,
                prepared.choices,
                self._prompt_output(values, prompts),
            )
            context.headers.update(generation.headers())
        except BaseException as error:
            await self._admission.cancel(pending, error)
            raise
        return generation

    async def _report(self, context: RequestContext, model: ResolvedModel, unknown: UnknownNames) -> None:
        """Name unknown parameters in the response; raise their refusal, unless tenant or installation have them reported."""
        own = (await self._admission.allowance(context, model, 0, unused=False)).unknown_parameters
        if not self._dependencies.database.limits.reports_unknown(own):
            raise unknown.refusal
        context.ignore(unknown.header())

    async def _resolve(self, context: RequestContext, values: GenerationBody) -> ResolvedModel:
        sticky = values.user or context.request_id
        return await self.models.resolve(context.caller, values.model, sticky)

    async def _is_unchanged(
        self,
        context: RequestContext,
        values: GenerationBody,
        model: ResolvedModel,
        most_tokens: Callable[[], Awaitable[int]],
        most: int,
    ) -> bool:
        """Return whether the request has this model and this maximum under the caller's present policy."""
        try:
            is_same = await self._resolve(context, values) == model
        except ModelNotFound:
            return False
        return is_same and await most_tokens() == most

    async def prompt_ids(
        self, values: PromptRequest, model: ResolvedModel, tenant_id: UUID, *, only_counted: bool = False
    ) -> list[list[int]]:
        """Return the token ids of `messages` or of every `prompt`; `only_counted`: they may be more than the context has.

        Large prompts are counted and encoded on a thread, `AT_ONCE` of a tenant and `MAX_ENCODING` of all at a time. Raises
        `Overloaded` when too many of the tenant's requests wait.
        """
        check = None
        if not only_counted and not isinstance(values, TokenizeRequest):
            check = partial(self._left, values, bound="at least ")
        has_cuts = isinstance(values, ConversationRequest) and bool(values.cuts)
        if not has_cuts and _characters(values, INLINE_CHARACTERS, PART_CHARACTERS) <= INLINE_CHARACTERS:
            return self._encode(values, model, check)
        async with self._encoding_limiter.slot(tenant_id):
            encoding = asyncio.create_task(asyncio.to_thread(self._encode_large, values, model, check))
            try:
                return await asyncio.shield(encoding)
            except asyncio.CancelledError:
                # A thread cannot be stopped: the slot of a client that left is free when the thread ends, also with an error.
                await asyncio.gather(encoding, return_exceptions=True)
                raise

    def _encode_large(
        self, values: PromptRequest, model: ResolvedModel, check: LengthCheck | None
    ) -> list[list[int]]:
        if isinstance(values, ConversationRequest) and values.cuts:
            return fitted(values, partial(self._encode_fitting, model), self._spare_tokens(values))
        limit = self._dependencies.config.max_prompt_characters
        size = _characters(values, limit)
        if size > limit:
            context, name = self._dependencies.engine.info().max_model_len, _prompt_name(values)
            raise ContextTooLong(
                f"This model's maximum context length is {context} tokens. However, you requested {size} "
                f"characters in the {name}, of which at most {limit} are read.",
                name,
                ContextSizes(values.model, context, context + 1, 1),
            )
        return self._encode(values, model, check)

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
        options, style = self._template_options(values, model), self._style(model)
        ids = prompts.chat_ids(values.messages, options, self._prompt_tools(values, style), style, check)
        markers = self._thought.markers(model.reasoning_style)
        if markers is not None and isinstance(values, ChatRequest):
            ids += self._thought.ending(values, markers, ids)
        return [ids]

    def _encode_fitting(
        self, model: ResolvedModel, values: ConversationRequest, spare: int
    ) -> list[list[int]]:
        prompts = self._encode_large(values, model, partial(self._left, values, bound="at least "))
        self._left(values, len(prompts[0]) + spare)
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

    def _style(self, model: ResolvedModel) -> ToolStyle:
        return self._dependencies.prompts.style if model.tool_style is None else ToolStyle(model.tool_style)

    async def _engine_requests(
        self,
        context: RequestContext,
        prepared: "_PreparedRequest",
        model: ResolvedModel,
        constraints: OutputConstraints | None,
        arrival: float,
    ) -> tuple[list[EngineRequest], ConstrainedOutput | None]:
        caller, samplings = context.caller, prepared.samplings
        namespace = self._dependencies.namespace_of(caller.tenant_id)
        adapter = await self._adapter_ref(caller, model, namespace)
        grammar, output, thought = None, None, None
        markers = self._thought.markers(model.reasoning_style)
        if markers is not None and isinstance(prepared.values, ChatRequest):
            [prompt], [sampling] = prepared.prompts, samplings
            thought = self._thought.thought(prepared.values, markers, prompt, sampling.max_tokens)
            if thought is not None and sampling.stop:
                around = ("" if thought.begun else thought.start, thought.end)
                samplings = [replace(sampling, stops_behind=around)]
        if constraints is not None or thought is not None:
            with context.record.timed("schema_check"):
                output = await self._planner.plan(namespace, constraints, self._style(model), thought)
            grammar = None if output.spec is None else encode_spec(output.spec)
            if output.plan.keep_special_tokens or (thought and self._thought.is_special(thought)):
                samplings = [replace(each, skip_special_tokens=False) for each in samplings]
        limits, run = self._dependencies.config, uuid4().hex
        salt = (prepared.values.cache_salt or "").encode()
        first_token_s = limits.first_token_timeout_s
        if first_token_s is not None:
            first_token_s -= time.monotonic() - arrival
        top, choices = prepared.values.scored_alternatives, prepared.choices
        scores = ScoreRequest(prompt_logprobs=top)
        rows = [
            (ids, sampling, None if top is None and sampling.max_tokens else scores)
            for ids, sampling in zip(prepared.prompts, samplings, strict=True)
        ]
        if choices is not None:
            only = SamplingParams(max_tokens=0, n=len(choices.texts))
            rows += [(ids, only, choices.scores) for ids in prepared.prompts]
        requests = [
            EngineRequest(
                request_id=f"{run}-{index}",
                namespace=namespace,
                prompt_token_ids=ids,
                sampling=sampling,
                scores=wanted,
                weight=caller.weight,
                adapter=adapter,
                grammar=grammar if sampling.max_tokens else None,
                cache_salt=salt,
                queue_timeout_s=limits.queue_timeout_s,
                first_token_timeout_s=first_token_s,
                total_timeout_s=context.shortened(limits.total_timeout_s),
            )
            for index, (ids, sampling, wanted) in enumerate(rows)
        ]
        return requests, output

    async def _most_tokens(
        self,
        context: RequestContext,
        values: GenerationBody,
        prompts: list[list[int]],
        choices: ScoredChoices | None,
        model: ResolvedModel,
        *,
        unused: bool = False,
    ) -> int:
        """Return the most tokens per choice: what the request names, else a default, before the context bounds it.

        The version's profile goes before the default of tenant, tier and installation. It is lowered to what the gateway's bounds
        and all limits of the caller admit, so that the same number is generated and reserved. `unused`: only what is left of days
        and months counts.
        """
        if values.requested_tokens is not None:
            return values.requested_tokens
        config = self._dependencies.config
        tokens = _prompt_tokens(prompts, choices)
        allowance = await self._admission.allowance(context, model, tokens, unused=unused)
        wanted = values.max_tokens
        if wanted is None:
            limits = self._dependencies.database.limits
            own = limits.max_tokens(context.caller.tier, allowance.default_max_tokens)
            wanted = COMPLETION_DEFAULT_TOKENS if isinstance(values, CompletionRequest) else own
        bounds = [config.max_completion_tokens, allowance.completion_tokens]
        logprobs = values.sampling_fields()["logprobs"]
        bounds.append(None if logprobs is None else config.max_logprobs // (1 + logprobs))
        fits = min(bound for bound in bounds if bound is not None) // (len(prompts) * values.n)
        return max(1, fits if wanted is None else min(fits, max(wanted, values.min_tokens)))

    def _prepared(
        self, values: GenerationBody, prompts: list[list[int]], choices: ScoredChoices | None, most: int
    ) -> _PreparedRequest:
        """Return the request with the sampling of every prompt, checked against the context length and the vocabulary.

        `most`: tokens per choice.
        """
        name = _prompt_name(values)
        budgets = [self._max_tokens(ids, values, name, most) for ids in prompts]
        fields = values.sampling_fields()
        self._check_product(sum(budgets) * values.n, fields["logprobs"])
        samplings = [SamplingParams(max_tokens=budget, **fields) for budget in budgets]
        for sampling in samplings:
            sampling.validate(self._dependencies.engine.info().vocab_size, scores=True)
        return _PreparedRequest(values, prompts, samplings, choices)

    def _checked_scores(self, values: GenerationBody, prompts: list[list[int]]) -> ScoredChoices | None:
        """Return the choices to score, which must fit behind the longest prompt. Checks how much a response repeats."""
        dependencies, top = self._dependencies, values.scored_alternatives
        copies = int(top is not None)
        if isinstance(values, CompletionRequest) and (values.echo or copies):
            copies = values.n
        entries = sum(map(len, prompts)) * copies * (1 + (top or 0))
        limit = dependencies.config.max_logprobs
        if entries > limit:
            raise InvalidParameter(
                f"prompt tokens x `n` x log-probabilities per token is {entries}, but must be at most {limit}.",
                param=_prompt_name(values),
            )
        ending_ids = dependencies.engine.info().eos_token_ids
        choices = scored_choices(
            values, dependencies.prompts.continuation_ids, dependencies.token_text, ending_ids
        )
        if choices is not None:
            self._left(values, max(map(len, prompts)) + max(map(len, choices.scores.continuations)))
        return choices

    def _prompt_output(self, values: GenerationBody, prompts: list[list[int]]) -> PromptOutput:
        if not isinstance(values, CompletionRequest) or not values.echo:
            return PromptOutput(prompt_logprobs=values.prompt_logprobs)
        text_of = self._dependencies.token_text
        given = zip(values.prompt, prompts, strict=True)
        echo = [each if isinstance(each, str) else text_of.text(ids) for each, ids in given]
        return PromptOutput(echo, values.logprobs, values.prompt_logprobs)

    async def _adapter_ref(self, caller: Caller, model: ResolvedModel, namespace: bytes) -> AdapterRef | None:
        if model.digest is None:
            return None
        path = await self._dependencies.adapter_path(caller.tenant_id, model.digest)
        self._dependencies.recorder.record_adapter(model.digest, model.name)
        return AdapterRef(namespace=namespace, digest=model.digest, blob_path=path)

    def _max_tokens(self, ids: list[int], values: GenerationBody, name: str, most: int) -> int:
        if not ids:
            raise InvalidParameter(f"`{name}` holds no token.", param=name)
        self.check_vocabulary(ids, name)
        return min(most, self._left(values, len(ids)))

    def check_vocabulary(self, ids: Sequence[int], name: str) -> None:
        """Raise `InvalidParameter` for a token id that the model does not have."""
        vocab_size = self._dependencies.engine.info().vocab_size
        if max(ids, default=0) >= vocab_size:
            raise InvalidParameter(f"`{name}` must hold token ids in 0..{vocab_size - 1}.", param=name)

    def _left(self, values: GenerationBody, tokens: int, bound: str = "") -> int:
        """Return what the context leaves next to a prompt of `tokens`. Raises `ContextTooLong` if fewer than requested.

        Beside a `bound` of its tokens the prompt alone is checked: what is left for its answer is told exactly.
        """
        context, requested = self.context_tokens, values.requested_tokens
        requested = 1 if requested is None or bound else requested
        if requested > context - tokens:
            raise ContextTooLong(
                overflow_message(context, tokens, requested, _prompt_name(values), bound),
                _prompt_name(values),
                ContextSizes(values.model, context, tokens, requested),
            )
        return context - tokens

    def _check_product(self, tokens: int, logprobs: int | None) -> None:
        """Check the bounds of tokens and log-probabilities. `logprobs`: alternatives per token, None without any."""
        limit = self._dependencies.config.max_completion_tokens
        if tokens > limit:
            raise InvalidParameter(
                f"prompts x `n` x `max_tokens` is {tokens}, but must be at most {limit}.", param="max_tokens"
            )
        entries = 0 if logprobs is None else tokens * (1 + logprobs)
        if entries > self._dependencies.config.max_logprobs:
            raise InvalidParameter(
                f"prompts x `n` x `max_tokens` x log-probabilities per token is {entries}, "
                f"but must be at most {self._dependencies.config.max_logprobs}.",
                param="max_tokens",
            )


def _prompt_tokens(prompts: list[list[int]], choices: ScoredChoices | None) -> int:
    """Return the tokens of all prompts, and of the choices that are scored behind each."""
    return sum(map(len, prompts)) + (0 if choices is None else choices.num_tokens * len(prompts))


def _prompt_name(values: PromptRequest) -> str:
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
