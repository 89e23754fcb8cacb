"""The image: linted, made from pinned versions, without root, and with what its first stage needs."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from tests.deploy.dockerfile import DOCKERFILE, image, instructions, stages
from tests.deploy.settings_named import require_setting_variable

ROOT = Path(__file__).parents[2]


def test_hadolint_finds_nothing() -> None:
    result = subprocess.run(
        ["hadolint", str(DOCKERFILE)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_image_runs_as_a_numeric_user_that_owns_its_volumes(target: str) -> None:
    built = image(target)
    assert built.uid >= 10_000
    made = " ".join(built.all("RUN"))
    assert f"--uid {built.uid}" in made
    for volume in built.listed("VOLUME"):
        assert re.search(rf"install -d -o {built.uid} -g {built.uid} -m 0700 [^&]*{volume}\b", made)
    assert built.entry_point == ["loraplex"]
    assert built.health_check[0] == "python"
    assert "/livez" in built.health_check[-1]


def test_packages_are_installed_by_the_constraints_and_never_editable() -> None:
    installs = [each.text for each in instructions() if each.name == "RUN" and "pip install" in each.text]
    assert len(installs) == 2
    for text in installs:
        assert text.count("pip install") == text.count("-c /constraints.txt") == 2
        assert " -e " not in text
        assert "[${EXTRAS}]" in text


def test_every_extra_of_an_image_exists_and_engines_on_ray_have_theirs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"EXTRAS=([a-z,]+[a-z])", DOCKERFILE.read_text())
    assert named == ["otel,ray", "otel,cuda,ray", "otel", "otel,cuda"]
    for extras in named:
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert "--build-arg EXTRAS=otel,cuda,ray" in (ROOT / "deploy" / "ray" / "README.md").read_text()


def test_every_base_image_can_be_pinned_by_digest() -> None:
    names = stages()
    assert {base for base, _ in names.values()} == {"${PYTHON_IMAGE}", "runtime"}
    (argument,) = [each.text for each in instructions() if each.name == "ARG" and "PYTHON_IMAGE" in each.text]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.\d+-slim-\w+", argument)


def test_the_builder_gets_what_it_copies_and_no_more() -> None:
    allowed = {
        line[1:] for line in Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = {
        name
        for each in instructions()
        if each.name == "COPY" and "--from" not in each.text
        for name in each.text.split()[:-1]
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_the_variables_of_the_image_are_settings() -> None:
    for name in image("cuda").environment:
        if name.startswith("LORAPLEX_"):
            require_setting_variable(name)
