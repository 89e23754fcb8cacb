"""Every shape of the zoo equals PEFT, or is refused with a reason; what PEFT loads as plain LoRA is not refused."""

import copy
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from tests.engine.random_llama import save_random_llama
from tests.engine.test_engine import NAMESPACE, Harness, Reference
from tests.outside.adapters.shapes import WEIGHTS, Shape, train
from tests.outside.adapters.zoo import ZOO
from torch import Tensor
from transformers import LlamaForCausalLM

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.limits import DEFAULT_LIMITS
from loraplex.adapters.loader import PeftAdapterSource
from loraplex.adapters.target_modules import BaseModel, adaptable_modules
from loraplex.adapters.validation.result import Rejected, Validated, ValidationResult, refused_by
from loraplex.adapters.validation.upload_files import open_upload
from loraplex.adapters.validation.validate import validate_files
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.checkpoints.reader import open_checkpoint
from loraplex.engine.checkpoints.vocabulary_digests import vocabulary_digests
from loraplex.engine.lora.weights import LoraWeights
from loraplex.engine.messages import AdapterRef

VOCAB, DIGEST = 128, "b" * 64
TOLERANCE = 1e-5
ACCEPTED = [shape for shape in ZOO if shape.refused is None]
REFUSED = [shape for shape in ZOO if shape.refused is not None]


@dataclass
class Answer:
    """What the platform made of a shape; `weights` as the engine loads them from the stored files."""

    result: ValidationResult
    weights: LoraWeights | None = None


class Zoo(Reference):
    """One tiny base model, and each shape trained on it, validated and stored."""

    def __init__(self, folder: Path, *, tied: bool) -> None:
        self.path = folder / "tiny-llama"
        save_random_llama(
            self.path,
            std=0.15,
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
        )
        self._folder = folder
        self._causal = LlamaForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        self.config = load_model_config(str(self.path))
        vocabulary = vocabulary_digests(
            str(self.path), self.config, open_checkpoint(str(self.path), self.config)
        )
        self.base_model = BaseModel(
            adaptable_modules(self.config), DIGEST, vocabulary, ("tiny-llama", str(self.path))
        )
        self.folders: dict[str, Path] = {}
        self.adapted: dict[str | None, Any] = {}
        self._source = PeftAdapterSource(self.config, torch.float32, DIGEST)

    def causal(self) -> Any:
        """A copy of the base model that may be changed."""
        return copy.deepcopy(self._causal)

    def train(self, shape: Shape) -> tuple[Any, Path]:
        """Return the model whose forward pass is right, and the folder to upload."""
        folder = self._folder / f"uploaded-{len(list(self._folder.iterdir()))}"
        base = self.causal()
        trained = train(shape, base.model if shape.base == "bare" else base, folder)
        if shape.reference == "loaded":
            trained = PeftModel.from_pretrained(self.causal(), folder).eval()
        return trained, folder

    def answer(self, folder: Path) -> Answer:
        try:
            with open_upload(folder, DEFAULT_LIMITS) as files:
                result = validate_files(files, self.base_model, DEFAULT_LIMITS)
        except AdapterRejected as error:
            return Answer(refused_by(error))
        if isinstance(result, Rejected):
            return Answer(result)
        (folder / "adapter_config.json").write_bytes(result.canonical)
        # As after a restart of the gateway while the engine probes it.
        with open_upload(folder, DEFAULT_LIMITS) as files:
            again = validate_files(files, self.base_model, DEFAULT_LIMITS)
        assert isinstance(again, Validated), again
        assert again.digest == result.digest
        stored = self._folder / result.digest
        if not stored.exists():
            folder.rename(stored)
        self.folders[result.digest] = stored
        return Answer(result, self._source.load(self.ref(result)))

    def ref(self, result: Validated) -> AdapterRef:
        return AdapterRef(
            namespace=NAMESPACE, digest=result.digest, blob_path=str(self.folders[result.digest])
        )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products of this size take longer when they are shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Zoo]:
    return {tied: Zoo(tmp_path_factory.mktemp("zoo"), tied=tied) for tied in (False, True)}


