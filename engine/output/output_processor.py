"""`OutputProcessor`: sampled tokens -> events for the gateway. Torch-free and synchronous; runs on the output thread.

Invariant: per request one `Started`, then deltas that together contain every token id once, then one `Finished` per choice
or one `Failed`; after that the request is unknown and later tokens for it are ignored.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from loraplex.engine.batch.step_plan import NO_TOKEN, StepOutput
from loraplex.engine.errors import EngineError
from loraplex.engine.messages import (
    EngineRequest,
    Event,
    Failed,
    Scored,
    Started,
)
from loraplex.engine.output.choice_output import ChoiceOutput
from loraplex.engine.output.detokenizer import Detokenizer, TextDecoder, TokenTexts
from loraplex.engine.output.stop_strings import StopMatcher, StopStrings, ThoughtPassage
from loraplex.engine.sampling_params import SamplingParams

_logger = logging.getLogger(__name__)

ChoiceKey: TypeAlias = tuple[str, int]
"""(request_id, choice)"""


class ProcessedOutputs(NamedTuple):
    """The events. `stopped`: choices that ended here while the engine still runs them, so that it must end them."""

    events: list[Event]
    stopped: list[ChoiceKey]


@dataclass(slots=True)
class _Request:
    request: EngineRequest
    choices: dict[int, ChoiceOutput]
    cached_tokens: dict[int, int] = field(default_factory=dict)


class OutputProcessor:
    """Detokenizes, cuts at stop strings and counts. `eos_token_ids` end a choice without being part of its text.

    `system_fingerprint` is sent with the first event of each request.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        eos_token_ids: Collection[int] = (),
        system_fingerprint: str | None = None,
    ) -> None:
        self._system_fingerprint = system_fingerprint
        self._texts = TokenTexts(decoder)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def start(self, request: EngineRequest) -> ProcessedOutputs:
        """Register a request. What it received may have ended a choice. Raises `ValueError` if its id is already running."""
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is already running")
        sampling = request.sampling
        stops = StopStrings(sampling.stop) if sampling.stop else None
        choices = {
            choice: ChoiceOutput(
                sampling,
                Detokenizer(self._texts, sampling.skip_special_tokens, request.prompt_token_ids),
                None if stops is None else _matcher(stops, sampling),
            )
            for choice in request.open_choices
        }
        self._requests[request.request_id] = _Request(request, choices)
        processed = ProcessedOutputs([], [])
        try:
            for choice, received in request.received.items():
                self._replay(choices[choice], received, sampling)
                if choices[choice].ended:
                    processed.stopped.append((request.request_id, choice))
                    self._emit(request.request_id, choice, processed.events)
        except Exception as error:
            _logger.exception("what request %s received cannot be processed", request.request_id)
            self._fail(self._requests[request.request_id], error, processed)
        return processed

    def _replay(self, choice: ChoiceOutput, received: list[int], sampling: SamplingParams) -> None:
        """Take tokens that another engine has sent, and their text. They may have ended the choice by a stop string."""
        for token_id in received[:-1]:
            choice.add_token(token_id, None, is_text=True)
        for token_id in received[-1:]:
            choice.add_token(token_id, None, sampling.ignore_eos or token_id not in self._eos_token_ids)
        choice.drop_pending()

    def drop(self, request_id: str) -> frozenset[int]:
        """Forget an aborted or failed request without further events; return its choices that have not ended. Idempotent."""
        state = self._requests.pop(request_id, None)
        return frozenset() if state is None else frozenset(state.choices)

    def process(self, outputs: Iterable[StepOutput]) -> ProcessedOutputs:
        """Take the tokens of one or more steps; returns at most one delta per choice.

        A request whose tokens cannot be turned into text fails alone, with `Failed` and all its choices in `stopped`.
        """
        processed = ProcessedOutputs([], [])
        touched: dict[ChoiceKey, None] = {}
        for output in outputs:
            request_id, choice = output.sequence.request_id, output.sequence.choice
            state = self._requests.get(request_id)
            if state is None or choice not in state.choices:
                continue
            try:
                self._take(state, output, processed)
            except Exception as error:
                _logger.exception("the output of request %s cannot be processed", request_id)
                self._fail(state, error, processed)
                continue
            touched[request_id, choice] = None
        for request_id, choice in touched:
            self._emit(request_id, choice, processed.events)
        return processed

    def _take(self, state: _Request, output: StepOutput, processed: ProcessedOutputs) -> None:
        sequence = output.sequence
        request_id = sequence.request_id
        if not state.cached_tokens:
            adapter = state.request.adapter
            digest = None if adapter is None else adapter.digest
            processed.events.append(
                Started(
                    request_id,
                    digest,
                    sequence.num_cached_tokens,
                    queue_s=sequence.queue_s,
                    prefill_s=sequence.prefill_s,
                    grammar_s=sequence.grammar_s,
                    adapter_s=sequence.adapter_s,
                    causes=sequence.causes,
                    system_fingerprint=self._system_fingerprint,
                    resumed=bool(state.request.received),
                )
            )
        state.cached_tokens.setdefault(sequence.choice, sequence.num_cached_tokens)
        choice = state.choices[sequence.choice]
        if choice.ended:
            return
        scores = sequence.scores
        if output.first and scores is not None:
            processed.events.append(Scored(request_id, sequence.choice, scores.prompt, scores.token_ids))
        if output.token_id != NO_TOKEN:
            choice.add_token(output.token_id, output.logprob, self._is_text(state, output))
        if choice.ended:
            if output.finish_reason is None:
                processed.stopped.append((request_id, sequence.choice))
        elif output.finish_reason is not None:
            choice.end(output.finish_reason, sequence.stopped_by)
            if output.first and state.request.received and output.token_id == NO_TOKEN:
                choice.drop_pending()

    def _is_text(self, state: _Request, output: StepOutput) -> bool:
        """False for the stop token that ended the choice, unless the request includes it in the text."""
        if output.finish_reason != "stop" or state.request.sampling.include_stop_str_in_output:
            return True
        return output.sequence.stopped_by is None and output.token_id not in self._eos_token_ids

    def _fail(self, state: _Request, error: Exception, processed: ProcessedOutputs) -> None:
        request_id = state.request.request_id
        message = f"the output could not be turned into text: {type(error).__name__}"
        processed.events.append(Failed(request_id, EngineError.code, message))
        processed.stopped.extend((request_id, index) for index in state.choices)
        self.drop(request_id)

    def _emit(self, request_id: str, choice: int, events: list[Event]) -> None:
        state = self._requests.get(request_id)
        if state is None:
            return
        output = state.choices[choice]
        delta = output.take_delta(request_id, choice)
        if delta is not None:
            events.append(delta)
        prompt_tokens = len(state.request.prompt_token_ids) + len(state.request.continuation(choice))
        finished = output.finished(request_id, choice, prompt_tokens, state.cached_tokens.get(choice, 0))
        if finished is not None:
            events.append(finished)
            del state.choices[choice]
        if not state.choices:
            self.drop(request_id)


def _matcher(stops: StopStrings, sampling: SamplingParams) -> StopMatcher:
    thought = None if sampling.stops_behind is None else ThoughtPassage(*sampling.stops_behind)
    return StopMatcher(stops, sampling.include_stop_str_in_output, thought)
