"""Places of engines: disjoint GPUs and cores where they suffice, shared cores with a warning, too many engines refused."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from loraplex.platform.engines import engine_places
from loraplex.platform.engines.engine_places import (
    EnginePlace,
    core_places,
    physical_cores,
    visible_gpus,
)
from loraplex.platform.engines.engine_places import (
    engine_places as places_of,
)
from loraplex.platform.startup_errors import SettingsError


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with four GPUs and a torch for CUDA."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(engine_places, "DEVICES", tmp_path)
    monkeypatch.setattr(engine_places, "version", lambda name: "2.9.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_one_engine_per_visible_gpu(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [place.environment for place in places_of(None, "auto")] == [
        {"CUDA_VISIBLE_DEVICES": name} for name in "0123"
    ]
    for listed, expected in (("2,0", ("2", "0")), ("GPU-a, -1,3", ("GPU-a",)), ("", ())):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert visible_gpus() == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert [place.gpu for place in places_of(1, "cuda")] == ["3", "1"]
    with pytest.raises(SettingsError, match="`engines`: 3 engines, and 2 GPUs are visible"):
        places_of(3, "cuda")
    monkeypatch.setattr(engine_places, "version", lambda name: "2.9.0+cpu")
    assert visible_gpus() == ()


def test_a_container_counts_its_gpus_from_0(gpus: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2"):
        (gpus / name).unlink()
    assert visible_gpus() == ("0",)


def test_cores_are_divided_where_they_suffice() -> None:
    cores = [(number, number + 5) for number in range(5)]
    first, second = core_places(2, cores)
    assert first.processors == {0, 1, 5, 6} and second.processors == {2, 3, 4, 7, 8, 9}
    assert second.environment == {"OMP_PLACES": "{2,7},{3,8},{4,9}"}
    assert (first.device, EnginePlace().device, EnginePlace(gpu="1").device) == ("cores 0, 1", None, "GPU 1")
    with capture_logs() as logs:
        assert [place.cores for place in core_places(3, cores[:2])] == [((0, 5),), ((1, 6),), ((0, 5),)]
    assert [(line["event"], line["log_level"]) for line in logs] == [("engines share cores", "warning")]


def test_one_engine_on_a_cpu_has_the_whole_machine() -> None:
    assert places_of(None, "cpu") == places_of(1, "cpu") == [EnginePlace()]
    assert EnginePlace().environment == {}


def test_the_cores_of_this_machine_are_disjoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = physical_cores()
    assert sum(map(len, cores)) == len({each for core in cores for each in core})
    for number, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / f"cpu{number}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}/topology/thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(engine_places, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 4})
    assert physical_cores() == [(0, 2), (1,), (4,)]
