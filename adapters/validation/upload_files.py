"""Opens the two files of an uploaded folder, each once; the validation reads these descriptors and no path.

Invariant: the folder has the two files only, each under one name, so that what was read is what will be stored.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from loraplex.adapters.errors import FolderRejected
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE
from loraplex.adapters.storage.safe_files import OpenFile, open_regular

PICKLE_FILE = "adapter_model.bin"
PICKLE_REASON = (
    f"is a pickle, which may run code and is never read here; in its folder, write {WEIGHTS_FILE} by"
    ' `python -c "import torch; from safetensors.torch import save_file; save_file({name: tensor.clone().contiguous() for'
    f" name, tensor in torch.load('{PICKLE_FILE}', map_location='cpu', weights_only=True).items()}}, '{WEIGHTS_FILE}')\"`"
)


class UploadFiles(NamedTuple):
    """The open `adapter_config.json` and `adapter_model.safetensors` of one upload."""

    config: OpenFile
    weights: OpenFile


@contextmanager
def open_upload(folder: Path, limits: AdapterLimits) -> Iterator[UploadFiles]:
    """Open both files until the context ends; no byte of them is read. Raises `FolderRejected`, `OSError`."""
    _check_names(folder)
    with (
        _open_single(folder / CONFIG_FILE, max_bytes=limits.max_config_bytes) as config,
        _open_single(folder / WEIGHTS_FILE, max_bytes=limits.max_weights_bytes) as weights,
    ):
        yield UploadFiles(config, weights)


def _check_names(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        raise FolderRejected(folder.name, f"is not a folder of {CONFIG_FILE} and {WEIGHTS_FILE}")
    names = sorted(os.listdir(folder))
    if PICKLE_FILE in names:
        raise FolderRejected(PICKLE_FILE, PICKLE_REASON)
    for name in names:
        if name not in (CONFIG_FILE, WEIGHTS_FILE):
            raise FolderRejected(
                repr(name[:100]), f"is not one of the two files: {CONFIG_FILE}, {WEIGHTS_FILE}"
            )


@contextmanager
def _open_single(path: Path, *, max_bytes: int) -> Iterator[OpenFile]:
    with open_regular(path, max_bytes=max_bytes) as file:
        if os.fstat(file.descriptor).st_nlink > 1:
            raise FolderRejected(
                path.name, "has another hard link, through which it could change after it was checked"
            )
        yield file
