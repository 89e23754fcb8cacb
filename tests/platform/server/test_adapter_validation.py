"""Validation in separate processes: a corpus of bad uploads, what the process reaches, and how processes end."""

import ast
import asyncio
import errno
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import uvloop
from msgspec import structs
from structlog.testing import capture_logs
from tests.adapters.validation.bad_folders import BAD_UPLOADS, BadUpload
from tests.adapters.validation.good_folder import CONFIG, LIMITS, MODEL, WEIGHTS, write_good
from tests.platform.process_table import children, command_line

from loraplex.adapters.errors import FolderRejected, ValidationUnavailable
from loraplex.adapters.target_modules import BaseModel, adaptable_modules
from loraplex.adapters.validation.result import Rejected, Validated, ValidationResult, refused_by
from loraplex.adapters.validation.upload_files import UploadFiles, open_upload
from loraplex.platform.server.adapter_validation import AdapterValidation, validation_task
from loraplex.platform.workers.messages import Done
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import Sandbox

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
BASE_DIGEST = "b" * 64
TENANT = UUID(int=1)
MISBEHAVING = "tests.platform.server.misbehaving_validation"
THREADED = "tests.platform.server.threaded_validation"
FLAT = 32 * MIB
"""The address space that a validation may add to that of its process; by default it is eight times as much."""


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    await pool.close()
    assert not validations()


def validation(pool: WorkerPool, module: str | None = None, **changes: Any) -> AdapterValidation:
    """A validation with another task: a function of a test module, other bounds of the queue or the sandbox."""
    task = replace(validation_task(), concurrent_per_tenant=2)
    if module is not None:
        environment = {"PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, sys.path)))}
        task = replace(task, function=f"{module}:validate_files", environment=environment)
    sandbox = {name: changes.pop(name) for name in Sandbox.__struct_fields__ if name in changes}
    task = replace(task, sandbox=structs.replace(task.sandbox, **sandbox), **changes)
    return AdapterValidation(pool, BaseModel(adaptable_modules(MODEL), BASE_DIGEST), LIMITS, task)


def good_folder(parent: Path, name: str = "good") -> Path:
    folder = parent / name
    write_good(folder)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ValidationResult]:
    """Results of the whole corpus, and of a good upload under the name "".

    Every upload is read behind the filter, where nothing can be imported any more; most of them by one process, since a
    process takes a quarter of a second to start. Memory is flat whatever is uploaded: `FLAT` suffices for each.
    """
    parent = tmp_path_factory.mktemp("uploads")
    folders = {"": good_folder(parent)}
    for number, upload in enumerate(BAD_UPLOADS.values()):
        folders[upload.name] = good_folder(parent, f"u{number}")
        upload.spoil(folders[upload.name])
    own = {"", *list(BAD_UPLOADS)[::8]}

    async def validate() -> dict[str, ValidationResult]:
        pool = WorkerPool()
        checks = validation(pool, queued_per_tenant=len(own), address_space_bytes=FLAT)
        separately = await asyncio.gather(*(checks.validate(TENANT, folders[name]) for name in own))
        rest = {name: folder for name, folder in folders.items() if name not in own}
        return dict(zip(own, separately, strict=True)) | await by_one_process(pool, rest)

    return asyncio.run(validate())


async def by_one_process(pool: WorkerPool, folders: dict[str, Path]) -> dict[str, ValidationResult]:
    results: dict[str, ValidationResult] = {}
    with ExitStack() as stack:
        opened: dict[str, UploadFiles] = {}
        for name, folder in folders.items():
            try:
                opened[name] = stack.enter_context(open_upload(folder, LIMITS))
            except FolderRejected as error:
                results[name] = refused_by(error)
        task = replace(
            validation(pool, MISBEHAVING, address_space_bytes=FLAT).task,
            function=f"{MISBEHAVING}:validate_uploads",
            result=list[ValidationResult],
        )
        files = nullcontext([file for upload in opened.values() for file in upload])
        reply: Any = await pool.run(
            task, (BaseModel(adaptable_modules(MODEL), BASE_DIGEST), LIMITS), TENANT, files=files
        )
    assert isinstance(reply, Done), reply
    return results | dict(zip(opened, reply.result, strict=True))


