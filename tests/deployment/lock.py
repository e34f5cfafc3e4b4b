"""Write requirements-cpu.txt and requirements-gpu.txt: the pinned packages of the images with the
hashes of their wheels.

Run as `make lock` after constraints.txt, constraints-gpu.txt or the dependencies in pyproject.toml
have changed. The versions come from the constraints. The wheels are those for the image's Python
and glibc. pip reports their hashes, so nothing is downloaded.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PYTHON = "3.11"
# redis needs it before Python 3.11.3. pip decides by the Python that runs it, not by the image's.
EARLIER_PYTHON = ("async-timeout>=4.0.3",)
GLIBC = 36  # minor version of glibc 2 in Debian bookworm


@dataclass(frozen=True)
class Image:
    """An image whose packages are locked."""

    runtime: str  # name of its extra in pyproject.toml
    machines: Mapping[str, str]  # names of its kinds of processors, by their names in wheels
    constraints: tuple[Path, ...]

    @property
    def lock(self) -> Path:
        return Path(f"requirements-{self.runtime}.txt")

    @property
    def head(self) -> str:
        sources = " and ".join(["pyproject.toml", *map(str, self.constraints)])
        return (
            f"# Packages of the {self.runtime.upper()} image with the hashes of their wheels, for Linux on "
            f"{' and '.join(self.machines.values())}.\n"
            f"# Written by `make lock` from {sources}; do not edit.\n"
        )


IMAGES = (
    Image("cpu", {"x86_64": "x86-64", "aarch64": "64-bit ARM"}, (Path("constraints.txt"),)),
    Image("gpu", {"x86_64": "x86-64"}, (Path("constraints.txt"), Path("constraints-gpu.txt"))),
)


def requirements(runtime: str) -> list[str]:
    """Return the direct requirements of the service with ONNX Runtime for a kind of device, and
    with all that its settings can use.
    """
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = (
        requirement for extra in (runtime, "documents", "import", "redis", "traces") for requirement in extras[extra]
    )
    return [*project["dependencies"], *named, *EARLIER_PYTHON]


def normalized(name: str) -> str:
    """Return a package's name in the normalized form of the package index."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(paths: Iterable[Path]) -> dict[str, str]:
    """Return the versions that constraints or requirements files pin, by normalized name."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, flags=re.MULTILINE)
    return {normalized(name): version for name, version in found}


def resolve(image: Image, machine: str) -> list[dict[str, object]]:
    """Return pip's report of all packages that an image needs for one kind of processor."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(5, GLIBC + 1)]
    platforms += [f"manylinux{year}_{machine}" for year in ("1", "2010", "2014")]
    options = [word for platform in [*platforms, "any"] for word in ("--platform", platform)]
    options += ["--only-binary", ":all:", "--python-version", PYTHON, "--dry-run", "--ignore-installed", "--quiet"]
    options += [word for path in image.constraints for word in ("--constraint", str(path))]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        options += ["--target", scratch, "--report", str(report)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *requirements(image.runtime)], check=True)
        installed: list[dict[str, object]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return installed


def lock(packages: Iterable[Mapping[str, object]]) -> str:
    """Return the entries of a requirements file for the packages of pip's reports."""
    hashes: dict[tuple[str, str], set[str]] = {}
    for package in packages:
        match package:
            case {
                "metadata": {"name": str(name), "version": str(version)},
                "download_info": {"archive_info": {"hashes": {"sha256": str(digest)}}},
            }:
                hashes.setdefault((normalized(name), version), set()).add(digest)
            case _:
                raise ValueError(f"pip reports a package without a SHA-256: {package}")
    return "".join(_entry(name, version, hashes[name, version]) for name, version in sorted(hashes))


def _entry(name: str, version: str, digests: set[str]) -> str:
    return " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in sorted(digests))]) + "\n"


def differences(locked: Mapping[str, str], pinned: Mapping[str, str]) -> list[str]:
    """Return the packages whose locked version is not the pinned one."""
    return sorted(name for name, version in locked.items() if pinned.get(name) != version)


def main() -> None:
    for image in IMAGES:
        packages = [package for machine in image.machines for package in resolve(image, machine)]
        image.lock.write_text(image.head + lock(packages), encoding="utf-8")


if __name__ == "__main__":
    main()
