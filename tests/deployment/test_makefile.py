"""Tests of `make help`, of the version of images and of the wheel, and of signals to a service."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from sightline import __version__
from tests.conftest import LONGEST
from tests.service.conftest import wait_until

MAKEFILE = Path("Makefile").read_text(encoding="utf-8")


def phony_targets() -> list[str]:
    (names,) = re.findall(r"^\.PHONY: (.+)$", MAKEFILE, flags=re.MULTILINE)
    return str(names).split()


def output_of(*words: str) -> str:
    done = subprocess.run(["make", "--no-print-directory", *words], capture_output=True, text=True, check=True)
    return done.stdout


def test_make_alone_prints_the_help() -> None:
    assert output_of() == output_of("help")


def test_the_help_lists_every_target_with_its_description() -> None:
    text = output_of("help")
    listed = re.findall(r"^  ([a-z-]+) +\S.+$", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(phony_targets())
    groups = re.findall(r"^([A-Z][a-z ]+)$", text, flags=re.MULTILINE)
    assert groups == ["Serve", "Train and export", "Develop", "Measure"]


def test_the_files_that_start_first_exist() -> None:
    assert [file for file in LONGEST if not Path(file).exists()] == []


def versions_in(folder: Path) -> list[str]:
    """Return the version of a checkout, and the version of its images."""
    rule = "versions: ; @echo $(VERSION) $(IMAGE_VERSION)"
    return output_of("--directory", str(folder), "--eval", rule, "versions").split()


def test_the_version_is_that_of_the_tag_or_else_of_the_project(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(name, tmp_path)
    assert versions_in(tmp_path) == [__version__, __version__]
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    git("tag", "vanilla")
    assert versions_in(tmp_path) == [__version__, __version__]
    git("tag", "v98.7.6")
    assert versions_in(tmp_path) == ["98.7.6", "98.7.6"]
    wheel = ["make", "--directory", str(tmp_path), "wheel"]
    failed = subprocess.run(wheel, capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    assert f"The tag of this commit is v98.7.6, but the version in pyproject.toml is {__version__}." in failed.stderr
    (tmp_path / "Makefile").write_text(f"{MAKEFILE}\n", encoding="utf-8")
    assert versions_in(tmp_path) == ["98.7.6+dirty", "98.7.6-dirty"]
    git("commit", "--quiet", "--all", "--message", "second")
    commit = git("rev-parse", "--short", "HEAD").strip()
    assert versions_in(tmp_path) == [f"98.7.6+1.g{commit}", f"98.7.6-1.g{commit}"]


def test_the_default_version_of_the_images_is_the_projects() -> None:
    dockerfile = Path("Dockerfile").read_text(encoding="utf-8")
    defaults = re.findall(r"^ARG VERSION=(.+)$", dockerfile, flags=re.MULTILINE)
    assert defaults == [__version__] * dockerfile.count("LABEL ")
    compose = yaml.safe_load(Path("docker-compose.yml").read_text(encoding="utf-8"))
    images = [service["image"] for service in compose["services"].values()]
    tags = {image.split(":", 1)[1] for image in images if image.startswith("sightline")}
    assert tags == {f"${{SERVICE_VERSION:-{__version__}}}"}


def test_the_metadata_names_the_pythons_that_are_tested() -> None:
    (tested,) = re.findall(r"^PYTHONS \?= (.+)$", MAKEFILE, flags=re.MULTILINE)
    project = Path("pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'"Programming Language :: Python :: ([\d.]+)"', project) == tested.split()
    (files,) = re.findall(r"^PYTHON_TESTS \?= ((?:.*\\\n)*.*)$", MAKEFILE, flags=re.MULTILINE)
    named = [word for word in re.findall(r"tests/\S+\.py", files) if "%" not in word]
    assert named and all(Path(word).is_file() for word in named)


def test_the_labels_of_each_image_name_version_revision_and_licence() -> None:
    dockerfile = Path("Dockerfile").read_text(encoding="utf-8")
    labels = re.findall(r"org\.opencontainers\.image\.([a-z]+)=", dockerfile)
    names = ["title", "description", "licenses", "version", "revision"]
    assert labels == 2 * names


def test_a_signal_to_make_ends_the_service(tmp_path: Path) -> None:
    """The environment is a folder whose program writes its process id and arguments, and waits."""
    (tmp_path / "bin").mkdir()
    program, written = tmp_path / "bin" / "sightline", tmp_path / "written"
    program.write_text(f'#!/bin/sh\necho "$$ $@" > {written}.new\nmv {written}.new {written}\nexec sleep 60\n')
    program.chmod(0o755)
    (tmp_path / "ready").touch()
    with subprocess.Popen(["make", "serve", f"SERVE={tmp_path}"], stdout=subprocess.DEVNULL) as make:
        wait_until(written.exists)
        process, *words = written.read_text("utf-8").split()
        assert words == ["serve", "--bundles", "bundles"]
        make.send_signal(signal.SIGTERM)
        make.wait(timeout=30)
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)
