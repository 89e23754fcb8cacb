"""Validates PEFT's two files through their descriptors. Imports no torch and executes none of their content.

Invariant: it opens no file and reads no environment, so that it runs where neither is possible.
"""

from msgspec.structs import replace

from loraplex.adapters.digest import adapter_digest
from loraplex.adapters.errors import AdapterRejected, HeaderRejected, PeftConfigRejected, TensorsRejected
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.report import Check, ValidationReport
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE
from loraplex.adapters.storage.safe_files import hash_descriptor, read_exactly
from loraplex.adapters.target_modules import BaseModel
from loraplex.adapters.validation.checks import MANIFEST_PASSED, validate_adapter
from loraplex.adapters.validation.peft_config import parse_manifest
from loraplex.adapters.validation.result import Validated, ValidationResult, refused, refused_by
from loraplex.adapters.validation.upload_files import UploadFiles

FILES_PASSED = Check("files", True, f"the folder holds {CONFIG_FILE} and {WEIGHTS_FILE} and nothing else")


def examine(files: UploadFiles, base: BaseModel, limits: AdapterLimits) -> Validated:
    """Run every check. Raises `AdapterRejected`, or `EOFError` when a file shrinks."""
    manifest = parse_manifest(read_exactly(*files.config, offset=0), limits)
    report, matched = validate_adapter(files.weights, manifest, base, limits)
    canonical = matched.config.canonical()
    if len(canonical) > limits.max_config_bytes:
        raise PeftConfigRejected(
            CONFIG_FILE,
            f"its names, and those of tensors that differ from PEFT's, take more than {limits.max_config_bytes} bytes",
        )
    sha256 = hash_descriptor(*files.weights)
    return Validated(
        digest=adapter_digest(canonical, sha256, base.digest),
        rank=max(pair.rank for pair in matched.pairs),
        config=matched.config.document(),
        canonical=canonical,
        size_bytes=files.weights.size,
        report=after_files(report),
    )


def validate_files(files: UploadFiles, base: BaseModel, limits: AdapterLimits) -> ValidationResult:
    """Run `examine` and return a rejection as its result."""
    try:
        return examine(files, base, limits)
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
