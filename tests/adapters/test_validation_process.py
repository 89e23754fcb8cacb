"""Validation in separate processes: a corpus of bad uploads, forbidden system calls, and how processes end."""

import ast
import asyncio
import errno
import os
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.adapters.validation.bad_folders import BAD_UPLOADS, FILES, BadUpload
from tests.adapters.validation.good_folder import LIMITS, MODEL, write_good
from tests.grammar.process_table import children, command_line

from loraplex.adapters.confinement import SandboxLimits
from loraplex.adapters.errors import ValidationUnavailable
from loraplex.adapters.target_modules import adaptable_modules
from loraplex.adapters.validation.result import Rejected, Validated, ValidationResult
from loraplex.adapters.validation.validate import validate_folder
from loraplex.adapters.validation_process import MODULE, ValidationProcesses

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
MODULES = tuple(adaptable_modules(MODEL).values())
BASE_DIGEST = "b" * 64
TENANT = UUID(int=1)
MISBEHAVING = "tests.adapters.misbehaving_validation"


def processes(
    module: str = MODULE, environment: dict[str, str] | None = None, **limits: Any
) -> ValidationProcesses:
    return ValidationProcesses(
        MODULES,
        BASE_DIGEST,
        environment=environment or dict(os.environ),
        limits=SandboxLimits(**({"concurrent_per_tenant": 2} | limits)),
        adapter_limits=LIMITS,
        module=module,
    )


def good_folder(parent: Path, name: str = "good") -> Path:
    folder = parent / name
    write_good(folder)
    return folder


def separately_validated() -> set[str]:
    """Return the uploads that get a process: those with improper files, and every second of the others.

    The rest are validated by the same function here, since a process takes a quarter of a second to start.
    """
    files = {upload.name for upload in FILES}
    others = [name for name in BAD_UPLOADS if name not in files]
    return files | set(others[::2])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ValidationResult]:
    """Results of the whole corpus, two at a time as in a server, and of a good upload under the name ""."""
    parent = tmp_path_factory.mktemp("uploads")
    folders = {"": good_folder(parent)}
    for number, upload in enumerate(BAD_UPLOADS.values()):
        folders[upload.name] = good_folder(parent, f"u{number}")
        upload.spoil(folders[upload.name])
    by_process = {name: folder for name, folder in folders.items() if name in {"", *separately_validated()}}

    async def validate() -> list[ValidationResult]:
        pool = processes(queued_per_tenant=len(by_process))
        return await asyncio.gather(*(pool.validate(TENANT, folder) for folder in by_process.values()))

    modules = adaptable_modules(MODEL)
    here = {
        name: validate_folder(folder, modules, BASE_DIGEST, LIMITS)
        for name, folder in folders.items()
        if name not in by_process
    }
    return here | dict(zip(by_process, asyncio.run(validate()), strict=True))


def test_a_good_upload_is_identified_by_its_content(results: dict[str, ValidationResult]) -> None:
    result = results[""]
    assert isinstance(result, Validated)
    assert len(result.digest) == 64 and result.rank == 4 and result.report.passed
    assert result.config["target_modules"] == ["q_proj"]
    assert "base_model_name_or_path" not in result.config and b"passwd" not in result.canonical
    assert [check.name for check in result.report.checks][:3] == ["files", "manifest", "header"]


def test_the_corpus_is_large_and_every_refusal_is_distinct(results: dict[str, ValidationResult]) -> None:
    assert len(separately_validated()) >= 40
    refused = [result for result in results.values() if isinstance(result, Rejected)]
    assert len({(each.check, each.subject, each.message) for each in refused}) > 0.9 * len(BAD_UPLOADS)


@pytest.mark.parametrize("upload", BAD_UPLOADS.values(), ids=lambda upload: upload.name)
def test_a_bad_upload_is_refused_by_name(results: dict[str, ValidationResult], upload: BadUpload) -> None:
    result, good = results[upload.name], results[""]
    assert isinstance(result, Rejected)
    assert (result.check, True) == (upload.check, upload.message in result.message), result.message
    assert upload.subject in result.subject
    *passed, failed = result.report.checks
    assert failed.name == upload.check and not failed.passed and all(check.passed for check in passed)
    assert upload.check == "files" or passed[0].name == "files"
    assert (result.peak_bytes > 0) == (upload.name in separately_validated())
    assert result.peak_bytes - good.peak_bytes < 32 * MIB, "memory is flat whatever is uploaded"


