"""Adapters, their versions, aliases and uploads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict
from uuid import UUID

from pydantic import ConfigDict, Field

from loraplex.tenants.canaries.records import GuardDocument
from loraplex.tenants.records import Record, UtcTime

if TYPE_CHECKING:
    from loraplex.tenants.models import AdapterAlias, AdapterVersion, Upload, UploadPart

WHOLE: Final = 100
"""The percents of all requests, which the weights of an alias sum to."""
MAX_TARGETS: Final = 10
ABSENT: Final = 0
"""The generation of an alias that does not exist."""
MAX_VERSION: Final = 2**31 - 1
SERVING_STATES: Final = ("ready", "deprecated")
ReasoningStyle: TypeAlias = str | dict[str, str]
"""How a version thinks: "none", "think", or its own markers as `{"start": text, "end": text}`."""


@dataclass(frozen=True, slots=True)
class AdapterProfile:
    """`tool_style` and `reasoning_style` None: the base model's. `defaults`: parameters for requests that set none. `decision`: how
    its decisions read options, as `{"read": "labels" or "values"}`; None: by labels.
    """

    tool_style: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reasoning_style: ReasoningStyle | None = None
    decision: Mapping[str, str] | None = None


class ProfileChange(TypedDict, total=False):
    """The fields to change; an absent one is kept."""

    tool_style: str | None
    reasoning_style: ReasoningStyle | None
    defaults: Mapping[str, Any]
    decision: Mapping[str, str] | None


class AdapterDocument(Record):
    """`revision` is the ETag of the adapter."""

    name: str
    description: str
    created_at: UtcTime
    revision: int


class CheckDocument(Record):
    """One check of the validation. `warning`: the check passed, but its detail should be read."""

    model_config = ConfigDict(extra="allow")

    name: str
    passed: bool
    detail: str
    warning: bool = False


class ReportDocument(Record):
    """The checks in their order, up to the first that failed. `system_fingerprint`: of the engine that probed the version; null
    without a probe.
    """

    checks: list[CheckDocument] = Field(default_factory=list)
    system_fingerprint: str | None = None


class VersionDocument(Record):
    """`digest`, `rank` and `config` are null until the files were validated. `revision` is the ETag."""

    name: str
    version: int
    digest: str | None
    state: str
    rank: int | None
    size_bytes: int
    config: dict[str, Any] | None
    report: ReportDocument
    tool_style: str | None
    reasoning_style: ReasoningStyle | None
    defaults: dict[str, Any]
    decision: dict[str, str] | None
    created_by: str | None
    created_at: UtcTime
    revision: int

    @classmethod
    def of(cls, name: str, row: "AdapterVersion") -> "VersionDocument":
        """Return the version of a row, which has all but the adapter's name."""
        return cls(name=name, **{field: getattr(row, field) for field in cls.model_fields if field != "name"})


def decision_read(decision: Mapping[str, str] | None) -> str:
    """Return how decisions read options, `labels` or `values`, from the profile's field."""
    return "labels" if decision is None else decision["read"]


class CalibrationDocument(Record):
    """The temperatures of a version's decisions by type of question, and what they were found by.

    They hold for one adapter's weights (`digest`), one base model (`system_fingerprint`), one wording (`format`) and one way to read
    options (`read`), and are void for any other. `sha256`: of all these; its first digits stand in the header `x-loraplex-decision-calibration`.
    """

    digest: str
    system_fingerprint: str
    format: str
    read: str
    temperatures: dict[str, float]
    report: dict[str, Any]
    sha256: str
    created_at: UtcTime


class ShareDocument(Record):
    version: int
    weight: int


class AliasDocument(Record):
    """`version`: the version of all requests, null for a split. `previous`: the target of a rollback. `revision`: the ETag.
    `guard`: that of the present split, null without one.
    """

    name: str
    alias: str
    version: int | None
    split: list[ShareDocument]
    previous: list[ShareDocument] | None
    updated_at: UtcTime
    revision: int
    guard: GuardDocument | None = None

    @classmethod
    def of(
        cls,
        name: str,
        row: "AdapterAlias",
        targets: Mapping[int, int],
        previous: Mapping[int, int] | None,
        guard: GuardDocument | None = None,
    ) -> "AliasDocument":
        """Return an alias of the adapter `name`. `targets` and `previous`: version -> weight in percent."""
        return cls(
            name=name,
            alias=row.alias,
            version=next(iter(targets)) if len(targets) == 1 else None,
            split=_shares(targets),
            previous=None if previous is None else _shares(previous),
            updated_at=row.updated_at,
            revision=row.generation,
            guard=guard,
        )

    @property
    def targets(self) -> dict[int, int]:
        """Version -> weight in percent."""
        return {share.version: share.weight for share in self.split}

    @property
    def previous_targets(self) -> dict[int, int]:
        """The same of a rollback; empty where there is nothing to go back to."""
        return {share.version: share.weight for share in self.previous or ()}

    @property
    def baseline(self) -> int:
        """The version that a guard goes back to: that of the present guard, or the main one."""
        return self.main_version if self.guard is None else self.guard.baseline

    @property
    def main_version(self) -> int:
        """The version with the largest share; the newer of two with equal shares."""
        return max(self.split, key=lambda share: (share.weight, share.version)).version


class FileDocument(Record):
    """`parts`: the number of parts, numbered from 1. All but the last have the upload's `part_size` bytes."""

    name: str
    size: int
    sha256: str
    parts: int


class PartDocument(Record):
    file: str
    number: int
    size: int
    sha256: str


class UploadDocument(Record):
    """`received` lists the stored parts. `version`: the version that the completed upload created."""

    id: UUID
    adapter: str
    state: str
    part_size: int
    expires_at: UtcTime
    files: list[FileDocument]
    received: list[PartDocument]
    version: int | None

    @classmethod
    def of(cls, upload: "Upload", adapter: str, parts: Sequence["UploadPart"] = ()) -> "UploadDocument":
        """Return an upload to `adapter`, with its stored parts."""
        return cls(
            id=upload.id,
            adapter=adapter,
            state=upload.state,
            part_size=upload.part_size,
            expires_at=upload.expires_at,
            files=[
                FileDocument(**file, parts=part_count(file["size"], upload.part_size))
                for file in upload.files
            ],
            received=[
                PartDocument(file=part.file, number=part.number, size=part.size_bytes, sha256=part.sha256)
                for part in parts
            ],
            version=upload.version,
        )


class OpenUpload(Record):
    """An upload that waits for parts. `files`: name, size in bytes, SHA-256 in hexadecimal digits. `received` in bytes."""

    id: UUID
    created_by: str | None
    expires_at: UtcTime
    files: list[tuple[str, int, str]]
    size_bytes: int
    received_bytes: int


class AcceptedVersion(Record):
    """`digest` is null until validation has computed it."""

    name: str
    version: int
    digest: str | None
    state: str


def part_count(size: int, part_bytes: int) -> int:
    """Return into how many parts a file of `size` >= 1 bytes is split."""
    return -(-size // part_bytes)


def _shares(targets: Mapping[int, int]) -> list[ShareDocument]:
    return [ShareDocument(version=version, weight=targets[version]) for version in sorted(targets)]
