"""Write requirements-cpu.txt: the pinned packages of the image with the hashes of their wheels.

Run as `make lock` after constraints.txt or the dependencies in pyproject.toml have changed. The
versions come from constraints.txt. The wheels are those for the image's Python and glibc, on x86-64
and 64-bit ARM.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

LOCK = Path("requirements-cpu.txt")
PYTHON = "3.11"
GLIBC = 36  # minor version of glibc 2 in Debian bookworm
MACHINES = ("x86_64", "aarch64")
HEAD = """\
# Packages of the CPU image with the hashes of their wheels, for Linux on x86-64 and 64-bit ARM.
# Written by `make lock` from pyproject.toml and constraints.txt; do not edit.
"""


def requirements() -> list[str]:
    """Return the direct requirements of the service with ONNX Runtime for the CPU."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["cpu"]]


def normalized(name: str) -> str:
    """Return a package's name in the normalized form of the package index."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path) -> dict[str, str]:
    """Return the versions that a constraints or requirements file pins, by normalized name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {normalized(name): version for name, version in found}


def download(machine: str, folder: Path) -> None:
    """Download the wheels of all requirements and their dependencies for one kind of processor."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(5, GLIBC + 1)]
    platforms += [f"manylinux{year}_{machine}" for year in ("1", "2010", "2014")]
    options = [word for platform in [*platforms, "any"] for word in ("--platform", platform)]
    options += ["--only-binary", ":all:", "--python-version", PYTHON, "--constraint", "constraints.txt"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), *requirements()]
    subprocess.run(command, check=True)


def lock(wheels: Sequence[Path]) -> str:
    """Return the text of the requirements file for these wheels."""
    hashes: dict[tuple[str, str], set[str]] = {}
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        hashes.setdefault((normalized(name), version), set()).add(digest)
    return HEAD + "".join(_entry(name, version, hashes[name, version]) for name, version in sorted(hashes))


def _entry(name: str, version: str, digests: set[str]) -> str:
    return " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in sorted(digests))]) + "\n"


def differences(locked: Mapping[str, str], pinned: Mapping[str, str]) -> list[str]:
    """Return the packages whose locked version is not the pinned one."""
    return sorted(name for name, version in locked.items() if pinned.get(name) != version)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for machine in MACHINES:
            download(machine, Path(scratch, machine))
        text = lock(sorted(Path(scratch).glob("*/*.whl")))
    LOCK.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
