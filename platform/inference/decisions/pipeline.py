"""Processes one decision: a generation for each adapter that its questions name, whose rows score one question each.

Invariant: an adapter's rows share the input's blocks, which its first row computes; what is reserved is what is charged.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final, overload
from uuid import uuid4

from loraplex.engine.messages import EngineRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.errors import ContextSizes, ContextTooLong, InvalidParameter, ModelNotFound
from loraplex.platform.inference.admission import RequestContext, RequestSizes
from loraplex.platform.inference.decisions.decision import AdapterPart, Decision, gather_or_cancel, naming
from loraplex.platform.inference.decisions.option_readers import OptionReader, OptionReaders, Row
from loraplex.platform.inference.decisions.question_encoding import EncodedQuestions, QuestionEncoding
from loraplex.platform.inference.decisions.wording import FORMAT
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.inference.engine_streams import EnginePlaces
from loraplex.platform.inference.generation import Generation, RowsBehind
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.inference.pipeline import InferencePipeline
from loraplex.platform.observability.request_record import RequestRecord
from loraplex.platform.parameters.chat_messages import ChatMessage
from loraplex.platform.parameters.decision_request import DecisionRequest
from loraplex.tenants.errors import LimitExceeded

MAX_ADAPTERS: Final = 64
MAX_ADAPTER_ROWS: Final = 2048
"""Engine requests of one adapter: 400 questions have 400, and each with over 26 options some 20."""
MAX_ROWS: Final = 64
"""Sequences of one decision in the engine at once."""
FORMAT_HEADER: Final = "x-loraplex-decision-format"
CALIBRATION_HEADER: Final = "x-loraplex-decision-calibration"
PART_HEADERS: Final = ("x-loraplex-adapter", "x-loraplex-adapter-digest", CALIBRATION_HEADER)
PREFIX: Final = 16
"""Digits of a calibration's SHA-256 in the header."""


