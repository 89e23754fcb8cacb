"""What a validation reads was opened once: later changes of names do not reach it, and nothing stays open."""

import fcntl
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.adapters.validation.good_folder import CONFIG, LIMITS, MODEL, WEIGHTS, write_good

from loraplex.adapters.errors import FolderRejected
from loraplex.adapters.target_modules import BaseModel, adaptable_modules
from loraplex.adapters.validation.result import Rejected, Validated
from loraplex.adapters.validation.upload_files import PICKLE_FILE, open_upload
from loraplex.adapters.validation.validate import validate_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_good(tmp_path / "upload")
    return tmp_path / "upload"


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_the_descriptors_read_only_and_are_not_inherited(folder: Path) -> None:
    with open_upload(folder, LIMITS) as files:
        for file, name in zip(files, (CONFIG, WEIGHTS), strict=True):
            assert os.readlink(f"/proc/self/fd/{file.descriptor}") == str(folder / name)
            assert file.size == (folder / name).stat().st_size
            assert fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            assert not os.get_inheritable(file.descriptor)


def test_files_that_change_places_are_not_read(folder: Path) -> None:
    modules = adaptable_modules(MODEL)

    def validate(swap: bool) -> Validated:
        with open_upload(folder, LIMITS) as files:
            if swap:
                for name in (CONFIG, WEIGHTS):
                    (folder / name).unlink()
                    (folder / name).symlink_to("/etc/passwd")
            result = validate_files(files, BaseModel(modules, "b" * 64), LIMITS)
            assert isinstance(result, Validated)
            return result

    assert validate(swap=False) == validate(swap=True)


def test_the_table_of_names_is_bounded_with_the_configuration(folder: Path) -> None:
    tensors = {f"{'module.' * 40}{name}": each for name, each in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    limits = replace(LIMITS, max_config_bytes=500)
    with open_upload(folder, limits) as files:
        result = validate_files(files, BaseModel(adaptable_modules(MODEL), "b" * 64), limits)
    assert isinstance(result, Rejected) and "take more than 500 bytes" in result.message


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_refusal_leaves_nothing_open(folder: Path, name: str) -> None:
    before = descriptors()
    (folder / name).unlink()
    with pytest.raises(FolderRejected, match="is missing"), open_upload(folder, LIMITS):
        pass
    assert descriptors() == before


def test_the_command_for_a_pickle_converts_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two tensors share memory, as those of a tied model do."""
    tensors = load_file(folder / WEIGHTS)
    name, tensor = next(iter(tensors.items()))
    (folder / WEIGHTS).unlink()
    torch.save(tensors | {f"{name}.shared": tensor, f"{name}.turned": tensor.T}, folder / PICKLE_FILE)
    with pytest.raises(FolderRejected, match="is a pickle") as caught, open_upload(folder, LIMITS):
        pass
    command = shlex.split(caught.value.message.split("`")[1])
    assert command[:2] == ["python", "-c"]
    monkeypatch.chdir(folder)
    exec(command[2], {})
    converted = load_file(folder / WEIGHTS)
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())
    assert len(converted) == len(tensors) + 2
