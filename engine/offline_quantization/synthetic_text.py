"""Text that a model writes itself, if no other is available: drawn from its own distribution (LLM-QAT, Liu et al. 2023).

Invariant: the same model and seed give the same text, and texts of different seeds share no random numbers.
"""

import dataclasses
from contextlib import closing

from loraplex.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.errors import AdapterLoadFailed, ModelError
from loraplex.engine.lora.weights import LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.model_loading import LoadedModel
from loraplex.engine.offline_quantization.quality_gate import OnProgress
from loraplex.engine.sampling_params import SamplingParams

ROWS_AT_ONCE = 16
WRITING = "writing a text for the quality gate"
MAX_TEXTS = 1 << 20
"""Random numbers of one seed."""
_BLOCK_SIZE = 16
_NAMESPACE = bytes(32)


class _NoAdapters:
    def load(self, adapter: AdapterRef) -> LoraWeights:
        raise AdapterLoadFailed("there are no adapters here")


def sample_text(
    model: LoadedModel, count: int, length: int, seed: int, progress: OnProgress
) -> list[list[int]]:
    """Draw `count` texts of `length` tokens, at temperature 1, after an end token. Raises `ModelError` where a row fails."""
    blocks = ROWS_AT_ONCE * (length // _BLOCK_SIZE + 2)
    config = EngineConfig(
        model=model.path,
        scheduler=SchedulerConfig(max_num_seqs=ROWS_AT_ONCE, max_waiting=count),
        cache=CacheConfig(block_size=_BLOCK_SIZE, num_blocks=blocks, prefix_caching=False),
        lora=LoraConfig(max_bytes=0),
    )
    start = next(iter(model.config.eos_token_ids), 0)
    texts = {str(index): [start] for index in range(count)}
    progress(WRITING)
    with closing(Engine(dataclasses.replace(model, num_blocks=blocks), config, _NoAdapters())) as engine:
        for index in range(count):
            engine.add(_request(index, start, length, seed))
        while engine.has_unfinished:
            result = engine.step()
            for _, error in result.failures:
                raise ModelError(f"the model cannot write a text: {error}")
            for output in result.outputs:
                texts[output.sequence.request_id].append(output.token_id)
            progress(WRITING, sum(map(len, texts.values())) / (count * length))
    return list(texts.values())


def _request(index: int, start: int, length: int, seed: int) -> EngineRequest:
    sampling = SamplingParams(
        max_tokens=length - 1, temperature=1.0, seed=seed * MAX_TEXTS + index, ignore_eos=True
    )
    return EngineRequest(
        request_id=str(index), namespace=_NAMESPACE, prompt_token_ids=[start], sampling=sampling
    )