@pytest.fixture(scope="module")
def engines(zoos: dict[bool, Zoo]) -> Iterator[dict[bool, Harness]]:
    made = {tied: Harness(zoo) for tied, zoo in zoos.items()}
    yield made
    for harness in made.values():
        harness.check_idle()
        harness.engine.close()


def deltas(model: Any) -> dict[str, Tensor]:
    """By engine name, [out, in]; of the embedding [vocab, hidden]."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer) and module.scaling:
            name = path.removeprefix("base_model.model.").removeprefix("model.")
            found[name.replace("self_attn.", "").replace("mlp.", "")] = module.get_delta_weight("default")
    return found


class WithHead(torch.nn.Module):
    """A model without its head, with it again."""

    def __init__(self, model: Any, head: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, ids: Tensor, use_cache: bool = False) -> Any:
        hidden = self.model(ids, use_cache=use_cache).last_hidden_state
        return type("Output", (), {"logits": self.head(hidden)})


@pytest.mark.parametrize("shape", [pytest.param(shape, id=shape.name) for shape in ACCEPTED])
@torch.no_grad()
def test_an_accepted_shape_equals_peft(
    zoos: dict[bool, Zoo], engines: dict[bool, Harness], shape: Shape
) -> None:
    """The weights as the engine loads them, and greedy answers of the engine by PEFT's own forward pass."""
    zoo, harness = zoos[shape.base == "tied"], engines[shape.base == "tied"]
    trained, folder = zoo.train(shape)
    answer = zoo.answer(folder)
    assert isinstance(answer.result, Validated), answer.result
    assert answer.weights is not None
    warnings = " / ".join(answer.result.report.warnings)
    assert (shape.warned or "") in warnings and bool(warnings) == bool(shape.warned), warnings
    expected = {
        name: delta
        for name, delta in deltas(trained).items()
        if name in answer.weights.modules or delta.any()
    }
    assert answer.weights.modules.keys() == expected.keys()
    for name, module in answer.weights.modules.items():
        delta = (module.b @ module.a).T if name == "embed_tokens" else module.b @ module.a
        torch.testing.assert_close(delta, expected[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)

    digest = answer.result.digest
    zoo.adapted[digest] = WithHead(trained, zoo.causal().lm_head) if shape.base == "bare" else trained
    choose = random.Random(shape.name)
    prompt = [choose.randrange(3, VOCAB) for _ in range(12)]
    harness.add(shape.name, prompt, digest, max_tokens=2, ignore_eos=True)
    harness.run()
    assert not harness.failures
    zoo.check(digest, prompt, harness.outputs[shape.name, 0])


@pytest.mark.parametrize("shape", [pytest.param(shape, id=shape.name) for shape in REFUSED])
@torch.no_grad()
def test_a_refused_shape_is_not_plain_lora(zoos: dict[bool, Zoo], shape: Shape) -> None:
    """The reason names what to do; PEFT refuses the files too, or computes something else than A and B of the file."""
    zoo = zoos[shape.base == "tied"]
    _, folder = zoo.train(shape)
    result = zoo.answer(folder).result
    assert isinstance(result, Rejected) and shape.refused is not None
    assert shape.refused in f"{result.subject}: {result.message}", result
    assert (shape.though_plain is None) != is_plain_in_peft(zoo, folder)


def is_plain_in_peft(zoo: Zoo, folder: Path) -> bool:
    """Whether PEFT loads every tensor of the files on this base model and computes exactly the base plus B @ A * scale."""
    try:
        loaded = PeftModel.from_pretrained(zoo.causal(), folder).eval()
        file = load_file(folder / WEIGHTS) if (folder / WEIGHTS).exists() else {}
        used = get_peft_model_state_dict(loaded, save_embedding_layers=True).keys() >= file.keys()
        plain, found = zoo.causal(), plain_deltas(loaded)
        for name, delta in found.items():
            plain.get_submodule(name).weight += delta
        ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
        equal = torch.allclose(loaded(ids).logits, plain(ids).logits, atol=1e-4)
    except (ImportError, AttributeError, KeyError, RuntimeError, TypeError, ValueError, OSError, re.error):
        return False
    return used and bool(found) and equal


def plain_deltas(model: Any) -> dict[str, Tensor]:
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer) and module.lora_A:
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            found[path.removeprefix("base_model.model.")] = b @ a * module.scaling["default"]
    return found
