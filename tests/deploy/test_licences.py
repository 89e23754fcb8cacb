"""Every distribution has the licence and the notices of what it contains."""

import re
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTICE = (ROOT / "deploy" / "NOTICE").read_text()
VENDORED_LINE = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|", re.MULTILINE)


def vendored() -> list[tuple[str, str, str]]:
    """(path, package, licence) of every vendored file."""
    return [
        (str((table.parent / file).relative_to(ROOT)), package, licence)
        for table in sorted(ROOT.glob("platform/**/VENDORED.md"))
        for file, package, licence in VENDORED_LINE.findall(table.read_text())
    ]


def test_the_notice_names_every_vendored_file_with_its_package_and_licence() -> None:
    lines = [re.split(r"\s{2,}", line) for line in NOTICE.splitlines() if line.count("  ") >= 3]
    noticed = {(file, package, licence) for file, package, licence, _ in lines}
    assert len(vendored()) >= 5
    assert set(vendored()) <= noticed
    for file, _, _, text in lines:
        assert (ROOT / file).exists()
        assert (ROOT / text).stat().st_size > 500


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_licence_and_notices_are_in_every_distribution(kind: str, wheel: Path) -> None:
    if kind == "wheel":
        names = zipfile.ZipFile(wheel).namelist()
    else:
        (archive,) = wheel.parent.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            names = opened.getnames()
    wanted = {"LICENSE", "NOTICE"} | {
        Path(text).name for text in re.findall(r"platform/\S+\.LICENSE\.txt", NOTICE)
    }
    folder = ".dist-info/licenses/" if kind == "wheel" else ""
    assert wanted <= {Path(name).name for name in names if folder in name}
    if kind == "wheel":
        metadata = (
            zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("METADATA"))).decode()
        )
        assert "License-Expression: Apache-2.0" in metadata
        assert "License-File: deploy/LICENSE" in metadata


def test_the_wheel_has_every_file_that_the_code_reads(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("adapters", "engine", "grammar", "migrations", "platform", "tenants"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".md" and path.parent.name != "__pycache__":
                assert f"loraplex/{path.relative_to(ROOT)}" in names
