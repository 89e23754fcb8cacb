"""Every error the engine raises or reports. Nothing here knows HTTP.

EngineError
├── InvalidRequest          a request the engine can never run: names the field
│   ├── PromptTooLong       prompt (+ max_tokens) exceeds the model length or the KV pool
│   └── UnsupportedFeature  a field whose feature is not built into this engine
├── EngineOverloaded        the bounded waiting queue is full, and this tenant has the most in it; or it was waited in too long
│   └── QueueShareExceeded  the tenant of the request has filled its share of that queue
├── EngineUnavailable       the engine process is down, restarting or draining
│   ├── ServerShuttingDown  the gateway drains: it refuses the request, or its time to finish is over
│   ├── EngineDraining      the engine drains: it takes no request, or ended this one at the end of its grace
│   ├── PromptQuarantined   engines ended while they ran this prompt of this tenant
│   └── EngineLost          the engine process ended while it had the request
│       └── EngineLostTwice another engine went on with the request and was lost, too, or may not go on with it
├── RequestTimeout          a deadline of the request passed
├── NamespaceForgotten      the request's tenant was deleted while it waited or ran
├── NonFiniteLogits         this row's logits held NaN or infinity; other rows went on
├── StepFailed              the computation of this row raised an exception; other rows went on
├── NothingAllowed          the request's grammar and other constraints left no token to go on with
├── GrammarFailed           the request's grammar could not be compiled here, or its matcher broke down
│   └── GrammarTooSlow      one mask of it took longer than the bound, or the work it may cause is spent
├── AdapterError            this request's adapter cannot serve it
│   ├── AdapterLoadFailed   the blob could not be read or does not fit the model
│   ├── AdapterTooLarge     one adapter exceeds the whole residency budget
│   ├── AdapterInexact      quantizing changes one of its modules by more than the bound
│   └── AdapterQuarantined  the adapter produced non-finite rows repeatedly
└── ModelError              the base model cannot be loaded
    ├── UnsupportedArchitecture
    └── UnsafeCheckpoint    a pickle checkpoint; only safetensors and GGUF are read
"""


class EngineError(Exception):
    """Base of all engine errors. `code` travels over the wire in `Failed.code`.

    `is_due_to_request`: the request itself is the cause, so what was computed for it counts as used.
    """

    code = "engine_error"
    is_due_to_request = False


class InvalidRequest(EngineError):
    """A request that can never run. `field` names what is wrong with it."""

    code = "invalid_request"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(InvalidRequest):
    """`prompt` and `completion` tokens are more than the `limit` of one sequence."""

    code = "context_length_exceeded"

    def __init__(self, limit: int, prompt: int, completion: int) -> None:
        super().__init__("prompt", overflow_message(limit, prompt, completion))


def overflow_message(limit: int, prompt: int, completion: int, name: str = "prompt", bound: str = "") -> str:
    """Return the text by whose beginning clients of OpenAI know an overflow. `bound`: what `prompt` is of its true size."""
    return (
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + completion} tokens "
        f"({bound}{prompt} in the {name}, {completion} for the completion)."
    )


class UnsupportedFeature(InvalidRequest):
    code = "unsupported_feature"


class EngineOverloaded(EngineError):
    code = "overloaded"


class QueueShareExceeded(EngineOverloaded):
    code = "queue_share_exceeded"


class EngineUnavailable(EngineError):
    code = "engine_unavailable"


class ServerShuttingDown(EngineUnavailable):
    code = "server_shutting_down"


class EngineDraining(EngineUnavailable):
    """Another engine may take the request, or go on with it."""

    code = "engine_draining"


class PromptQuarantined(EngineUnavailable):
    code = "prompt_quarantined"


class EngineLost(EngineUnavailable):
    code = "engine_lost"


class EngineLostTwice(EngineLost):
    code = "engine_lost_twice"


class RequestTimeout(EngineError):
    code = "timeout"
    is_due_to_request = True


class NamespaceForgotten(EngineError):
    code = "namespace_forgotten"


class NonFiniteLogits(EngineError):
    code = "non_finite_logits"


class StepFailed(EngineError):
    """Reported as any defect of the engine."""


class NothingAllowed(EngineError):
    code = "nothing_allowed"
    is_due_to_request = True


class GrammarFailed(EngineError):
    code = "grammar_failed"

    @staticmethod
    def of(error: BaseException) -> "GrammarFailed":
        """Convert an exception of a `TokenMask` to the error that ends its request."""
        if isinstance(error, TimeoutError):
            return GrammarTooSlow("the grammar of this request takes more work than one answer may")
        return GrammarFailed(f"the grammar's matcher broke down: {type(error).__name__}")


class GrammarTooSlow(GrammarFailed):
    code = "grammar_too_slow"
    is_due_to_request = True


class AdapterError(EngineError):
    code = "adapter_error"


class AdapterLoadFailed(AdapterError):
    code = "adapter_load_failed"


class AdapterTooLarge(AdapterError):
    code = "adapter_too_large"


class AdapterInexact(AdapterError):
    code = "adapter_inexact"


class AdapterQuarantined(AdapterError):
    code = "adapter_quarantined"


class ModelError(EngineError):
    code = "model_error"


class UnsupportedArchitecture(ModelError):
    code = "unsupported_architecture"


class UnsafeCheckpoint(ModelError):
    code = "unsafe_checkpoint"
