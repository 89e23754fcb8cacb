"""Validates a folder of PEFT's two files. Imports no torch and executes none of its content.

Invariant: the folder has the two files only, each under one name, so that what was read is what will be stored.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from loraplex.adapters.digest import adapter_digest
from loraplex.adapters.errors import (
    AdapterRejected,
    FolderRejected,
    HeaderRejected,
    PeftConfigRejected,
    TensorsRejected,
)
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.report import Check, ValidationReport
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE
from loraplex.adapters.storage.safe_files import hash_regular, read_regular
from loraplex.adapters.target_modules import AdaptableModule
from loraplex.adapters.validation.checks import validate_adapter
from loraplex.adapters.validation.peft_config import PeftConfig, parse_manifest
from loraplex.adapters.validation.result import Validated, ValidationResult, refused, refused_by

PICKLE_FILE = "adapter_model.bin"
FILES_PASSED = Check("files", True, f"the folder holds {CONFIG_FILE} and {WEIGHTS_FILE} and nothing else")
MANIFEST_PASSED = Check("manifest", True, "adapter_config.json describes a plain LoRA")


def examine(
    folder: Path, modules: Mapping[str, AdaptableModule], base_model_digest: str, limits: AdapterLimits
) -> Validated:
    """Run every check; `modules` are those of `adaptable_modules`.

    Raises `AdapterRejected`, or `EOFError` when a file shrinks.
    """
    _check_folder(folder)
    manifest = parse_manifest(read_regular(folder / CONFIG_FILE, max_bytes=limits.max_config_bytes), limits)
    weights = folder / WEIGHTS_FILE
    report = after_files(validate_adapter(weights, manifest, modules, limits))
    canonical = manifest.canonical()
    sha256 = hash_regular(weights, max_bytes=limits.max_weights_bytes)
    return Validated(
        digest=adapter_digest(canonical, sha256, base_model_digest),
        rank=max_rank(manifest),
        config=manifest.document(),
        canonical=canonical,
        size_bytes=weights.stat().st_size,
        report=report,
    )


def validate_folder(
    folder: Path, modules: Mapping[str, AdaptableModule], base_model_digest: str, limits: AdapterLimits
) -> ValidationResult:
    """Run `examine` and return a rejection as its result."""
    try:
        return examine(folder, modules, base_model_digest, limits)
    except TensorsRejected as error:
        return replace(refused_by(error), report=after_files(error.report))
    except HeaderRejected as error:
        return refused_by(error, ValidationReport((FILES_PASSED, MANIFEST_PASSED)))
    except PeftConfigRejected as error:
        return refused_by(error, ValidationReport((FILES_PASSED,)))
    except AdapterRejected as error:
        return refused_by(error)
    except EOFError:
        return refused("files", WEIGHTS_FILE, "became shorter while it was read")
    except MemoryError:
        return refused("memory", WEIGHTS_FILE, "takes more memory to read than is allowed")


def after_files(report: ValidationReport) -> ValidationReport:
    """Return the report with the check of the folder in front."""
    return ValidationReport((FILES_PASSED, *report.checks))


def max_rank(manifest: PeftConfig) -> int:
    return max((manifest.rank, *manifest.rank_pattern.values()))


def _check_folder(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        raise FolderRejected(folder.name, f"is not a folder of {CONFIG_FILE} and {WEIGHTS_FILE}")
    names = sorted(os.listdir(folder))
    if PICKLE_FILE in names:
        raise FolderRejected(PICKLE_FILE, f"is a pickle; save the adapter as {WEIGHTS_FILE}")
    for name in names:
        if name not in (CONFIG_FILE, WEIGHTS_FILE):
            raise FolderRejected(
                repr(name[:100]), f"is not one of the two files: {CONFIG_FILE}, {WEIGHTS_FILE}"
            )
        if os.lstat(folder / name).st_nlink > 1 and (folder / name).is_file():
            raise FolderRejected(
                name, "has another hard link, through which it could change after it was checked"
            )
