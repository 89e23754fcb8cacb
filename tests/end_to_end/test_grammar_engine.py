"""Both grammar backends in the real engine on the demo model: whole documents, with and without forced tokens."""

import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.loader import PeftAdapterSource
from loraplex.engine.config import CacheConfig, EngineConfig, GrammarConfig
from loraplex.engine.engine import Engine
from loraplex.engine.messages import EngineRequest
from loraplex.engine.model_loading import load_model
from loraplex.engine.sampling_params import SamplingParams
from loraplex.grammar.backends import emit_llguidance, emit_xgrammar
from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.spec import Backend, GrammarSpec, encode_spec
from loraplex.grammar.tree import JsonValue

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "category": {"enum": ["electronics", "household", "clothing"]},
        "available": {"type": "boolean"},
        "price": {"type": "integer"},
    },
    "required": ["name", "category", "available", "price"],
    "additionalProperties": False,
}
QUESTION = "<|im_start|>user\nDescribe a product number {} as JSON.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def engine(demo_model: Path, quantization: str) -> Iterator[Engine]:
    exact = quantization == "none"
    settings = EngineConfig(
        model=str(demo_model),
        dtype="float32" if exact else "bfloat16",
        device="cpu",
        quantization=quantization,
        # In bfloat16 a prompt of which a part was cached may round differently, quantized or not.
        cache=CacheConfig(num_blocks=600, prefix_caching=exact),
        grammar=GrammarConfig(mask_timeout_s=60.0),
    )
    model = load_model(settings)
    vocabulary = Vocabulary(
        model.tokenizer.to_str(), model.config.vocab_size, frozenset(model.config.eos_token_ids)
    )
    source = PeftAdapterSource(model.config, model.dtype, model.digest)
    made = Engine(model, settings, source, mask_factory=MaskCompiler(vocabulary).compile)
    # As an engine process does: a collection of all tests' objects would count as work of a grammar.
    gc.collect()
    gc.freeze()
    yield made
    gc.unfreeze()
    made.close()


def answers(engine: Engine, grammars: dict[str, bytes | None], **sampling: Any) -> dict[str, list[int]]:
    """The output tokens of one request per grammar, all at once; ends by "stop" only, but for those without one."""
    encode = engine.model.tokenizer.encode
    for index, (name, grammar) in enumerate(grammars.items()):
        params = {"max_tokens": 48, "temperature": 1.0, "seed": index} | sampling
        engine.add(
            EngineRequest(
                request_id=name,
                namespace=b"t",
                prompt_token_ids=encode(QUESTION.format(index), add_special_tokens=False).ids,
                sampling=SamplingParams(**params, ignore_eos=grammar is None),
                grammar=grammar,
            )
        )
    outputs: dict[str, list[int]] = {name: [] for name in grammars}
    deadline = time.monotonic() + 300
    while engine.has_unfinished:
        assert time.monotonic() < deadline
        result = engine.step()
        assert not result.failures
        for output in result.outputs:
            name = output.sequence.request_id
            outputs[name].append(output.token_id)
            expected = "length" if grammars[name] is None else "stop"
            assert output.finish_reason in (None, expected), outputs[name]
        if not result.ran:
            time.sleep(0.001)
    return outputs


def spec(backend: Backend, *, fast_forward: bool) -> bytes:
    emit = emit_llguidance.emit if backend == "llguidance" else emit_xgrammar.emit
    source = emit(JsonValue(SCHEMA, "compact"))
    return encode_spec(GrammarSpec(backend=backend, source=source, fast_forward=fast_forward, close=True))


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_answers_are_whole_documents_whatever_is_forced(engine: Engine, backend: Backend) -> None:
    names = [str(index) for index in range(2)]
    free: dict[str, bytes | None] = {"free": None}
    before = engine.stats()
    slow = answers(engine, free | dict.fromkeys(names, spec(backend, fast_forward=False)))
    between = engine.stats()
    fast = answers(engine, free | dict.fromkeys(names, spec(backend, fast_forward=True)))
    after = engine.stats()
    assert fast["free"] == slow["free"] and len(fast["free"]) == 48
    for name in names:
        for output in (slow[name], fast[name]):
            text = engine.model.tokenizer.decode(output, skip_special_tokens=False)
            assert set(json.loads(text)) == set(SCHEMA["required"]), text
    assert after.forced_tokens - between.forced_tokens > 15
    assert after.grammar_compilations - before.grammar_compilations == 4


def test_log_probabilities_come_with_every_token_of_a_closed_document(engine: Engine) -> None:
    grammar = spec("llguidance", fast_forward=True)
    forced = engine.stats().forced_tokens
    (output,) = answers(engine, {"asks": grammar}, logprobs=1, max_tokens=40).values()
    assert engine.stats().forced_tokens == forced
    assert json.loads(engine.model.tokenizer.decode(output, skip_special_tokens=False))
