"""The way of one inference request, without any web framework: resolve once, check, render, admit, submit.

Invariant: the model name is resolved, every size checked and the request let in before the engine hears of it.
"""

import asyncio
import time
from dataclasses import dataclass
from uuid import UUID, uuid4

from msgspec.structs import replace

from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.grammar.constraints import OutputConstraints, Tool
from loraplex.grammar.spec import encode_spec
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.errors import ContextTooLong, InvalidParameter, UnsupportedParameter
from loraplex.platform.inference.admission import InferenceAdmission, RequestContext
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.model_resolution import ResolvedModel, resolve_model
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput
from loraplex.platform.inference.structured_output.output_planner import OutputPlanner
from loraplex.platform.parameters.json_object import size_of
from loraplex.platform.parameters.output_constraints import build_output_constraints
from loraplex.platform.parameters.parameter_table import Endpoint, Values, sampling_fields
from loraplex.platform.parameters.value_types import Prompt
from loraplex.platform.tenant_limiter import InFlightLimiter, WaitingTenantLimiter

INLINE_CHARACTERS = 8_192


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """A request whose sizes are checked: `values` with the model's defaults, token ids and sampling of every prompt."""

    values: Values
    prompts: list[list[int]]
    samplings: list[SamplingParams]


class InferencePipeline:
    """Turns checked parameters into a running `Generation`."""

    def __init__(self, dependencies: GatewayDependencies) -> None:
        self._dependencies = dependencies
        self._planner = OutputPlanner(
            dependencies.config.grammar,
            dependencies.prompts.special_tokens,
            dependencies.request_analysis,
            dependencies.compile_checks,
            dependencies.value_validation,
        )
        self._admission = InferenceAdmission(dependencies.admission_controller, dependencies.background_tasks)
        self._encoding_limiter = WaitingTenantLimiter()
        self.in_flight = InFlightLimiter(dependencies.config.max_in_flight)

    async def begin(self, call: RequestContext, endpoint: Endpoint, values: Values) -> "Generation":
        """A generation whose first event has arrived. The owner must `close` it. Raises what the request deserves."""
        arrival = time.monotonic()
        constraints = build_output_constraints(values, fast_forward=self._dependencies.fast_forward)
        prompts = len(values["prompt"]) if endpoint == "completions" else 1
        self.in_flight.enter(prompts)
        try:
            generation = await self._admit(call, endpoint, values, constraints, arrival)
        except BaseException:
            self.in_flight.leave(prompts)
            raise
        try:
            await generation.start()
        except BaseException as error:
            await generation.close(error)
            raise
        return generation

    async def _admit(
        self,
        call: RequestContext,
        endpoint: Endpoint,
        values: Values,
        constraints: OutputConstraints | None,
        arrival: float,
    ) -> Generation:
        """Let in once its sizes are known: while the counters refuse it, nothing is composed and no engine hears of it."""
        sticky = values["user"] or call.request_id
        model = await resolve_model(self._dependencies, call.caller, values["model"], sticky)
        call.headers.update(model.headers())
        values = values.with_defaults(model.defaults)
        prompts = await self.prompt_ids(values, model, call.caller.tenant_id)
        samplings = self._samplings(endpoint, values, prompts)
        completion_tokens = sum(each.max_tokens * each.n for each in samplings)
        pending = await self._admission.admit(call, model, sum(map(len, prompts)), completion_tokens)
        async with self._admission.cancelled_on_error(pending):
            prepared = _PreparedRequest(values, prompts, samplings)
            requests, output = await self._engine_requests(call.caller, prepared, model, constraints)
            generation = Generation(
                self._dependencies, self.in_flight, model, requests, pending, arrival, output
            )
            call.headers.update(generation.headers())
            return generation

    async def prompt_ids(self, values: Values, model: ResolvedModel, tenant_id: UUID) -> list[list[int]]:
        """Ids of `messages` or of every `prompt`; large ones are counted and encoded on a thread, a few of a tenant at once.

        Raises `Overloaded` when too many of them wait.
        """
        if _characters(values, INLINE_CHARACTERS) <= INLINE_CHARACTERS:
            return self._encode(values, model)
        async with self._encoding_limiter.taken(tenant_id):
            return await asyncio.to_thread(self._encode_large, values, model)

    def _encode_large(self, values: Values, model: ResolvedModel) -> list[list[int]]:
        limit = self._dependencies.config.max_prompt_characters
        size = _characters(values, limit)
        if size > limit:
            raise ContextTooLong(
                f"The prompt has {size} characters; at most {limit} are read.", _prompt_name(values)
            )
        return self._encode(values, model)

    def _encode(self, values: Values, model: ResolvedModel) -> list[list[int]]:
        prompts = self._dependencies.prompts
        if values.get("messages") is None:
            return [prompts.text_ids(each) if isinstance(each, str) else each for each in values["prompt"]]
        effort = values.get("reasoning_effort")
        if effort is not None and not prompts.knows("reasoning_effort"):
            message = "`reasoning_effort` is not supported: the model's chat template does not know it."
            raise UnsupportedParameter(message, param="reasoning_effort")
        options = {} if effort is None else {"reasoning_effort": effort}
        style = self._style(model)
        return [prompts.chat_ids(values["messages"], options, self._prompt_tools(values, style), style)]

    def _prompt_tools(self, values: Values, style: ToolStyle) -> tuple[Tool, ...]:
        """All tools, whichever of them may be called, so that the prompt's prefix stays the same.

        Our own text teaches how to call, so it is left out when no call may be written.
        """
        choice = values.get("tool_choice")
        forbidden = choice is not None and choice.mode == "none"
        return () if forbidden and self._dependencies.prompts.writes_tools_as_text(style) else values["tools"]

    def _style(self, model: ResolvedModel) -> ToolStyle:
        return self._dependencies.prompts.style if model.tool_style is None else ToolStyle(model.tool_style)

    async def _engine_requests(
        self,
        caller: Caller,
        prepared: "_PreparedRequest",
        model: ResolvedModel,
        constraints: OutputConstraints | None,
    ) -> tuple[list[EngineRequest], ConstrainedOutput | None]:
        samplings = prepared.samplings
        namespace = self._dependencies.namespace_of(caller.tenant_id)
        adapter = await self._adapter_ref(caller, model, namespace)
        grammar, output = None, None
        if constraints is not None:
            output = await self._planner.plan(namespace, constraints, self._style(model))
            spec = output.plan.spec
            grammar = None if spec is None else encode_spec(spec)
            if output.plan.keep_special_tokens:
                samplings = [replace(each, skip_special_tokens=False) for each in samplings]
        limits, salt, run = (
            self._dependencies.config,
            (prepared.values["cache_salt"] or "").encode(),
            uuid4().hex,
        )
        requests = [
            EngineRequest(
                request_id=f"{run}-{index}",
                namespace=namespace,
                prompt_token_ids=ids,
                sampling=sampling,
                weight=caller.weight,
                adapter=adapter,
                grammar=grammar,
                cache_salt=salt,
                queue_timeout_s=limits.queue_timeout_s,
                total_timeout_s=limits.total_timeout_s,
            )
            for index, (ids, sampling) in enumerate(zip(prepared.prompts, samplings, strict=True))
        ]
        return requests, output

    def _samplings(
        self, endpoint: Endpoint, values: Values, prompts: list[list[int]]
    ) -> list[SamplingParams]:
        """Of every prompt, checked against the context and the vocabulary."""
        name = _prompt_name(values)
        budgets = [self._max_tokens(ids, values, name) for ids in prompts]
        fields = sampling_fields(endpoint, values)
        self._check_product(sum(budgets) * values["n"], fields["logprobs"])
        samplings = [SamplingParams(max_tokens=budget, **fields) for budget in budgets]
        for sampling in samplings:
            sampling.validate(self._dependencies.engine.info().vocab_size)
        return samplings

    async def _adapter_ref(self, caller: Caller, model: ResolvedModel, namespace: bytes) -> AdapterRef | None:
        if model.digest is None:
            return None
        path = await self._dependencies.adapter_path(caller.tenant_id, model.digest)
        return AdapterRef(namespace=namespace, digest=model.digest, blob_path=path)

    def _max_tokens(self, ids: list[int], values: Values, name: str) -> int:
        info = self._dependencies.engine.info()
        if not ids:
            raise InvalidParameter(f"`{name}` holds no token.", param=name)
        if max(ids) >= info.vocab_size:
            raise InvalidParameter(f"`{name}` must hold token ids in 0..{info.vocab_size - 1}.", param=name)
        left = info.max_model_len - len(ids)
        requested = _requested_tokens(values)
        if left < 1 or (requested or 1) > left:
            raise ContextTooLong(
                f"The context holds {info.max_model_len} tokens; the prompt has {len(ids)} and {requested or 1} more were asked.",
                name,
            )
        return requested or min(values["max_tokens"] or self._dependencies.config.default_max_tokens, left)

    def _check_product(self, tokens: int, logprobs: int | None) -> None:
        """`logprobs` alternatives are told per token; None means that no log-probabilities are."""
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


def _requested_tokens(values: Values) -> int | None:
    """What the request itself asked for; a profile's `max_tokens` is a default."""
    older = values["max_tokens"] if "max_tokens" in values.given else None
    return older or values.get("max_completion_tokens")


def _prompt_name(values: Values) -> str:
    return "messages" if values.get("messages") is not None else "prompt"


def _characters(values: Values, limit: int) -> int:
    if values.get("messages") is None:
        return sum(map(_length, values["prompt"]))
    tools = [(tool.description, tool.parameters) for tool in values["tools"]]
    calls = (len(call.arguments) for message in values["messages"] for call in message.tool_calls)
    return sum(len(message.content) for message in values["messages"]) + sum(calls) + size_of(tools, limit)


def _length(prompt: Prompt) -> int:
    return len(prompt)
