"""lm-eval's `local-completions` against a live server chooses what its own `hf` backend with PEFT chooses.

lm-eval gets a virtual environment of its own, from the package index, and reads torch, transformers and PEFT of this one.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.end_to_end.live_server import LiveServer, serving

from loraplex.platform.demo.model import ensure_demo_model

LM_EVAL = "lm-eval[api]==0.4.13"
FOLDER = Path(__file__).parent
CACHE = FOLDER.parents[2] / ".loraplex-test"
BOUND = 1e-3
"""In nats, of the sum over an answer's tokens."""

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Evaluator:
    """`python` of lm-eval's environment, and the folder of its task."""

    python: Path
    tasks: Path

    def samples(self, out: Path, model: str, arguments: str, key: str = "") -> list[list[float]]:
        """The log-probabilities of each item's answers, in the order of the items."""
        settings = {"OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "cache")}
        command = (
            *("--model", model, "--model_args", arguments, "--tasks", "loraplex_items"),
            *("--include_path", str(self.tasks), "--output_path", str(out), "--log_samples"),
            *("--batch_size", "16", "--device", "cpu"),
        )
        subprocess.run(
            [self.python, "-m", "lm_eval", "run", *command],
            check=True,
            env=os.environ | settings,
            timeout=1800,
        )
        (file,) = out.rglob("samples_loraplex_items_*.jsonl")
        found = sorted(map(json.loads, file.read_text().splitlines()), key=lambda each: each["doc_id"])
        return [[float(answer[0][0]) for answer in each["resps"]] for each in found]


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Evaluator:
    folder = tmp_path_factory.mktemp("lm-eval")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", LM_EVAL], check=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    ours = dict.fromkeys(
        [*(path for path in sys.path if "site-packages" in path), sysconfig.get_path("purelib")]
    )
    (packages / "ours.pth").write_text("".join(f"{path}\n" for path in ours))
    tasks = folder / "tasks"
    tasks.mkdir()
    task = (FOLDER / "loraplex_items.yaml").read_text()
    data = f"dataset_kwargs:\n  data_files:\n    test: {FOLDER / 'items.jsonl'}\n"
    (tasks / "loraplex_items.yaml").write_text(task + data)
    return Evaluator(python, tasks)


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_demo_model(CACHE)


def served_models(server: LiveServer) -> list[tuple[str, str, Path | None]]:
    """(name, key, folder of the adapter) of the base and of three tenants' adapters."""
    found: list[tuple[str, str, Path | None]] = [
        (server.access.model, server.access.tenants[0].api_key, None)
    ]
    for index, tenant in enumerate(server.access.tenants[:3]):
        name = tenant.adapters[0]
        create = server.client(index).completions.with_raw_response.create
        digest = create(model=name, prompt="a", max_tokens=1).headers["x-loraplex-adapter-digest"]
        (folder,) = (server.data_dir / "adapters").glob(f"*/{digest}")
        found.append((name, tenant.api_key, folder))
    return found


def test_the_same_answers_as_its_own_backend(evaluator: Evaluator, model: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "data", model, "--port", "0", "--dtype", "float32") as server:
        for name, key, adapter in served_models(server):
            url = f"{server.url}/v1/completions"
            remote = f"model={name},base_url={url},tokenizer={model},tokenizer_backend=huggingface"
            local = f"pretrained={model},dtype=float32" + ("" if adapter is None else f",peft={adapter}")
            served = evaluator.samples(
                tmp_path / f"{name}-served", "local-completions", f"{remote},num_concurrent=2", key
            )
            expected = evaluator.samples(tmp_path / f"{name}-hf", "hf", local)
            assert len(served) == len(expected) == 200
            differences = [
                abs(a - b) for x, y in zip(served, expected, strict=True) for a, b in zip(x, y, strict=True)
            ]
            chosen = [row.index(max(row)) for row in served]
            print(f"{name}: largest difference {max(differences):.2e} of {len(differences)} answers")
            assert chosen == [row.index(max(row)) for row in expected], name
            assert max(differences) <= BOUND, name
        server.stop()
