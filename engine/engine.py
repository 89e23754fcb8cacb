"""`Engine`: scheduler, adapter pool and runner, driven one step at a time by one thread. Deterministic, does no I/O."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from loraplex.engine.adapter_probe.numeric_check import NumericCheck
from loraplex.engine.adapter_probe.reference import error_bound
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import NO_TOKEN, PlannedRow, StepOutput, StepPlan
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import (
    EngineError,
    GrammarFailed,
    NamespaceForgotten,
    NonFiniteLogits,
    UnsupportedFeature,
)
from loraplex.engine.kv_cache.block_pool import BlockPool
from loraplex.engine.kv_cache.prefix_cache import PrefixCache
from loraplex.engine.kv_cache.tensors import block_bytes
from loraplex.engine.lora.loader import AdapterSource
from loraplex.engine.lora.page_geometry import MAX_ADAPTER_SLOTS
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.lora.pool_factory import open_pool
from loraplex.engine.messages import EngineInfo, EngineRequest, EngineStats, FinishReason
from loraplex.engine.model_loading import LoadedModel
from loraplex.engine.runner.step_isolation import IsolatedStep, StepIsolation
from loraplex.engine.runner_loading import load_runner, max_tokens
from loraplex.engine.scheduling.fairness import FairShare
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.scheduling.step_bytes import StepBytes
from loraplex.engine.scheduling.step_statistics import StepStatistics
from loraplex.engine.scheduling.stop_conditions import received_reason
from loraplex.engine.step_watch import StepWatch
from loraplex.engine.structured_output.bitmask_filling import BitmaskFiller
from loraplex.engine.structured_output.grammar_compilation import GrammarCompilation, GrammarJob
from loraplex.engine.token_mask import TokenMask, TokenMaskFactory


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step. `ran` false: nothing could run."""

    outputs: list[StepOutput]
    failures: list[tuple[Sequence, EngineError]]
    ran: bool


