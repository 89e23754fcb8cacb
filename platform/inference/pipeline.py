"""Processes one inference request: resolve the model, check the sizes, render the prompt, admit, submit.

Invariant: the model is resolved, every size checked and the request provisionally admitted before it is sent to the engine.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from secrets import randbits
from typing import Final, TypeAlias
from uuid import uuid4

from msgspec.structs import replace

from loraplex.engine.errors import GrammarFailed
from loraplex.engine.messages import AdapterRef, EngineRequest, ScoreRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.grammar.constraints import OutputConstraints
from loraplex.grammar.errors import GrammarRefused
from loraplex.grammar.spec import encode_spec
from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.auth.failure_buckets import BURST, FailureBuckets
from loraplex.platform.errors import (
    EngineFailed,
    InvalidParameter,
    ModelNotFound,
    TooManyFailedChecks,
)
from loraplex.platform.inference.admission import (
    InferenceAdmission,
    PolicyMoved,
    RequestContext,
    RequestSizes,
)
from loraplex.platform.inference.choice_probabilities import ScoredChoices, scored_choices
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.inference.generation import Generation, PromptOutput, RowsBehind
from loraplex.platform.inference.in_flight import InFlightRequests
from loraplex.platform.inference.model_resolution import KnownModels, ResolvedModel
from loraplex.platform.inference.prompt_encoding import PromptEncoder, prompt_name
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput
from loraplex.platform.inference.thought import ThoughtRules
from loraplex.platform.parameters.output_constraints import build_output_constraints
from loraplex.platform.parameters.request_models import (
    COMPLETION_DEFAULT_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerationBody,
)
from loraplex.platform.parameters.request_object import UnknownNames
from loraplex.tenants.errors import QuotaExhausted

SEED_BITS: Final = 63
Admit: TypeAlias = Callable[[Callable[[], None]], Awaitable["Generation"]]
"""What frees the places of a request -> its generation, once it is admitted. Raises `PolicyMoved`."""


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """A request with checked sizes: `values` with the model's defaults, token ids and sampling of every prompt."""

    values: GenerationBody
    prompts: list[list[int]]
    samplings: list[SamplingParams]
    choices: ScoredChoices | None = None

    def behind(self, choices: ScoredChoices) -> RowsBehind:
        """The rows of `choices` behind each prompt."""
        num = len(self.prompts)
        lengths = [*map(len, self.prompts), *[choices.num_tokens] * num]
        after = {num + prompt: prompt for prompt in range(num)}
        return RowsBehind(after=after, sequences=num * len(choices.texts), lengths=lengths)

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
        self.admission = InferenceAdmission(dependencies.admission_controller, dependencies.background_tasks)
        self._failed_checks = FailureBuckets()
        self._thought = ThoughtRules(dependencies.prompts, dependencies.token_text)
        self.encoder = PromptEncoder(dependencies, self._thought)
        self.models = KnownModels(dependencies)
        self._in_flight = InFlightRequests(dependencies.config.max_in_flight)
        dependencies.admission_controller.on_ended = self._in_flight.end

    def repeat_refusal(self, context: RequestContext) -> None:
        """Raise what an earlier request of this caller raised, if it certainly still holds. Call it before the body is read."""
        self.admission.repeat_refusal(context)

    async def begin(self, context: RequestContext, values: GenerationBody) -> "Generation":
        """Start a generation and wait for its first event. The caller must `close` it. Raises the error of the request."""
        arrival, tenant_id = time.monotonic(), context.caller.tenant_id
        constraints = build_output_constraints(values, fast_forward=self._dependencies.config.fast_forward)
        if constraints is not None and self._failed_checks.is_empty(tenant_id):
            raise TooManyFailedChecks(
                f"More than {BURST} schemas or grammars of this tenant were refused in a minute; the next one is checked in a second."
            )
        prompts = len(values.prompt) if isinstance(values, CompletionRequest) else 1
        admit = partial(self._admit, context, values, constraints, arrival)
        try:
            return await self.begin_admitted(context, prompts * values.n, admit)
        except (GrammarRefused, EngineFailed) as error:
            if isinstance(error, GrammarRefused) or error.code == GrammarFailed.code:
                self._failed_checks.take(tenant_id)
            raise

    async def begin_admitted(self, context: RequestContext, sequences: int, admit: Admit) -> "Generation":
        """Start what `admit` admits, and wait for its first event. `sequences`: its places among those in progress.

        It is admitted again where another policy of the caller changes the request meanwhile.
        """
        headers = dict(context.headers)
        while True:
            request = self._in_flight.add(context, sequences)
            try:
                async with request.until_started():
                    generation = await admit(request.release)
                    try:
                        await generation.start()
                        request.started(generation.stop)
                    except BaseException as error:
                        await generation.close(request.ended or error, charged=not request.was_shed)
                        raise
                    finally:
                        context.is_recorded = generation.is_recorded
                return generation
            except PolicyMoved:
                context.headers.clear()
                context.headers.update(headers)

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
        context.model = model
        context.record.adapter_id, context.record.adapter_version = model.adapter_id, model.version
        context.headers.update(model.headers())
        if context.unknown is not None:
            await self.report(context, model, context.unknown)
        values = values.with_defaults(model.defaults)
        if isinstance(values, ChatRequest) and (values.reasoning_effort or values.thinking_token_budget):
            markers = self._thought.markers(model.reasoning_style)
            self._thought.check(values, markers)
            if self._thought.is_ignored(values, markers):
                context.ignore(context.names.get("reasoning_effort", "reasoning_effort"))
        prompts = await self.encoder.encode(values, model, context.caller.tenant_id)
        choices = self._checked_scores(values, prompts)
        most_tokens = partial(self._most_tokens, context, values, prompts, choices, model)
        most = await most_tokens()
        is_unchanged = partial(self._is_unchanged, context, values, model, most_tokens, most)
        prepared, headers = self._prepared(values, prompts, choices, most), dict(context.headers)
        try:
            pending = await self.admission.admit(context, model, prepared.sizes, is_unchanged)
        except QuotaExhausted:
            # Less than the default is left of a day or a month: then the answer may have what is left.
            left = await most_tokens(unused=True)
            if left == most:
                raise
            context.headers.clear()
            context.headers.update(headers)
            prepared = self._prepared(values, prompts, choices, left)
            pending = await self.admission.admit(context, model, prepared.sizes, is_unchanged)
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
                RowsBehind() if prepared.choices is None else prepared.behind(prepared.choices),
            )
            context.headers.update(generation.headers())
        except BaseException as error:
            await self.admission.cancel(pending, error)
            raise
        return generation

    async def report(self, context: RequestContext, model: ResolvedModel, unknown: UnknownNames) -> None:
        """Name unknown parameters in the response; raise their refusal, unless tenant or installation have them reported."""
        own = (await self.admission.allowance(context, model, 0, unused=False)).unknown_parameters
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
        with context.record.timed("adapter_fetch"):
            adapter = await self.adapter_ref(caller, model, namespace)
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
                output = await self._planner.plan(namespace, constraints, self.encoder.style(model), thought)
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
        allowance = await self.admission.allowance(context, model, tokens, unused=unused)
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
        name = prompt_name(values)
        budgets = [self._max_tokens(ids, values, name, most) for ids in prompts]
        fields = values.sampling_fields()
        self._check_product(sum(budgets) * values.n, fields["logprobs"])
        samplings = [SamplingParams(max_tokens=budget, **fields) for budget in budgets]
        if fields["seed"] is None:
            # The gateway draws it, since the engine that goes on where one is lost has to draw the same tokens.
            samplings = [replace(each, seed=randbits(SEED_BITS)) for each in samplings]
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
                param=prompt_name(values),
            )
        ending_ids = dependencies.engine.info().eos_token_ids
        choices = scored_choices(
            values, dependencies.prompts.continuation_ids, dependencies.token_text, ending_ids
        )
        if choices is not None:
            self.encoder.left(values, max(map(len, prompts)) + max(map(len, choices.scores.continuations)))
        return choices

    def _prompt_output(self, values: GenerationBody, prompts: list[list[int]]) -> PromptOutput:
        if not isinstance(values, CompletionRequest) or not values.echo:
            return PromptOutput(prompt_logprobs=values.prompt_logprobs)
        text_of = self._dependencies.token_text
        given = zip(values.prompt, prompts, strict=True)
        echo = [each if isinstance(each, str) else text_of.text(ids) for each, ids in given]
        return PromptOutput(echo, values.logprobs, values.prompt_logprobs)

    async def adapter_ref(self, caller: Caller, model: ResolvedModel, namespace: bytes) -> AdapterRef | None:
        """Return what the engine calls the adapter of a model, whose files are fetched first. None for the base model."""
        if model.digest is None:
            return None
        path = await self._dependencies.adapter_path(caller.tenant_id, model.digest)
        self._dependencies.recorder.record_adapter(model.digest, model.name)
        return AdapterRef(namespace=namespace, digest=model.digest, blob_path=path)

    def _max_tokens(self, ids: list[int], values: GenerationBody, name: str, most: int) -> int:
        if not ids:
            raise InvalidParameter(f"`{name}` holds no token.", param=name)
        self.encoder.check_vocabulary(ids, name)
        return min(most, self.encoder.left(values, len(ids)))

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