def test_a_good_upload_is_identified_by_its_content(results: dict[str, ValidationResult]) -> None:
    result = results[""]
    assert isinstance(result, Validated)
    assert len(result.digest) == 64 and result.rank == 4 and result.report.passed
    assert result.config["target_modules"] == ["q_proj"]
    assert "base_model_name_or_path" not in result.config and b"passwd" not in result.canonical
    assert [check.name for check in result.report.checks][:3] == ["files", "manifest", "header"]


def test_the_corpus_is_large_and_every_refusal_is_distinct(results: dict[str, ValidationResult]) -> None:
    assert len(BAD_UPLOADS) >= 80
    refused = [result for result in results.values() if isinstance(result, Rejected)]
    assert len({(each.check, each.subject, each.message) for each in refused}) > 0.9 * len(BAD_UPLOADS)


@pytest.mark.parametrize("upload", BAD_UPLOADS.values(), ids=lambda upload: upload.name)
def test_a_bad_upload_is_refused_by_name(results: dict[str, ValidationResult], upload: BadUpload) -> None:
    result = results[upload.name]
    assert isinstance(result, Rejected)
    assert (result.check, True) == (upload.check, upload.message in result.message), result.message
    assert upload.subject in result.subject
    *passed, failed = result.report.checks
    assert failed.name == upload.check and not failed.passed and all(check.passed for check in passed)
    assert upload.check == "files" or passed[0].name == "files"


async def result_of_misbehaving(
    pool: WorkerPool, behaviour: str, parent: Path, **changes: Any
) -> ValidationResult:
    """Return the result for a process that misbehaves."""
    checks = validation(pool, MISBEHAVING, **changes)
    return await checks.validate(TENANT, hostile_folder(parent, behaviour))


def hostile_folder(parent: Path, behaviour: str) -> Path:
    folder = good_folder(parent, behaviour or "nothing")
    (folder / CONFIG).write_text(json.dumps({"behaviour": behaviour, "folder": str(folder)}))
    return folder


async def test_what_the_process_may_not_do(pool: WorkerPool, tmp_path: Path) -> None:
    good_folder(tmp_path, "other")
    result = await result_of_misbehaving(pool, "", tmp_path)
    assert isinstance(result, Rejected) and result.subject == "deeds"
    outcomes = ast.literal_eval(result.message)
    of_the_file = {
        "change config": os.strerror(errno.EBADF),
        "change weights": os.strerror(errno.EBADF),
        "map to write": os.strerror(errno.EACCES),
        # `resource` reports EPERM so.
        "core": "ValueError",
        "descriptors": "ValueError",
    }
    refusals = outcomes["refusals"]
    assert len(refusals) >= 50
    assert refusals == dict.fromkeys(refusals, os.strerror(errno.EPERM)) | of_the_file
    assert outcomes["environment"] == {}
    assert len(outcomes["readable"]) == 2
    assert outcomes["torch"] is False


def test_the_files_reach_it_from_the_event_loop_of_a_gateway(tmp_path: Path) -> None:
    """uvloop starts processes by itself."""

    async def validate() -> ValidationResult:
        return await validation(WorkerPool()).validate(TENANT, good_folder(tmp_path))

    assert isinstance(uvloop.run(validate()), Validated)