class Engine:
    """Runs steps. All calls come from one thread."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        source: AdapterSource,
        *,
        mask_factory: TokenMaskFactory | None = None,
        policy: FairShare | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`mask_factory` None: requests with a grammar are refused. Side threads may run on the caller's cores."""
        self.model = model
        self._clock = clock
        self._cache = config.cache
        self._block_pool = BlockPool(model.num_blocks)
        self.adapters = _open_adapters(model, config, source, clock)
        self.scheduler = Scheduler(
            config.scheduler,
            _prefix_cache(model, config, self._block_pool),
            self.adapters,
            policy or FairShare(),
            clock,
            model.max_model_len,
            model.config.eos_token_ids,
            max_tokens=max_tokens(model, config),
            vocab_size=model.config.vocab_size,
            score_cost=model.config.score_cost,
        )
        self.numeric_check = NumericCheck(
            model.decoder.sites,
            self.adapters,
            source,
            dtype=model.dtype,
            device=model.device,
            bound=error_bound(model.dtype, config.lora),
            deterministic=config.deterministic,
            clock=clock,
        )
        self._masks = BitmaskFiller(
            model.config.vocab_size, config.grammar.mask_timeout_s, free_cores=free_cores(model.device)
        )
        self._compilation = (
            None if mask_factory is None else GrammarCompilation(mask_factory, config.grammar.compile_threads)
        )
        self._uncompiled: dict[int, list[Sequence]] = {}
        self.runner = load_runner(model, config, self.adapters, self._masks)
        if self.adapters.max_bytes:
            self.numeric_check.warm_up()
        self._overlaps = overlaps(config.scheduler.overlap, model.device)
        self._isolation = StepIsolation(self.runner, self.scheduler.sampling_rows)
        self._in_flight: IsolatedStep | None = None
        self._ended: list[StepOutput] = []
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._corrupted = self._aborted = 0
        self.step_watch = StepWatch(config.step_warning_s, clock)
        self._steps = StepStatistics(clock, self.scheduler.unstarted_by_namespace)
        self._bytes = StepBytes(
            model.streamed_bytes, block_bytes(model.config, 1, model.kv_dtype), self.adapters.size_bytes
        )

    def info(self) -> EngineInfo:
        """Facts of the served model, with the pool of this engine."""
        return msgspec.structs.replace(
            self.model.info,
            num_blocks=self.model.num_blocks,
            block_size=self._cache.block_size,
            prefix_caching=self._cache.prefix_caching,
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether work is left, including a launched step whose rows have all ended."""
        return self.scheduler.has_unfinished or self.is_ahead

    @property
    def is_ahead(self) -> bool:
        """Whether a launched step is not completed yet."""
        return self._in_flight is not None

    def add(self, request: EngineRequest) -> list[Sequence]:
        """Queue a request and return its choices. Raises `InvalidRequest` or `EngineOverloaded`."""
        if request.grammar is None:
            sequences = self.scheduler.add(request)
            self._end_received(sequences)
            return sequences
        if self._compilation is None:
            raise UnsupportedFeature("grammar", "this engine decodes without grammars")
        sequences = self.scheduler.add(request)
        ticket = _ticket(sequences[0])
        self._uncompiled[ticket] = sequences
        responses = [self._masked_tokens(request.received.get(each.choice, [])) for each in sequences]
        before = self._compilation.start(GrammarJob(ticket, request.namespace, request.grammar, responses))
        sequences[0].note(grammars_before=before)
        return sequences

    def abort(self, request_id: str) -> list[Sequence]:
        """End a request at any stage and return the choices that had not ended. Idempotent."""
        ended = self.scheduler.abort(request_id)
        self._aborted += bool(ended)
        for sequence in ended:
            self._forget(sequence)
        return ended

    def forget(self, namespace: bytes) -> None:
        """Fail a tenant's requests and drop its cached blocks and the adapters that no row uses."""
        for sequence in self.scheduler.of_namespace(namespace):
            self.scheduler.fail(sequence, NamespaceForgotten("the tenant of this request was deleted"))
        self.scheduler.cache.forget_namespace(namespace)
        self.adapters.forget(namespace)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one choice from outside."""
        self.scheduler.finish(sequence, reason)
        self.runner.forget(sequence)

    def step(self) -> StepResult:
        """Install loaded adapters and masks, plan and launch a step, and complete the step whose results are due.

        That is the same step or, with overlap, the previous one: the device computes while the host processes results. An
        exception of the computation fails its rows. Raises it if the engine cannot go on, and exceptions of the scheduling.
        """
        self.step_watch.begin()
        self.adapters.poll()
        self._take_masks()
        began = self._clock()
        plan = self.scheduler.schedule()
        before, self._in_flight = self._in_flight, None
        # With no step in flight every token is known, and no result can change which rows are sampled.
        rows = None if plan is None or before is not None else self.scheduler.sampling_rows(plan)
        launched = None if plan is None else self._launch(plan, rows)
        outputs, self._ended = self._ended, []
        outputs += [] if before is None else self._complete_step(before)
        if launched is not None:
            if before is not None and before.has_failed:
                launched.follow(before)
            late = launched.sample(self.scheduler.sampling_rows(launched.plan) if rows is None else rows)
            if not launched.has_failed:
                self.scheduler.expect(launched.plan, launched.sampled_sequences, late)
            if self._overlaps and not launched.has_failed:
                self._in_flight = launched
            else:
                outputs += self._complete_step(launched)
        ran = before is not None or launched is not None
        self.numeric_check.advance()
        failures = self._failures()
        self._steps.seconds += ran * (self._clock() - began)
        self.step_watch.end()
        return StepResult(outputs, failures, ran)

    def stats(self) -> EngineStats:
        """Return a snapshot of all counters and gauges."""
        scheduler, adapters, blocks = self.scheduler, self.adapters, self._block_pool
        return EngineStats(
            running=scheduler.num_running,
            max_running=scheduler.config.max_num_seqs,
            waiting=scheduler.num_waiting,
            waiting_for_adapter=scheduler.num_waiting_for_adapter,
            free_blocks=blocks.num_free,
            cached_blocks=blocks.num_cached,
            referenced_blocks=blocks.num_referenced,
            total_blocks=blocks.total,
            resident_adapters=adapters.resident_digests,
            device_adapters=adapters.device_keys,
            host_adapters=adapters.host.keys,
            pinned_adapters=adapters.num_pinned,
            quarantined_adapters=adapters.quarantined,
            adapter_bytes=adapters.resident_bytes,
            adapter_budget_bytes=adapters.max_bytes,
            adapter_waste_bytes=adapters.memory.waste_bytes,
            adapter_host_bytes=adapters.host.nbytes,
            adapter_host_budget_bytes=adapters.host.max_bytes,
            adapter_host_hits=adapters.host.num_hits,
            adapter_read_rate=adapters.budget.source.bytes_per_second,
            adapter_copy_rate=adapters.budget.device.bytes_per_second,
            adapter_page_error=adapters.worst_page_error,
            adapter_loads=adapters.num_loads,
            adapter_load_failures=adapters.num_load_failures,
            adapter_evictions=adapters.num_evictions,
            running_adapters=scheduler.running_adapters,
            waiting_adapters=scheduler.waiting_adapters,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_tokens,
            generation_tokens=self._generated_tokens,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            preemptions=scheduler.num_preemptions,
            corrupted_requests=self._corrupted,
            admission_rejections=scheduler.num_rejections,
            aborted_requests=self._aborted,
            steps=self._steps.num_steps,
            step_tokens=self._steps.num_tokens,
            step_tokens_histogram=list(self._steps.histogram),
            step_seconds=self._steps.seconds,
            step_weight_bytes=self._bytes.weights,
            step_kv_bytes=self._bytes.kv,
            step_adapter_bytes=self._bytes.adapters,
            memory_rate=self.model.memory_rate,
            tenant_steps=self._steps.tenants(),
            step_adapters=self._steps.adapters(),
            waiting_for_grammar=scheduler.num_waiting_for_grammar,
            mask_seconds=self._masks.seconds,
            late_masks=self._masks.num_late,
            forced_tokens=scheduler.num_forced_tokens,
            **self._compilation_stats(),
        )

    def close(self) -> None:
        """Stop the side threads."""
        self.numeric_check.close()
        self.adapters.close()
        self._masks.close()
        if self._compilation is not None:
            self._compilation.close()

    def _launch(self, plan: StepPlan, rows: list[PlannedRow] | None) -> IsolatedStep:
        """Launch a plan. `rows` are the rows to sample; None while a step in flight may still end some of them."""
        self._steps.count(plan)
        self._bytes.count(plan)
        self.step_watch.launch(plan)
        return self._isolation.launch(plan, rows)

    def _complete_step(self, handle: IsolatedStep) -> list[StepOutput]:
        outputs = self.scheduler.complete(handle.plan, handle.collect())
        for output in outputs:
            self._count(output)
        return outputs

    def _take_masks(self) -> None:
        """Give compiled grammars to their rows, and let rows with a late mask continue once it has arrived."""
        if self._uncompiled and self._compilation is not None:
            for ticket, outcome, seconds in self._compilation.take():
                sequences = self._uncompiled.pop(ticket)
                sequences[0].note(compile_s=seconds)
                self._begin(sequences, outcome)
        if self._masks.has_late:
            for sequence in self._masks.poll():
                sequence.awaits_mask = False

    def _begin(self, sequences: list[Sequence], outcome: list[TokenMask] | GrammarFailed) -> None:
        """Start the masks of a request: all choices share one compilation, each with its own state."""
        if isinstance(outcome, GrammarFailed):
            self._fail(sequences, outcome)
            return
        for sequence, mask in zip(sequences, outcome, strict=True):
            sequence.token_mask = mask
        try:
            self._end_received(sequences)
        except BaseException as error:  # noqa: BLE001 - reported; extension modules panic with no `Exception`
            self._fail(sequences, GrammarFailed.of(error))

    def _masked_tokens(self, received: list[int]) -> list[int]:
        """Return the tokens that a mask is behind: an end token is none of its document."""
        ends = bool(received) and received[-1] in self.model.config.eos_token_ids
        return received[:-1] if ends else received

    def _end_received(self, sequences: list[Sequence]) -> None:
        """End those whose last token has been sent by the engine that began them, and their end has not."""
        if not sequences[0].request.received:
            return
        eos_token_ids = frozenset(self.model.config.eos_token_ids)
        for sequence in sequences:
            reason = received_reason(sequence, eos_token_ids, self.model.max_model_len)
            if reason is not None:
                self.scheduler.finish(sequence, reason)
                self._ended.append(StepOutput(sequence, NO_TOKEN, None, reason, first=True))

    def _fail(self, choices: list[Sequence], error: EngineError) -> None:
        for sequence in choices:
            self.scheduler.fail(sequence, error)

    def _forget(self, sequence: Sequence) -> None:
        """Drop the grammar and sampler state of a sequence that has ended, before its first token or later."""
        self.runner.forget(sequence)
        if self._compilation is not None and self._uncompiled.pop(_ticket(sequence), None) is not None:
            self._compilation.drop(_ticket(sequence))

    def _compilation_stats(self) -> dict[str, Any]:
        compilation = self._compilation
        if compilation is None:
            return {}
        return {
            "grammar_compilations": compilation.num_compilations,
            "grammar_compile_seconds": compilation.seconds,
            "grammar_failures": compilation.num_failures,
        }

    def _count(self, output: StepOutput) -> None:
        sequence = output.sequence
        self._generated_tokens += output.token_id != NO_TOKEN
        if output.first and not sequence.leads:
            self._prompt_tokens += sequence.num_continuation_tokens
        elif output.first:
            self._prompt_tokens += sequence.num_prompt_tokens
            self._cached_tokens += sequence.num_cached_tokens
        if output.finish_reason is not None:
            self.runner.forget(sequence)

    def _failures(self) -> list[tuple[Sequence, EngineError]]:
        failures = self.scheduler.take_failures()
        for sequence, error in failures:
            self._forget(sequence)
            if isinstance(error, NonFiniteLogits):
                self._corrupted += 1
                if sequence.adapter is not None:
                    self.adapters.report_non_finite(sequence.adapter)
        return failures


def _ticket(sequence: Sequence) -> int:
    """Return a number that identifies the request of a sequence; all its choices share it, and it is never reused."""
    return sequence.order - sequence.choice


def free_cores(device: torch.device) -> int:
    """Return the cores beside those that compute steps: torch's threads, or next to a GPU the threads of steps and of text."""
    return len(os.sched_getaffinity(0)) - (torch.get_num_threads() if device.type == "cpu" else 2)


def overlaps(setting: str, device: torch.device) -> bool:
    """Whether steps are prepared ahead. On a CPU that would take cores from the step that computes."""
    if setting not in ("auto", "on", "off"):
        raise ValueError(f"`overlap` must be auto, on or off, got {setting!r}")
    return setting == "on" or (setting == "auto" and device.type != "cpu")


def _open_adapters(
    model: LoadedModel, config: EngineConfig, source: AdapterSource, clock: Callable[[], float]
) -> AdapterPool:
    max_bytes = config.lora.max_bytes
    return open_pool(
        model.decoder.sites,
        source,
        config.lora,
        max_bytes=model.memory.adapter_budget if max_bytes is None else max_bytes,
        max_slots=MAX_ADAPTER_SLOTS,
        dtype=model.dtype,
        device=model.device,
        clock=clock,
    )


def _prefix_cache(model: LoadedModel, config: EngineConfig, pool: BlockPool) -> PrefixCache:
    return PrefixCache(
        pool,
        config.cache.block_size,
        model_digest=model.digest,
        cache_dtype=str(model.kv_dtype),
        enabled=config.cache.prefix_caching,
        prompts_only=config.deterministic,
    )