class DecisionPipeline:
    """Starts a `Decision` from checked parameters."""

    def __init__(self, dependencies: GatewayDependencies, pipeline: InferencePipeline) -> None:
        self._dependencies = dependencies
        self._pipeline = pipeline
        self._readers = OptionReaders(dependencies.prompts.continuation_ids, dependencies.token_text)

    @asynccontextmanager
    async def begun(
        self, context: RequestContext, values: DecisionRequest, messages: list[ChatMessage]
    ) -> AsyncIterator[Decision]:
        """Start a decision, wait for the first event of each adapter, and end it with the block. Raises the error of the request.

        `messages`: those of its input. Headers of adapters are joined, in the order of the questions.
        """
        encoding = QuestionEncoding(self._pipeline.encoder, values, messages, context.caller.tenant_id)
        groups = await self._groups(context, values)
        admitted, places = asyncio.Barrier(len(groups)), EnginePlaces(MAX_ROWS)
        decision = Decision(values, encoding, places, admitted, self._dependencies.recorder)
        contexts = [_context_of_part(context, first=not at) for at in range(len(groups))]
        works = [
            self._begin_part(context, part, decision, *group)
            for part, group in zip(contexts, groups, strict=True)
        ]
        try:
            try:
                await gather_or_cancel(works)
            finally:
                context.is_recorded = any(each.is_recorded for each in contexts)
            _join_headers(context, contexts)
            yield decision
        except BaseException as error:
            await decision.close(error)
            raise
        await decision.close()

    async def _groups(self, context: RequestContext, values: DecisionRequest) -> list[tuple[str, list[int]]]:
        """Return the model name and the questions of each adapter that is used. Raises `ModelNotFound` with the field at fault.

        An adapter that several names mean now is pinned: they may mean several once an alias has moved.
        """
        found: dict[str, ResolvedModel] = {}
        questions: dict[tuple[object, ...], tuple[str, list[int]]] = {}
        for index, question in enumerate([None, *values.questions], -1):
            name = values.model if question is None else question.model or values.model
            if name not in found:
                param = "model" if name == values.model else f"questions[{index}].model"
                if len(found) > MAX_ADAPTERS:
                    message = (
                        f"`{param}` names one more than the {MAX_ADAPTERS} models that questions may name."
                    )
                    raise InvalidParameter(message, param=param)
                try:
                    found[name] = await self._resolve(context, name)
                except ModelNotFound as error:
                    error.param = param
                    raise
            if question is not None:
                version, pinned = (found[name].adapter_id, found[name].version), found[name].adapter or name
                known = questions.setdefault(version, (name, []))
                known[1].append(index)
                if known[0] != name:
                    questions[version] = pinned, known[1]
        return [*questions.values()]

    async def _resolve(self, context: RequestContext, name: str) -> ResolvedModel:
        return await self._pipeline.models.resolve(context.caller, name, context.request_id)

    async def _begin_part(
        self,
        whole: RequestContext,
        context: RequestContext,
        decision: Decision,
        name: str,
        indices: list[int],
    ) -> None:
        try:
            with naming(name):
                admit = partial(self._admit, context, decision, name, indices)
                await self._pipeline.begin_admitted(context, 1, admit)
        except Exception as error:
            # Those of its refusal alone: a revoked key learns nothing of the other adapters.
            whole.headers.clear()
            whole.headers.update(context.headers)
            if isinstance(error, LimitExceeded):
                _check_parallel(error, decision.admitted.parties)
            raise

    async def _admit(
        self,
        context: RequestContext,
        decision: Decision,
        name: str,
        indices: list[int],
        release: Callable[[], None],
    ) -> Generation:
        """Admit the questions of one adapter once their sizes are known, submit them to the engine once all adapters are admitted, and
        add the part to the decision.
        """
        model = await self._resolve(context, name)
        context.model = model
        context.record.adapter_id, context.record.adapter_version = model.adapter_id, model.version
        context.headers.update(model.headers())
        if context.unknown is not None:
            await self._pipeline.report(context, model, context.unknown)
        info = self._dependencies.engine.info()
        calibration = model.calibration(info.system_fingerprint, FORMAT)
        if model.digest is not None:
            context.headers[CALIBRATION_HEADER] = calibration["sha256"][:PREFIX]
        encoded = await decision.encoding.for_model(model)
        readers = await self._readers_of(context, model, decision.values, indices)
        rows = [(i, row) for i, reader in readers.items() for row in reader.rows]
        if len(rows) > MAX_ADAPTER_ROWS:
            message = f"`questions` of `{name}` need {len(rows)} rows of the engine, but may need at most {MAX_ADAPTER_ROWS}: ask fewer with over 26 options."
            raise InvalidParameter(message, param="questions")
        self._check_context(decision.values.model, encoded, rows)
        numbers: dict[int, list[int]] = {i: [] for i in indices}
        for number, (i, _) in enumerate(rows):
            numbers[i].append(number)
        behind = _rows_behind(encoded, rows, numbers, decision.places)
        sizes = RequestSizes(sum(behind.lengths), completion_tokens=0, sequences=1)
        is_unchanged = partial(self._is_unchanged, context, model, name)
        pending = await self._pipeline.admission.admit(context, model, sizes, is_unchanged)
        try:
            requests = await self._engine_requests(context, decision, model, encoded, rows)
            if decision.admitted.parties > 1:
                # Nothing is computed, and charged, of a decision that is refused.
                await pending.reservation()
                await decision.admitted.wait()
            generation = Generation(
                *(self._dependencies, release, model, requests, pending, decision.arrival), behind=behind
            )
        except BaseException as error:
            await self._pipeline.admission.cancel(pending, error)
            raise
        size = info.block_size if info.prefix_caching else len(encoded.input) + 1
        decision.parts[name] = AdapterPart(
            name=name,
            readers=readers,
            rows=numbers,
            temperatures=calibration["temperatures"],
            cacheable_tokens=len(encoded.input) // size * size,
            generation=generation,
        )
        return generation

    async def _readers_of(
        self, context: RequestContext, model: ResolvedModel, values: DecisionRequest, indices: list[int]
    ) -> dict[int, OptionReader]:
        """Return what reads each question. Texts of options are encoded on a thread."""
        endings = None if model.reads_labels else self._dependencies.engine.info().eos_token_ids

        def read() -> dict[int, OptionReader]:
            return {i: self._readers.reader(values.questions[i], f"questions[{i}]", endings) for i in indices}

        if model.reads_labels:
            return read()
        return await self._pipeline.encoder.on_thread(context.caller.tenant_id, read)

    async def _is_unchanged(self, context: RequestContext, model: ResolvedModel, name: str) -> bool:
        try:
            return await self._resolve(context, name) == model
        except ModelNotFound:
            return False

    def _check_context(self, model: str, encoded: EncodedQuestions, rows: Sequence[tuple[int, Row]]) -> None:
        """Raise `ContextTooLong` for the first question that does not fit behind the input."""
        context, before = self._pipeline.encoder.context_tokens, len(encoded.input)
        for index, row in rows:
            tokens = before + len(encoded.questions[index]) + row.longest
            if tokens > context:
                message = (
                    f"This model's maximum context length is {context} tokens, but `questions[{index}]` "
                    f"and the input before it have {tokens}: {before} of them are the input's."
                )
                raise ContextTooLong(message, f"questions[{index}]", ContextSizes(model, context, tokens, 0))

    async def _engine_requests(
        self,
        context: RequestContext,
        decision: Decision,
        model: ResolvedModel,
        encoded: EncodedQuestions,
        rows: Sequence[tuple[int, Row]],
    ) -> "RowRequests":
        caller, limits, run = context.caller, self._dependencies.config, uuid4().hex
        namespace = self._dependencies.namespace_of(caller.tenant_id)
        with context.record.timed("adapter_fetch"):
            adapter = await self._pipeline.adapter_ref(caller, model, namespace)
        total_s, first_token_s = context.shortened(limits.total_timeout_s), limits.first_token_timeout_s
        if first_token_s is not None:
            first_token_s -= time.monotonic() - decision.arrival

        def request(number: int) -> EngineRequest:
            index, row = rows[number]
            ids = [*encoded.input, *encoded.questions[index], *row.path]
            return EngineRequest(
                request_id=f"{run}-{number}",
                namespace=namespace,
                prompt_token_ids=ids,
                sampling=SamplingParams(max_tokens=0, n=row.choices, seed=0),
                scores=row.score(len(ids) - 1),
                weight=caller.weight,
                adapter=adapter,
                cache_salt=(decision.values.cache_salt or "").encode(),
                queue_timeout_s=limits.queue_timeout_s,
                first_token_timeout_s=first_token_s,
                total_timeout_s=total_s,
            )

        return RowRequests(len(rows), request)