async def test_what_the_process_has(pool: WorkerPool, tmp_path: Path) -> None:
    """Of its caller: the upload's two files for reading, and the pipes of jobs and replies."""
    folder = hostile_folder(tmp_path, "sleep")
    running = asyncio.create_task(validation(pool, MISBEHAVING).validate(TENANT, folder))
    process = Path(f"/proc/{await confined()}")
    descriptors = {entry.name: os.readlink(entry) for entry in (process / "fd").iterdir()}
    files = {number: target for number, target in descriptors.items() if target.startswith("/")}
    assert len(descriptors) - len(files) == 2
    assert (files.pop("1"), files.pop("2")) == (os.devnull, os.devnull)
    assert set(files.values()) == {str(folder / CONFIG), str(folder / WEIGHTS)}
    flags = {(process / "fdinfo" / number).read_text().split()[3] for number in files}
    assert {int(each, 8) & os.O_ACCMODE for each in flags} == {os.O_RDONLY}
    variables = (process / "environ").read_bytes().split(b"\0")
    assert [each.partition(b"=")[0] for each in variables if each] == [b"PYTHONPATH"], "where the tests lie"
    limits = (process / "limits").read_text()
    for limit in ("core file size 0 0", "file size 0 0", "open files 16 16", "cpu time 120 122"):
        assert f"Max {limit}" in " ".join(limits.split())
    assert os.getpriority(os.PRIO_PROCESS, int(process.name)) == 19
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(("path", "expected"), [(None, {}), ("/srv/lib", {"PYTHONPATH": "/srv/lib"})])
def test_the_environment_only_locates_the_code(
    monkeypatch: pytest.MonkeyPatch, path: str | None, expected: dict[str, str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    assert validation_task().environment == expected


async def confined() -> int:
    """Return the process of the only validation once its filter is set."""
    async with asyncio.timeout(60):
        while not (found := validations()) or "Seccomp:\t2" not in status_of(found[0]):
            await asyncio.sleep(0.01)
    return found[0]


def status_of(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


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
    pool: WorkerPool, tmp_path: Path, behaviour: str, check: str, message: str, limits: dict[str, Any]
) -> None:
    async with asyncio.timeout(60):
        result = await result_of_misbehaving(pool, behaviour, tmp_path, **limits)
    assert isinstance(result, Rejected)
    assert result.check == check
    assert message in result.message and not result.report.passed
    assert not validations()


def validations() -> list[int]:
    return [pid for pid in children(os.getpid()) if b"validation" in command_line(pid)]


async def test_cancelling_kills_the_process_and_makes_room(pool: WorkerPool, tmp_path: Path) -> None:
    checks = validation(pool, MISBEHAVING, concurrent=1)
    running = asyncio.create_task(checks.validate(TENANT, hostile_folder(tmp_path, "sleep")))
    waiting = asyncio.create_task(checks.validate(TENANT, tmp_path))
    async with asyncio.timeout(60):
        while not validations():
            await asyncio.sleep(0.01)
    assert pool.stats(checks.task).waiting == 1
    for task in (waiting, running):
        task.cancel()
    await asyncio.gather(waiting, running, return_exceptions=True)
    assert waiting.cancelled() and running.cancelled()
    assert not validations() and pool.stats(checks.task).waiting == 0


async def test_tenants_alternate_and_the_queue_is_bounded(pool: WorkerPool, tmp_path: Path) -> None:
    bounds = {"concurrent": 1, "concurrent_per_tenant": 1, "queued_per_tenant": 2, "queued": 3}
    checks = validation(pool, MISBEHAVING, **bounds)
    folder, other, ended = hostile_folder(tmp_path, "nap"), UUID(int=2), list[UUID]()

    async def validate(tenant: UUID) -> None:
        await checks.validate(tenant, folder)
        ended.append(tenant)

    tasks = [asyncio.create_task(validate(tenant)) for tenant in (TENANT, TENANT, TENANT, other)]
    await asyncio.sleep(0)
    with pytest.raises(ValidationUnavailable, match="2 uploads of this tenant wait"):
        await checks.validate(TENANT, folder)
    with pytest.raises(ValidationUnavailable, match="3 uploads wait"):
        await checks.validate(UUID(int=3), folder)
    await asyncio.gather(*tasks)
    assert ended == [TENANT, other, TENANT, TENANT]


async def test_a_process_that_cannot_be_confined_reads_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(ValidationUnavailable, match="cannot be confined here: 2 threads"):
        await validation(pool, THREADED).validate(TENANT, good_folder(tmp_path))


async def test_too_many_open_files_are_no_fault_of_the_upload(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    folder = good_folder(tmp_path)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValidationUnavailable, match="cannot be opened now: Too many open files"):
        await validation(pool).validate(TENANT, folder)


async def test_a_defect_of_the_validation_is_logged_by_its_class(pool: WorkerPool, tmp_path: Path) -> None:
    """An import that was not made before the filter was set."""
    with capture_logs() as logs:
        result = await result_of_misbehaving(pool, "fail", tmp_path)
    assert isinstance(result, Rejected) and (result.check, "crashed" in result.message) == ("process", True)
    assert [(each["log_level"], each["error"]) for each in logs] == [("error", "ModuleNotFoundError")]
