"""An adapter with PEFT's own defaults, uploaded to the live demo, answers as under PEFT."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.end_to_end.live_server import LiveServer, until
from transformers import AutoModelForCausalLM

from loraplex.engine.model_loading import load_tokenizer

NAME = "default"
FILES = ("adapter_config.json", "adapter_model.safetensors")
PROMPT = "Number 7. Write about the history of the lighthouse."
TOKENS = 8


@pytest.fixture
def adapted(demo_model: Path, tmp_path: Path) -> Any:
    """The demo model under a random adapter of `LoraConfig()`, which is saved in `tmp_path`."""
    base = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    model: Any = get_peft_model(base, LoraConfig())
    draws = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            spread = parameter.shape[1] ** -0.5 * (3.0 if "lora_B" in name else 1.0)
            parameter.data = torch.randn(parameter.shape, generator=draws) * spread
    model.save_pretrained(tmp_path)
    return model.eval()


@pytest.fixture
def uploaded(demo: LiveServer, adapted: Any, tmp_path: Path) -> Iterator[None]:
    """The saved files as a version of `NAME` in production; removed at the end."""
    headers = {"authorization": f"Bearer {demo.access.tenants[0].admin_key}"}
    with httpx.Client(base_url=f"{demo.url}/tenant/v1", headers=headers, timeout=60) as client:
        assert client.post("adapters", json={"name": NAME}).status_code == httpx.codes.CREATED
        sent = client.post(
            f"adapters/{NAME}/versions",
            files={each: (each, (tmp_path / each).read_bytes()) for each in FILES},
        )
        assert sent.status_code == httpx.codes.ACCEPTED, sent.text

        def is_decided() -> bool:
            return bool(
                client.get(f"adapters/{NAME}/versions/1").json()["state"] not in ("uploading", "validating")
            )

        until(is_decided, 60, "the version is validated")
        version = client.get(f"adapters/{NAME}/versions/1").json()
        assert version["state"] == "ready", version
        yield
        until(
            lambda: client.delete(f"adapters/{NAME}").status_code != httpx.codes.CONFLICT, 60, "it is deleted"
        )
        assert client.get(f"adapters/{NAME}").status_code == httpx.codes.NOT_FOUND


@pytest.mark.usefixtures("uploaded")
def test_an_adapter_of_peft_without_a_task_type_answers_as_under_peft(
    demo: LiveServer, demo_model: Path, adapted: Any, quantization: str
) -> None:
    tokenizer = load_tokenizer(str(demo_model))
    ids = tokenizer.encode(PROMPT).ids
    answer = demo.client().completions.create(
        model=f"{NAME}@1", prompt=ids, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
    )
    if quantization != "none":
        return
    adapted.generation_config.eos_token_id = None
    prompt = torch.tensor([ids])
    with torch.inference_mode():
        found = adapted.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=TOKENS
        )
        with adapted.disable_adapter():
            plain = adapted(found).logits[0, len(ids) - 1 : -1].argmax(dim=-1)
    assert answer.choices[0].text == tokenizer.decode(found[0, len(ids) :].tolist())
    assert not torch.equal(found[0, len(ids) :], plain)