class RowRequests(Sequence[EngineRequest]):
    """The requests of an adapter's rows, each made where it is asked for: all of them would hold the input thousands of times."""

    def __init__(self, count: int, make: Callable[[int], EngineRequest]) -> None:
        self._numbers = range(count)
        self._make = make

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> EngineRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[EngineRequest]: ...
    def __getitem__(self, index: int | slice) -> EngineRequest | list[EngineRequest]:
        found = self._numbers[index]
        return self._make(found) if isinstance(found, int) else [*map(self._make, found)]


def _rows_behind(
    encoded: EncodedQuestions,
    rows: Sequence[tuple[int, Row]],
    numbers: Mapping[int, Sequence[int]],
    places: EnginePlaces,
) -> RowsBehind:
    """Order the rows: a question's first one waits for the input, the others for their question, too. `numbers`: rows by question."""
    lengths = [row.tokens for _, row in rows]
    lengths[0] += len(encoded.input)
    after = {number: numbers[i][0] for number, (i, _) in enumerate(rows)}
    for i, (first, *_) in numbers.items():
        lengths[first] += len(encoded.questions[i])
        after[first] = 0
    del after[0]
    return RowsBehind(
        after=after,
        sequences=sum(row.choices for _, row in rows[1:]),
        lengths=lengths,
        cacheable=len(encoded.input),
        places=places,
    )


def _context_of_part(context: RequestContext, *, first: bool) -> RequestContext:
    """The first part has the record of the request, which its access line and its trace read, and reports what is unknown."""
    record = context.record if first else RequestRecord(phases=dict(context.record.phases))
    unknown = context.unknown if first else None
    return replace(context, headers=dict(context.headers), record=record, unknown=unknown)


def _check_parallel(error: LimitExceeded, adapters: int) -> None:
    """Raise `InvalidParameter` for more adapters than may ever run at once."""
    if error.limit == "concurrent_requests" and 1 <= error.limit_value < adapters:
        message = f"`questions` ask {adapters} adapters, but may ask at most {error.limit_value}: `concurrent_requests` of the {error.level}."
        raise InvalidParameter(message, param="questions") from error


def _join_headers(context: RequestContext, parts: Sequence[RequestContext]) -> None:
    """Add the headers of all parts to those of the request: of adapters all, of anything else the newest."""
    for part in parts:
        context.headers.update(part.headers)
    for name in PART_HEADERS:
        if values := [part.headers[name] for part in parts if name in part.headers]:
            context.headers[name] = ", ".join(values)
    context.headers.setdefault(CALIBRATION_HEADER, "none")
    context.headers[FORMAT_HEADER] = FORMAT
