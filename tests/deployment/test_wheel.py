"""The wheel of a release: its name, command, files and version, and that it runs when installed."""

import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from sightline import __version__

FOLDERS = ("export", "loadtest", "model", "service", "translation")  # packages below `sightline`
WHEEL = f"sightline_serving-{__version__}-py3-none-any.whl"


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked_files() -> set[str]:
    command = ["git", "ls-files", *FOLDERS, "sightline"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(listed.split()) - {f"sightline/{name}" for name in FOLDERS}  # without the links


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel of this working tree is installed, without its dependencies."""
    pytest.importorskip("setuptools", minversion="77", reason="building the wheel needs setuptools 77")
    source, built, target = (tmp_path_factory.mktemp(name) for name in ("source", "built", "target"))
    for name in (*tracked_files(), "pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, source / name)
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", built, source, cwd=source)
    (wheel,) = built.iterdir()
    assert wheel.name == WHEEL
    run(*pip, "install", "--no-deps", "--no-compile", "--target", target, wheel, cwd=source)
    return target


def distribution_in(folder: Path) -> Distribution:
    (found,) = distributions(path=[str(folder)])
    return found


def test_the_wheel_has_its_name_and_the_command(installed: Path) -> None:
    found = distribution_in(installed)
    assert (found.name, found.version) == ("sightline-serving", __version__)
    commands = {(one.name, one.value) for one in found.entry_points.select(group="console_scripts")}
    assert commands == {("sightline", "sightline.__main__:main")}
    assert {"cpu", "gpu", "import", "train"} <= set(found.metadata.get_all("Provides-Extra") or ())


def test_the_wheel_has_every_file_of_its_packages(installed: Path) -> None:
    files = {
        str(path) for path in distribution_in(installed).files or () if path.suffix and "dist-info" not in str(path)
    }
    assert files == {f"sightline/{name.removeprefix('sightline/')}" for name in tracked_files()}


def test_an_installed_wheel_runs_beside_modules_of_the_user(installed: Path, tmp_path: Path) -> None:
    """Folders and modules of the user may have the names of the folders of this repository."""
    for name in FOLDERS:
        (tmp_path / f"{name}.py").write_text("raise AssertionError('a module of the user was imported')")
    program = (
        f"import sys; sys.path.insert(1, {str(installed)!r}); import sightline.__main__ as program\n"
        "import sightline.export.pipeline, sightline.commands.load, sightline.model.config, sightline.service.app\n"
        f"assert program.__file__.startswith({str(installed)!r}); program.main(['--version'])"
    )
    assert run("-c", program, cwd=tmp_path) == f"sightline {__version__}\n"


def test_the_readme_installs_this_release() -> None:
    assert f"pip install './build/{WHEEL}[cpu,import]'" in Path("README.md").read_text(encoding="utf-8")
