"""Each client in an environment of its own, outside the tree, as its users install it.

`requirements/<name>.txt` pins a Python client with all that it needs, `requirements/<name>/` npm packages; `scripts/use_<client>`
uses it. A client's pins are those of the longest name that its own begins with. An environment is made once for each content of
its pins.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
PINS = HERE / "requirements"
SCRIPTS = {path.stem.removeprefix("use_"): path for path in sorted(HERE.glob("scripts/use_*"))}
# Whole programs, each with the command that npm installs. The tests' own Python runs their scripts.
AGENTS = {"codex": "codex", "claude_code": "claude"}
CLIENTS = tuple(client for client in SCRIPTS if client not in AGENTS)
NPM_FILES = ("package.json", "package-lock.json")
OTHERS = ("OPENAI_", "ANTHROPIC_", "LORAPLEX_")
INSTALL_S = 900.0
RUN_S = 300.0


class NotInstalled(Exception):
    """A client's packages cannot be had: the package index is away or refuses, or there is no npm."""


def command_of(client: str) -> list[str]:
    """The command that runs the client's script, in an environment that it makes first. Raises `NotInstalled`."""
    folder, script = _environment(client), SCRIPTS[client]
    if client in AGENTS:
        return [sys.executable, str(script), str(folder / "node_modules" / ".bin" / AGENTS[client])]
    if script.suffix == ".mjs":
        # Node resolves imports from where the script lies.
        return ["node", str(shutil.copy(str(script), folder))]
    return [str(folder / "bin" / "python"), str(script)]


def needs_node(client: str) -> bool:
    """Whether the client is of npm."""
    return _pins_of(client).is_dir()


def version_of(client: str) -> str:
    """The client's package and version, as pinned."""
    if needs_node(client):
        pins = json.loads((_pins_of(client) / "package.json").read_text())["dependencies"]
        return ", ".join(f"{package} {version}" for package, version in pins.items())
    return _pins_of(client).read_text().splitlines()[0].removeprefix("# ")


def variables(base_url: str, api_key: str, model: str, tokenizer: Path | None = None) -> dict[str, str]:
    """The environment variables of a script."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(OTHERS)},
        "CLIENT_BASE_URL": base_url,
        "CLIENT_API_KEY": api_key,
        "CLIENT_MODEL": model,
        "CLIENT_TOKENIZER": str(tokenizer),
        # Its prices of others' models are not fetched.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _pins_of(client: str) -> Path:
    found = [path for path in PINS.iterdir() if f"{client}_".startswith(f"{path.stem}_")]
    return max(found, key=lambda path: len(path.stem))


def _environment(client: str) -> Path:
    pins = _pins_of(client)
    files = [pins / name for name in NPM_FILES] if pins.is_dir() else [pins]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"loraplex-clients-{os.getuid()}" / f"{pins.stem}-{digest}"
    complete = folder / "complete"
    if complete.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    if pins.is_dir():
        for path in files:
            shutil.copy(path, folder)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--prefix", str(folder)]
    else:
        venv.create(folder, with_pip=True)
        python = str(folder / "bin" / "python")
        command = [python, "-m", "pip", "install", "-q", "--no-compile", "-r", str(pins)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{client} cannot be installed: {error}") from error
    if done.returncode != 0:
        raise NotInstalled(f"{client} cannot be installed from the package index: {done.stderr[-2000:]}")
    complete.touch()
    return folder