async def result_of_misbehaving(behaviour: str, parent: Path, **limits: Any) -> ValidationResult:
    """Return the result for a process that misbehaves."""
    return await misbehaving(behaviour, **limits).validate(
        TENANT, good_folder(parent, behaviour or "nothing")
    )


def misbehaving(behaviour: str, **limits: Any) -> ValidationProcesses:
    environment = {
        **os.environ,
        "BEHAVIOUR": behaviour,
        "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, sys.path))),
    }
    return processes(MISBEHAVING, environment, **limits)


async def test_what_the_process_may_not_do(tmp_path: Path) -> None:
    result = await result_of_misbehaving("", tmp_path)
    assert isinstance(result, Rejected) and result.subject == "deeds"
    outcomes = ast.literal_eval(result.message)
    forbidden = (
        *("socket", "socketpair", "exec", "fork", "signal", "io_uring", "ptrace"),
        *("remove", "rename", "link", "mode", "cut", "folder", "limits"),
        *("write", "append", "update", "empty", "create", "nameless", "older", "times", "device"),
        *("owner", "owner signal", "owner group", "asynchronous", "lock", "shared memory", "scheduling"),
    )
    assert {name: outcomes[name] for name in forbidden} == dict.fromkeys(forbidden, os.strerror(errno.EPERM))
    assert outcomes["files"] == os.strerror(errno.EMFILE)
    assert outcomes["read"] == outcomes["flags"] == "done"
    assert outcomes["core"] != "done"
    assert (outcomes["niceness"], outcomes["torch"]) == ("19", "False")


@pytest.mark.parametrize(
    ("behaviour", "check", "message", "limits"),
    [
        ("spin", "cpu", "takes more than 1 s of CPU time", {"cpu_s": 1}),
        ("sleep", "deadline", "was not read to its end within 1 s", {"deadline_s": 1.0}),
        ("abort", "process", "was ended by", {}),
        ("exit", "process", "crashed", {}),
        ("silent", "process", "gave no result", {}),
        ("allocate", "memory", "takes more memory to read than is allowed", {}),
        ("babble", "memory", "was killed", {}),
    ],
)
async def test_a_process_that_goes_wrong_refuses_its_upload_alone(
    tmp_path: Path, behaviour: str, check: str, message: str, limits: dict[str, Any]
) -> None:
    result = await asyncio.wait_for(result_of_misbehaving(behaviour, tmp_path, **limits), 60)
    assert isinstance(result, Rejected)
    assert result.check == check
    assert message in result.message and not result.report.passed
    assert not validations()


def validations() -> list[int]:
    return [pid for pid in children(os.getpid()) if b"validation" in command_line(pid)]


async def test_cancelling_kills_the_process_and_makes_room(tmp_path: Path) -> None:
    pool = misbehaving("sleep", concurrent=1)
    running = asyncio.create_task(pool.validate(TENANT, good_folder(tmp_path)))
    waiting = asyncio.create_task(pool.validate(TENANT, tmp_path))
    async with asyncio.timeout(60):
        while not validations():
            await asyncio.sleep(0.01)
    assert pool.waiting == 1
    for task in (waiting, running):
        task.cancel()
    await asyncio.gather(waiting, running, return_exceptions=True)
    assert waiting.cancelled() and running.cancelled()
    assert not validations() and pool.waiting == 0


async def test_tenants_alternate_and_the_queue_is_bounded(tmp_path: Path) -> None:
    pool = misbehaving("nap", concurrent=1, concurrent_per_tenant=1, queued_per_tenant=2, queued=3)
    folder, other, ended = good_folder(tmp_path), UUID(int=2), list[UUID]()

    async def validate(tenant: UUID) -> None:
        await pool.validate(tenant, folder)
        ended.append(tenant)

    tasks = [asyncio.create_task(validate(tenant)) for tenant in (TENANT, TENANT, TENANT, other)]
    await asyncio.sleep(0)
    with pytest.raises(ValidationUnavailable, match="2 uploads of this tenant wait"):
        await pool.validate(TENANT, folder)
    with pytest.raises(ValidationUnavailable, match="3 uploads wait"):
        await pool.validate(UUID(int=3), folder)
    await asyncio.gather(*tasks)
    assert ended == [TENANT, TENANT, other, TENANT]


async def test_a_process_that_cannot_be_confined_reads_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValidationUnavailable, match="cannot be confined here: 2 threads"):
        await result_of_misbehaving("thread", tmp_path)
