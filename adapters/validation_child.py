"""Entry point of one validation: `python -m loraplex.adapters.validation_child`, job on standard input, reply on
output.

Invariant: it confines itself before it reads from the upload's two descriptors; from then on it can open nothing. Its
environment is empty, and it imports no torch.
"""

import os
import sys
from collections.abc import Callable
from typing import Final, NoReturn, TypeAlias

import msgspec

from loraplex.adapters.confinement import SandboxLimits, confine, discard_standard_error
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.target_modules import AdaptableModule
from loraplex.adapters.validation.result import Rejected, Validated
from loraplex.adapters.validation.upload_files import UploadFiles
from loraplex.adapters.validation.validate import validate_files

BROKEN_STATUS: Final = 70


class ValidationJob(msgspec.Struct, frozen=True, kw_only=True):
    """The content of standard input. `files` are descriptors that this process has inherited."""

    parent_pid: int
    files: UploadFiles
    modules: tuple[AdaptableModule, ...]
    base_model_digest: str
    adapter_limits: AdapterLimits
    limits: SandboxLimits


class Unconfined(msgspec.Struct, frozen=True, tag="unconfined"):
    """This machine cannot enforce the limits of a validation; nothing was read."""

    reason: str


Reply: TypeAlias = Validated | Rejected | Unconfined

encode: Final = msgspec.json.Encoder().encode
decode_job: Final[Callable[[bytes], ValidationJob]] = msgspec.json.Decoder(ValidationJob).decode
decode_reply: Final[Callable[[bytes], Reply]] = msgspec.json.Decoder(Reply).decode


def main() -> NoReturn:
    """Read the job, confine, validate, reply."""
    status = BROKEN_STATUS
    try:
        _write(validate_job(decode_job(sys.stdin.buffer.read())))
        status = 0
    finally:
        # Skip the interpreter's shutdown, which would process untrusted data once more.
        os._exit(status)


def validate_job(job: ValidationJob) -> Reply:
    """Confine this process and validate the files."""
    try:
        os.environ.clear()
        discard_standard_error()
        confine(job.limits, job.parent_pid)
    except (OSError, ValueError) as error:
        return Unconfined(str(error))
    modules = {module.path: module for module in job.modules}
    return validate_files(job.files, modules, job.base_model_digest, job.adapter_limits)


def _write(document: Reply) -> None:
    left = memoryview(encode(document))
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    main()
