"""Sweeps change constants that exist and that launches read."""

import inspect
from importlib import import_module

import pytest
from tests.benchmarks.gpu.sweeps import Sweep, every_value, sweeps

pytest.importorskip("triton")


@pytest.mark.parametrize("sweep", sweeps(is_dry=False), ids=lambda sweep: f"{sweep.module}.{sweep.constant}")
def test_a_swept_constant_is_read_when_its_module_launches(sweep: Sweep) -> None:
    module = import_module(sweep.module)
    assert getattr(module, sweep.constant) in sweep.values
    assert f"={sweep.constant}" in inspect.getsource(module)


def test_each_value_has_names_of_its_own() -> None:
    names = [name for _, _, cases in every_value(is_dry=False) for name in cases]
    assert len(names) == len(set(names)) > 20
