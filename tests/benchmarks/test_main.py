"""The commands of `python -m tests.benchmarks`: their names, their options and the table that lists them."""

import re
from pathlib import Path

import pytest
from tests.benchmarks.__main__ import app
from typer import Typer
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from loraplex.platform.cli import bench

README = Path(__file__).with_name("README.md").read_text()


def names(application: Typer) -> set[str]:
    group = get_command(application)
    assert isinstance(group, TyperGroup)
    return set(group.commands)


def test_the_tables_list_every_command() -> None:
    assert set(re.findall(r"`python -m tests\.benchmarks ([a-z-]+)", README)) == names(app)
    assert set(re.findall(r"`loraplex bench ([a-z-]+)", README)) == names(bench.app)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["gemm", "--variant", "int3"], "--variant"),
        (["gemm", "--dtype", "fp8"], "--dtype"),
        (["attention", "--kv-dtype", "int8"], "--kv-dtype"),
        (["attention", "--shape", "gpt-2"], "--shape"),
        (["lora-kernels", "--rows", "2/4"], "--rows"),
        (["scoring", "--setting", "dtype"], "--setting"),
        (["chaos", "--fault", "flood"], "--fault"),
        (["chaos", "--component", "router"], "--component"),
        (["fair-share", "--adapters", "47"], "--adapters"),
        (["fair-share", "--adapters", "-1"], "--adapters"),
        (["quantization", "--model", "/does/not/exist"], "/does/not/exist"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the demo model is fetched, which takes half a minute."""
    monkeypatch.setattr(bench, "ensure_demo_model", lambda *_: pytest.fail("the demo model was fetched"))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert named in result.output


def test_the_report_is_one_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", "--to", str(page)])
    assert result.exit_code == 0, result.output
    assert "<h2>speed</h2>" in page.read_text()
