"""`base_model.json` in the data directory: names the base model of this installation for commands that run next to the server."""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from loraplex.platform.startup_errors import DependencyFailed

BASE_MODEL_FILE = "base_model.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class BaseModelFacts:
    """The served base model. `path` is a directory, a `.gguf` file or a hub id; `digest` is its `model_digest`, 64 hex digits.

    `system_fingerprint` as in responses; None if an earlier release wrote the file, or started the engine.
    """

    served_name: str
    path: str
    digest: str
    system_fingerprint: str | None = None


def default_served_name(model: str) -> str:
    """The hub id itself, or the last part of a path without `.gguf`."""
    path = Path(model)
    return path.name.removesuffix(".gguf") if path.exists() else model


def write_base_model(data_dir: Path, facts: BaseModelFacts) -> None:
    """Replace the file in one step."""
    draft = data_dir / f"{BASE_MODEL_FILE}.{os.getpid()}"
    draft.write_text(json.dumps(asdict(facts)) + "\n")
    draft.replace(data_dir / BASE_MODEL_FILE)


def read_base_model(data_dir: Path) -> BaseModelFacts:
    """Read the file. Raises `DependencyFailed` when no server has run on this data directory, or the file is damaged."""
    file = data_dir / BASE_MODEL_FILE
    try:
        facts = BaseModelFacts(**json.loads(file.read_bytes()))
    except FileNotFoundError as error:
        raise DependencyFailed(
            f"{file} is missing: run `loraplex serve` once, or name the model by --model"
        ) from error
    except (ValueError, TypeError) as error:
        raise DependencyFailed(f"{file} is damaged; `loraplex serve` writes it again") from error
    texts = (facts.served_name, facts.path, facts.digest, facts.system_fingerprint or "")
    if not all(isinstance(value, str) for value in texts) or not _DIGEST.fullmatch(facts.digest):
        raise DependencyFailed(f"{file} is damaged; `loraplex serve` writes it again")
    return facts


def model_names(served_name: str, path: str) -> tuple[str, ...]:
    """Return the names under which adapters may know this model: as it is served, and of its folder or hub repository."""
    hub = [part for part in Path(path).parts if part.startswith("models--")]
    return (served_name, path, *(part.rpartition("--")[2] for part in hub))
