"""Each client in an environment of its own, outside the tree, as its users install it.

`requirements/<client>.txt` pins a Python client with all that it needs, `requirements/ai/` the npm packages; `scripts/use_<client>`
uses it. An environment is made once for each content of its pins.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
PINS = HERE / "requirements"
PYTHON_CLIENTS = tuple(sorted(path.stem for path in PINS.glob("*.txt")))
NPM_CLIENT = "ai"
CLIENTS = (*PYTHON_CLIENTS, NPM_CLIENT)
NPM_FILES = ("package.json", "package-lock.json")
INSTALL_S = 900.0
RUN_S = 300.0


class NotInstalled(Exception):
    """A client's packages cannot be had: the package index is away or refuses, or there is no npm."""


def command_of(client: str) -> list[str]:
    """The command that runs the client's script, in an environment that it makes first. Raises `NotInstalled`."""
    if client == NPM_CLIENT:
        folder = _environment(client, *(PINS / NPM_CLIENT / name for name in NPM_FILES))
        # Node resolves imports from where the script lies.
        script = shutil.copy(HERE / "scripts" / "use_ai.mjs", folder)
        return ["node", str(script)]
    folder = _environment(client, PINS / f"{client}.txt")
    return [str(folder / "bin" / "python"), str(HERE / "scripts" / f"use_{client}.py")]


def version_of(client: str) -> str:
    """The client's package and version, as pinned."""
    if client == NPM_CLIENT:
        pins = json.loads((PINS / NPM_CLIENT / "package.json").read_text())["dependencies"]
        return ", ".join(f"{package} {version}" for package, version in pins.items())
    return (PINS / f"{client}.txt").read_text().splitlines()[0].removeprefix("# ")


def variables(base_url: str, api_key: str, model: str, tokenizer: Path) -> dict[str, str]:
    """The environment variables of a script."""
    return {
        **{
            name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "LORAPLEX_"))
        },
        "CLIENT_BASE_URL": base_url,
        "CLIENT_API_KEY": api_key,
        "CLIENT_MODEL": model,
        "CLIENT_TOKENIZER": str(tokenizer),
        # Its prices of others' models are not fetched.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _environment(client: str, *pins: Path) -> Path:
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in pins)).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"loraplex-clients-{os.getuid()}" / f"{client}-{digest}"
    complete = folder / "complete"
    if complete.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    if client == NPM_CLIENT:
        for path in pins:
            shutil.copy(path, folder)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--prefix", str(folder)]
    else:
        venv.create(folder, with_pip=True)
        command = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "-q",
            "--no-compile",
            "-r",
            str(pins[0]),
        ]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{client} cannot be installed: {error}") from error
    if done.returncode != 0:
        raise NotInstalled(f"{client} cannot be installed from the package index: {done.stderr[-2000:]}")
    complete.touch()
    return folder
