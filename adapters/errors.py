"""Every error of a tenant's adapter files. Nothing here knows HTTP.

AdaptersError
├── AdapterRejected         bytes that are not an adapter for this base model: check, subject, message
│   ├── FolderRejected      a file is missing, too large, a link or not a regular file
│   ├── PeftConfigRejected  adapter_config.json; the subject is the field
│   ├── HeaderRejected      the safetensors header; the subject is the tensor, or the file
│   ├── TensorsRejected     the tensors do not fit the configuration or the base model; has the report so far
│   └── VersionRejected     the result of a whole validation or probe; has the report of all checks
├── ValidationUnavailable   no result now: too many uploads wait, or this machine cannot validate
│   └── ValidationShareExceeded  as many versions of the tenant wait as may
├── MalformedJson           bytes that are not one strict JSON document
├── UploadRefused           uploaded files that are not as declared or allowed; the subject is the file
│   ├── UploadTooLarge
│   ├── PartRefused         a number or size that the upload's files do not have
│   ├── ChecksumMismatch
│   └── PartsMissing        the upload cannot be completed yet
└── StorageError
    ├── BlobMissing         no stored adapter under this tenant and digest
    ├── BlobCorrupt         a stored adapter whose content does not match its digest
    ├── BlobStoreUnavailable  the folder or bucket of blobs cannot be read or written now
    └── StorageFull         the disk is full, or its free space is at the floor
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loraplex.adapters.report import ValidationReport


class AdaptersError(Exception):
    """Base of all errors of the adapters package."""


class AdapterRejected(AdaptersError):
    """`check` names the failed check, `subject` the file, field or tensor, `message` what is wrong and allowed."""

    def __init__(self, check: str, subject: str, message: str) -> None:
        super().__init__(f"{subject}: {message}")
        self.check = check
        self.subject = subject
        self.message = message


class FolderRejected(AdapterRejected):
    def __init__(self, subject: str, message: str) -> None:
        super().__init__("files", subject, message)


class PeftConfigRejected(AdapterRejected):
    """`field` is the key of adapter_config.json."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__("manifest", field, message)
        self.field = field


class HeaderRejected(AdapterRejected):
    def __init__(self, subject: str, message: str) -> None:
        super().__init__("header", subject, message)


Problem = tuple[str, str]
"""(the tensor, module or field, what is wrong with it)"""


class TensorsRejected(AdapterRejected):
    def __init__(self, check: str, subject: str, message: str, report: "ValidationReport") -> None:
        super().__init__(check, subject, message)
        self.report = report


class VersionRejected(TensorsRejected):
    pass


class ValidationUnavailable(AdaptersError):
    pass


class ValidationShareExceeded(ValidationUnavailable):
    """As many versions of the tenant wait as may."""

    limit = "waiting_versions"


class MalformedJson(AdaptersError):
    """Not UTF-8, not JSON, a repeated key, NaN or infinity, or nested too deeply."""


class UploadRefused(AdaptersError):
    """`subject` is the file or header at fault."""

    def __init__(self, subject: str, message: str) -> None:
        super().__init__(f"{subject}: {message}")
        self.subject = subject


class UploadTooLarge(UploadRefused):
    pass


class PartRefused(UploadRefused):
    pass


class ChecksumMismatch(UploadRefused):
    pass


class PartsMissing(UploadRefused):
    pass


class StorageError(AdaptersError):
    """Base of the errors of adapter storage."""


class BlobMissing(StorageError):
    pass


class BlobCorrupt(StorageError):
    pass


class BlobStoreUnavailable(StorageError):
    pass


class StorageFull(StorageError):
    pass
