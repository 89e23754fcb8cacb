"""Probes an adapter on a running engine: a short greedy request on the usual path, then the figures of every module.

Invariant: a fault of the adapter becomes a `ProbeReport`, a fault of the engine an exception.
"""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeAlias
from uuid import uuid4

import msgspec

from loraplex.engine.errors import (
    AdapterError,
    AdapterInexact,
    AdapterLoadFailed,
    AdapterQuarantined,
    AdapterTooLarge,
    EngineUnavailable,
    NonFiniteLogits,
)
from loraplex.engine.messages import AdapterRef, EngineRequest, Event, Failed, Finished, ProbeReport
from loraplex.engine.sampling_params import SamplingParams

PROMPT_TOKENS: Final = 8
RESPONSE_TOKENS: Final = 8
TIMEOUT_S: Final = 120.0
SALT: Final = b"probe"
ADAPTER_FAULTS: Final = frozenset(
    error.code
    for error in (
        *(AdapterError, AdapterLoadFailed, AdapterTooLarge, AdapterInexact, AdapterQuarantined),
        NonFiniteLogits,
    )
)

Submit: TypeAlias = Callable[[EngineRequest], AsyncIterator[Event]]


async def probe_adapter(
    adapter: AdapterRef,
    vocab_size: int,
    submit: Submit,
    probe_modules: Callable[[AdapterRef], Awaitable[ProbeReport]],
) -> ProbeReport:
    """Return the report. Raises `EngineUnavailable`, and what `probe_modules` raises other than `AdapterError`."""
    generated, failure = 0, None
    async for event in submit(_request(adapter, vocab_size)):
        if isinstance(event, Failed):
            failure = event
        elif isinstance(event, Finished):
            generated = event.usage.completion_tokens
    if failure is not None and failure.code != NonFiniteLogits.code:
        return _failed(adapter, failure)
    if failure is None and not generated:
        raise EngineUnavailable("the engine ended the probe before it was complete")
    try:
        report = await probe_modules(adapter)
    except AdapterError as error:
        return ProbeReport(digest=adapter.digest, finite=failure is None, code=error.code, message=str(error))
    if failure is not None:
        # The figures of the report show which module it is.
        return msgspec.structs.replace(report, finite=False, code=failure.code, message=failure.message)
    return with_code(msgspec.structs.replace(report, generated_tokens=generated))


def with_code(report: ProbeReport) -> ProbeReport:
    """Set the report's `code`: an adapter that is not finite or too far from the reference must not serve."""
    if not report.finite:
        return msgspec.structs.replace(
            report,
            code=NonFiniteLogits.code,
            message="the adapter's modules make values that are not finite in the model's type",
        )
    for kind, error in report.max_error.items():
        if not error <= report.bound:
            return msgspec.structs.replace(
                report,
                code=AdapterInexact.code,
                message=f"{kind} differs from the reference by {error:.3g} of its largest value; "
                f"allowed is {report.bound:.3g}",
            )
    return report


def _request(adapter: AdapterRef, vocab_size: int) -> EngineRequest:
    choose = random.Random(adapter.digest)
    return EngineRequest(
        request_id=f"probe-{uuid4().hex}",
        namespace=adapter.namespace,
        prompt_token_ids=[choose.randrange(vocab_size) for _ in range(PROMPT_TOKENS)],
        sampling=SamplingParams(max_tokens=RESPONSE_TOKENS, temperature=0.0, ignore_eos=True),
        adapter=adapter,
        cache_salt=SALT,
        total_timeout_s=TIMEOUT_S,
    )


def _failed(adapter: AdapterRef, failure: Failed) -> ProbeReport:
    if failure.code not in ADAPTER_FAULTS:
        raise EngineUnavailable(failure.message)
    return ProbeReport(digest=adapter.digest, code=failure.code, message=failure.message)
